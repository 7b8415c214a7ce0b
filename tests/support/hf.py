"""fastbert models beside transformers' own with the same weights; batches.py has what feeds both."""

from __future__ import annotations

import copy
import functools
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from seeds import torch_generator
from theirs import mend
from torch import nn
from torch.overrides import TorchFunctionMode

from fastbert import families
from fastbert.config import EncoderConfig
from fastbert.families import schema
from fastbert.families.schema import PreTraining, ReplacedTokens
from fastbert.models.classes import CLASSES

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


IS_OLD = Version(transformers.__version__) < Version("5.24")
FAMILIES = tuple(families.FAMILIES)
MODELS = sorted(CLASSES)  # (model_type, head)
models_axis = pytest.mark.parametrize(("model_type", "head"), MODELS, ids=[f"{m}-{h}" for m, h in MODELS])
families_axis = pytest.mark.parametrize("model_type", FAMILIES)
# Their modules are BERT's, RoBERTa's or Nomic BERT's but for names, and how layers put them together.
ALIKE = ("camembert", "electra", "ernie", "gte", "xlm-roberta", "jina_embeddings_v3", "xlm-roberta-xl", "megatron-bert")
ALIKE = (*ALIKE, "rembert", "roberta-prelayernorm")


def is_alike(p: dict[str, Any]) -> bool:
    """For `left_to_full`, of what goes by modules and not by their names, which others ask of every family."""
    return p["model_type"] in ALIKE


def is_left_out(p: dict[str, Any], place: int = 0, of: int = 2) -> bool:
    """For `left_to_full`: every head but one of `of`, other ones in the next family; with `place` on another axis,
    every case of a head but one of `of`.
    """
    return (FAMILIES.index(p["model_type"]) + place_of_head(p) + place) % of != 0


def place_of_head(p: dict[str, Any]) -> int:
    """Which of its family's heads it is."""
    return [head for model_type, head in MODELS if model_type == p["model_type"]].index(p["head"])


def hf_config_class(model_type: str) -> type[transformers.PretrainedConfig]:
    """Skips the test where transformers is older than the family: the oldest that is promised lacks two."""
    if model_type not in transformers.CONFIG_MAPPING and IS_OLD:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    return transformers.CONFIG_MAPPING[model_type]


def hf_config(config: EncoderConfig) -> transformers.PretrainedConfig:
    theirs = hf_config_class(config.model_type).from_dict(config.to_dict())
    theirs._attn_implementation = "eager"
    if vars(theirs).get("use_cache"):  # decoders return what encoders have no use for
        theirs.use_cache = False
    return theirs


def hf_class(model_type: str, head: str) -> type[nn.Module]:
    hf_config_class(model_type)  # whether there is one
    return getattr(transformers, CLASSES[model_type, head].__name__)


def _before_relu(config: EncoderConfig) -> tuple[str, ...]:
    """How the names of biases end that a ReLU follows: layers' first GEMM, and heads' dense ones."""
    found = []
    if config.hidden_act == "relu":
        names = [spec.names for spec in config.layer_specs]
        found += [f".{name.up if name.gate is None else name.gate}" for name in names]
    for head in config.family.heads.values():
        head = head.masked_lm if isinstance(head, PreTraining) else head
        act = config.hidden_act if isinstance(head, ReplacedTokens) else getattr(head, "activation", None)
        if schema.value_of(act, config) == "relu" and head.dense is not None:
            found.append(head.dense)
    return tuple(f"{path}.bias" for path in found)


# Their terms of the scores have a deviation of 1 and more, as those of the words: with less, a wrong sign would pass.
_OF_DISTANCES = ("encoder.rel_embeddings.weight", "encoder.LayerNorm.weight", "encoder.relative_attention_bias.weight")


