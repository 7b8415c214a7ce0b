"""Reads and writes Hugging Face checkpoints, folders and hub ids, with their names of files and keys, bit for bit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from fastbert.checkpoint.dtypes import common_dtype, is_finite
from fastbert.checkpoint.layouts import to_tree
from fastbert.checkpoint.saving import config_of, of_one_save
from fastbert.checkpoint.weight_files import read_weights, some
from fastbert.config import EncoderConfig
from fastbert.errors import CheckpointError, ConfigError
from fastbert.native.memory import give_back

if TYPE_CHECKING:
    from fastbert.models.base import PreTrainedModel

# Names of earlier releases of transformers and of the original TensorFlow port -> today's.
_OLD_NAMES = (
    (re.compile(r"LayerNorm\.gamma$"), "LayerNorm.weight"),
    (re.compile(r"LayerNorm\.beta$"), "LayerNorm.bias"),
)
# Buffers that old checkpoints carry and no model needs.
_IGNORED = re.compile(r"(^|\.)embeddings\.(position_ids|token_type_ids)$")


def read_config(folder: Path) -> EncoderConfig:
    """A folder's config. Raises ConfigError: it cannot be run. CheckpointError: the weights are another config's."""
    return of_one_save(folder, lambda metadata: config_of(folder, metadata))


def is_classifier(config: EncoderConfig) -> bool:
    """Whether a checkpoint has a head for sequences: labels, a score, the relevance of a pair."""
    return any(name.endswith("ForSequenceClassification") for name in config.extra.get("architectures") or ())


def read_checkpoint(folder: Path, config: EncoderConfig | None = None) -> tuple[EncoderConfig, dict[str, torch.Tensor]]:
    """The config and the tensors of a folder, of one save both; raises as `read_config` and `read_weights`.

    A `config` that is given stands for the folder's, and nothing is compared with it.
    """

    def read(metadata):
        chosen = config_of(folder, metadata) if config is None else config
        return chosen, to_tree(read_weights(folder), chosen)

    return of_one_save(folder, read)


def check_layers(config: EncoderConfig, weights: dict[str, torch.Tensor], source: str) -> None:
    """Raise CheckpointError unless a checkpoint has the layers that the config asks for, neither fewer nor more.

    Before the model is built, which takes time for every layer. Layers that share their weights count once.
    """
    family = config.family
    layer = re.escape(family.path_of_layer(config, 0)).replace("0", r"\d+")
    pattern = re.compile(rf"(?:module\.)?(?:{re.escape(family.prefix)}\.)?({layer})\.")
    layers = {match[1] for match in map(pattern.match, weights) if match is not None}
    count = config.num_unique_layers
    if layers and len(layers) == count and layers == {family.path_of_layer(config, i) for i in range(count)}:
        return
    if layers or count:
        held = some(sorted(layers), 4) if layers else f"none, but {some(sorted(weights), 4)}"
        raise CheckpointError(
            f"{source}: the config contradicts the weights: it has {count} different layers, the weights hold"
            f" {len(layers)}: {held}"
        )


def rename_keys(
    weights: dict[str, torch.Tensor], model_keys: set[str], prefix: str, ignored: tuple[str, ...] = ()
) -> dict[str, torch.Tensor]:
    """A checkpoint's keys as the model names them: old names made new, the base model's prefix added or taken away.

    Without those that no model needs: buffers, and what ends in one of `ignored`.
    """
    renamed = {}
    for key, tensor in weights.items():
        key = key.removeprefix("module.")  # left by DataParallel
        for old, new in _OLD_NAMES:
            key = old.sub(new, key)
        if key not in model_keys:
            for candidate in (f"{prefix}.{key}", key.removeprefix(f"{prefix}.")):
                if candidate in model_keys:
                    key = candidate
        if key in model_keys or not (_IGNORED.search(key) or key.endswith(ignored)):
            renamed[key] = tensor
    return renamed


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.equal(b)


def load_weights(
    model: PreTrainedModel,
    weights: dict[str, torch.Tensor],
    source: str,
    dtype: torch.dtype | None,
    ignore_mismatched_sizes: bool = False,
) -> None:
    """Put a checkpoint's tensors into a model that was built on the meta device.

    Mis-shaped keys raise CheckpointError, or are initialised with `ignore_mismatched_sizes`; missing ones are
    initialised and unexpected ones left out. A warning names them all, as transformers does when a head is new. An int8
    layer is there whole, or that is an error.
    """
    int8 = model.place_int8()
    own = model.state_dict()
    weights = rename_keys(weights, set(own), model.family.prefix, model.family.ignored_keys)
    in_float32 = [key for key in model.frequency_keys() if key in weights]  # as transformers, whatever the dtype
    weights |= {key: weights[key].float() for key in in_float32}
    said: list[str] = []
    tied = _settle_tied(model, weights, said)
    fresh = _check_shapes(own, weights, source, ignore_mismatched_sizes, said)
    common, odd = common_dtype(model, weights, in_float32) if dtype is None else (dtype, [])
    if common is torch.float16 and model.family.overflows_float16:
        raise ConfigError(
            f"{source}: float16 is too narrow for {model.family.model_type}, whose hidden states leave its range; load"
            " it with dtype='bfloat16' or 'float32'"
        )
    if odd:
        said.append(f"converted to {common}: {some([f'{key} ({weights[key].dtype})' for key in odd])}")
        weights.update({key: weights[key].to(common) for key in odd})
    _own_memory(model, own, weights, source, dtype)
    missing = sorted(key for key in own if key not in weights and key not in tied and key not in fresh)
    unexpected = sorted(key for key in weights if key not in own)
    if len(missing) == len(own) - len(tied):
        raise CheckpointError(f"{source}: none of its keys is one of the model's; it has {some(unexpected, 4)}")
    buffers = dict(model.named_buffers())  # of int8 layers, and frequencies, which the config has, too
    unfilled = [key for key in missing if key in buffers and buffers[key].is_meta]  # not a user's own
    if absent := [key for key in unfilled if key not in model.frequency_keys()]:
        raise CheckpointError(f"{source}: the config asks for int8 layers, whose tensors are missing: {some(absent)}")
    try:
        model.load_state_dict({k: t for k, t in weights.items() if k in own}, strict=False, assign=True)
    except RuntimeError as error:  # an int8 layer's scale is out of bounds
        raise CheckpointError(f"{source}: {' '.join(str(error).split())}") from None
    _initialise_rest(model, {*fresh, *missing}, common)
    if dtype is not None:  # parameters have it; a buffer that a subclass has made has the one that it was made in
        loaded = {key: b for key, b in model.named_buffers() if key in weights and key not in model.frequency_keys()}
        to_cast = {id(b) for b in loaded.values() if b.is_floating_point()}
        model._apply(lambda t: t.to(dtype) if id(t) in to_cast else t)
    if int8:
        model.requires_grad_(False)
    model.missing_keys, model.unexpected_keys, model.mismatched_keys = missing, unexpected, list(fresh.values())
    give_back()  # of a model that this one replaces, say
    if missing:
        said.append(f"not in the checkpoint, so initialised: {some(missing)}")
    if unexpected:
        said.append(f"in the checkpoint, but not used: {some(unexpected)}")
    if said:
        import warnings

        warnings.warn(f"{type(model).__name__} from {source}: {'; '.join(said)}", stacklevel=4)


def _settle_tied(model: PreTrainedModel, weights: dict[str, torch.Tensor], said: list[str]) -> dict[str, str]:
    """Leave one tensor in `weights` where two keys are tied. Returns what is tied: copy -> original.

    Where the checkpoint holds two different tensors, nothing is: its tensors win over the config, as in transformers.
    """
    tied = model.tied_keys()
    for copy, original in tied.items():
        if original not in weights and copy in weights:
            weights[original] = weights[copy]
    both = [(copy, original) for copy, original in tied.items() if copy in weights]
    if differing := [copy for copy, original in both if not _same(weights[copy], weights[original])]:
        said.append(f"not tied, because the checkpoint holds two different tensors: {some(differing)}")
        model.config.set_checked(tie_word_embeddings=False)
        for copy, original in tied.items():
            if copy not in weights and original in weights:
                weights[copy] = weights[original]
        return {}
    for copy in tied:
        weights.pop(copy, None)
    return tied


def _check_shapes(
    own: dict[str, torch.Tensor],
    weights: dict[str, torch.Tensor],
    source: str,
    ignore_mismatched_sizes: bool,
    said: list[str],
) -> dict[str, tuple[str, torch.Size, torch.Size]]:
    """Raises CheckpointError where a tensor has not the model's shape or kind of dtype. With `ignore_mismatched_sizes`
    those of another shape are taken out of `weights`, and returned: (key, the checkpoint's shape, the model's) by key.
    """
    there = [key for key in own if key in weights]
    shapes = {key: (key, weights[key].shape, own[key].shape) for key in there if weights[key].shape != own[key].shape}
    wrong = [f"{key} is {tuple(has)}, the config asks for {tuple(asked)}" for key, has, asked in shapes.values()]
    if ignore_mismatched_sizes and wrong:
        said.append(f"of another shape, so initialised: {some(wrong)}")
        for key in shapes:
            del weights[key]
        wrong = []
    wrong += [
        f"{key} is {weights[key].dtype}, the config asks for {own[key].dtype}"
        for key in there
        if key in weights and weights[key].is_floating_point() != own[key].is_floating_point()
    ]
    if wrong:
        raise CheckpointError(f"{source}: the config contradicts the weights: {some(wrong, 4)}")
    return shapes


def _own_memory(
    model: PreTrainedModel,
    own: dict[str, torch.Tensor],
    weights: dict[str, torch.Tensor],
    source: str,
    dtype: torch.dtype | None,
) -> None:
    """Give every tensor memory of its own, once, in the dtype that is asked for. Raises CheckpointError if values are
    not finite in it.

    A checkpoint's tensors may share storage, and safetensors' are unaligned maps of the file, which change when it
    does. Buffers keep their dtype here: they say in `_apply` whether they follow it, and an int8 layer's scales do not.
    """
    parameters = {key for key, _ in model.named_parameters(remove_duplicate=False)}
    for key in own:
        if key not in weights:
            continue
        goal = dtype if dtype is not None and weights[key].is_floating_point() else weights[key].dtype
        new_dtype = goal if key in parameters else weights[key].dtype
        weights[key] = weights[key].to(new_dtype, copy=True, memory_format=torch.contiguous_format)
        if goal.is_floating_point and not is_finite(weights[key].to(goal)):
            raise CheckpointError(f"{source}: tensor {key} holds values that are not finite in {goal}")


def _initialise_rest(model: PreTrainedModel, absent: set[str], dtype: torch.dtype | None) -> None:
    """Initialise what is `absent` from the checkpoint, in its dtype; and tie what is tied."""
    model.tie_weights()  # first, so that a copy is not made anew
    allocated = _give_memory(model, dtype)
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    new = [*allocated, *(tensors[key] for key in absent)]
    model.draw_weights({id(t) for t in tensors.values()}.difference(map(id, new)))
    model.tie_weights()
    model.mark_initialised()


def without_pooler(model: PreTrainedModel, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights that are none of the pooler's."""
    pooler = model.family.pooler
    return {key: t for key, t in weights.items() if pooler is None or f".{pooler}." not in f".{key}"}


def _give_memory(model: PreTrainedModel, dtype: torch.dtype | None) -> list[torch.Tensor]:
    """To what the checkpoint did not hold, in its dtype. Returns these tensors.

    By torch.empty: empty_like of a tensor on "meta" imports sympy, which takes 0.2 s.
    """
    allocated: list[torch.Tensor] = []
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None and p.is_meta:
                empty = torch.empty(p.shape, device="cpu", dtype=dtype or p.dtype)
                module._parameters[name] = parameter = nn.Parameter(empty, requires_grad=p.requires_grad)
                allocated.append(parameter)
        for name, b in module._buffers.items():
            if b is not None and b.is_meta:
                module._buffers[name] = empty = torch.empty(b.shape, device="cpu", dtype=b.dtype)
                allocated.append(empty)
    return allocated