@torch.no_grad()
def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights and biases large enough for every error to show; a norm's too.

    Before a ReLU, biases open or shut each unit for good: its derivative jumps at 0, where any rounding flips it.
    """
    generator = torch_generator(seed)
    before_relu = _before_relu(EncoderConfig.from_dict(model.config.to_dict()))
    norms = {f"{name}.weight" for name, module in model.named_modules() if type(module).__name__.endswith("Norm")}
    for name, parameter in sorted(model.named_parameters()):
        if not parameter.requires_grad:
            continue  # RoFormer's table of sines and cosines: it would turn by no distance any more
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith(_OF_DISTANCES):
            parameter.copy_(3 * noise)
        elif name.endswith(before_relu):
            parameter.copy_(noise.sign() * 8)
        elif name in norms:
            parameter.copy_(1 + 0.3 * noise)
        else:
            parameter.copy_(noise * (0.2 if parameter.dim() == 1 else 0.8 * parameter.shape[1] ** -0.5))
    return model


@dataclass
class Trio:
    """One set of weights three times: fastbert's model, transformers' in the same dtype, transformers' in float64."""

    ours: nn.Module
    baseline: nn.Module
    oracle: nn.Module


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A model in another dtype, as from_pretrained makes it: rotary embedding's frequencies stay what they are."""
    frequencies = [(m, m._buffers.copy()) for m in model.modules() if any("inv_freq" in name for name in m._buffers)]
    model.to(dtype)
    for module, buffers in frequencies:
        module._buffers.update(buffers)
    return model


class _Float64(TorchFunctionMode):
    """What is float64 stays so, where transformers' code says float32: in softmax, RMSNorm and rotary embedding. There
    integers, which are positions, become float64, too.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.float and not args[0].is_floating_point():
            return args[0].double()
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype is torch.float64:
            if func is torch.Tensor.float or (
                func is torch.Tensor.to and torch.float32 in (*args[1:], *kwargs.values())
            ):
                return args[0]
            if kwargs.get("dtype") is torch.float32:
                del kwargs["dtype"]
        return func(*args, **kwargs)


def make_oracle(model: nn.Module) -> nn.Module:
    """A copy in float64, the angles of rotary embedding included: at column 2,000 float32 rounds them by 6e-5, and
    fastbert turns a text that has padding on its left by its own places, which are smaller.
    """
    oracle = copy.deepcopy(model).to(torch.float64)
    forward = oracle.forward

    @functools.wraps(forward)
    def in_float64(*args, **kwargs):
        with _Float64():
            return forward(*args, **kwargs)

    oracle.forward = in_float64
    return oracle


def make_hf(config: EncoderConfig, head: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """transformers' model with random weights, in train mode (there is no dropout to make a difference)."""
    model = cast(randomise(hf_class(config.model_type, head)(hf_config(config)), seed), dtype).train()
    return model


def make_ours(config: EncoderConfig, head: str, theirs: nn.Module) -> nn.Module:
    """fastbert's model with the weights of `theirs`, by state_dict."""
    ours = CLASSES[config.model_type, head](config).to(next(theirs.parameters()).dtype)
    assert set(ours.state_dict()) == set(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    return ours.train()


def make_trio(config: EncoderConfig, head: str, dtype: torch.dtype, seed: int = 0) -> Trio:
    baseline = make_hf(config, head, dtype, seed)
    mend(baseline)
    return Trio(make_ours(config, head, baseline), baseline, make_oracle(baseline))


def random_like(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Standard normal values that bf16 holds exactly."""
    return torch.randn(shape, generator=torch_generator(seed)).bfloat16().double()


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Every parameter's gradient; shared parameters under both of their names."""
    return {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}


def leaf_gradients(grads: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """One tensor a leaf, its weight and its bias; query, key and value together.

    A tensor of few elements, or one that cancels to nearly 0 (the key's bias, which softmax cannot see, and the scores'
    gradient where attention is flat), holds a rounding error that says nothing beside another rounding error.
    """
    leaves: dict[str, list[torch.Tensor]] = {}
    for name, grad in grads.items():
        leaf = re.sub(r"\.(query|key|value|[qkv]_lin|[qkv]_proj)$", ".qkv", name.rpartition(".")[0])
        leaves.setdefault(leaf, []).extend([] if grad is None else [grad.flatten()])
    return {leaf: torch.cat(parts) for leaf, parts in leaves.items() if parts}
