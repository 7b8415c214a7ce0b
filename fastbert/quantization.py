"""fastbert.quantize: the layers of a live model in int8, in place; and what that costs in accuracy, layer by layer.

Weights are rounded to 255 steps a row, activations to 255 steps a token while the model runs (Dettmers et al. 2022,
"LLM.int8()", section 2.1). docs/int8.md has what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import nn

from fastbert.acceleration import _Forward, _live
from fastbert.config import ConfigError, EncoderConfig
from fastbert.layers.fused import forget_layers
from fastbert.layers.leaves import get_leaf, is_plain, place
from fastbert.layers.quantized import QuantizedLinear
from fastbert.models.base import EncoderModel
from fastbert.models.family import Family
from fastbert.models.quantized import ENTRY, entry_of
from fastbert.ops._library import extension_error
from fastbert.packing import InputError
from fastbert.sentences import SentenceEncoder

Quantizable = TypeVar("Quantizable", bound="nn.Module | SentenceEncoder")


def quantize(
    model: Quantizable,
    dtype: str | torch.dtype = "int8",
    *,
    keep: str | Iterable[str] = (),
    calibration: Iterable[Any] | None = None,
) -> Quantizable:
    """Make the Linear leaves of the encoder's layers int8, in place, and return `model`, in eval mode.

    Those are query, key, value, attention output and both of the feed-forward. Heads, pooler, embeddings and LayerNorms
    stay in floating point, and so does attention itself: all of that becomes bfloat16 where the device multiplies
    bfloat16, float32 elsewhere. Each layer's old weight is freed as soon as its int8 one is there. Nothing can be
    trained afterwards: parameters are frozen, and a forward pass in train mode raises RuntimeError.

    Args:
        model: a fastbert model, with or without a head; a SentenceEncoder; a transformers model that
            fastbert.accelerate has sped up; or any module that holds some of these.
        dtype: "int8".
        keep: names of layers, as model.named_modules() has them, that stay in floating point; fnmatch patterns
            ("*.layer.0.*", "*.output.dense"). The name of a module keeps all that is below it.
        calibration: None measures every token while the model runs, which is most accurate. Inputs (as
            `quantization_error` takes them) fix one scale for each layer instead, from the largest value that it gets
            while they run through the model: measuring is saved, and what is larger later on is cut to it.

    Raises (the model is then as it was):
        TypeError: no such model. ConfigError: an unknown dtype, a pattern that names no layer, a layer that is int8
        already or is no plain nn.Linear (hooks, LoRA), a weight that is not finite. InputError: calibration without
        inputs, or with values that are not finite.
    """
    if dtype not in ("int8", torch.int8):
        raise ConfigError(f"unknown dtype {dtype!r}; fastbert quantises to int8")
    module = _module_of(model)
    leaves = _linears(module, [keep] if isinstance(keep, str) else list(keep))
    scales = {} if calibration is None else _input_scales(model, leaves, calibration)
    encoders = list(_encoders(module))
    device = next(iter(leaves.values())).weight.device if leaves else torch.device("cpu")
    for _, root, _, _ in encoders:
        forget_layers(root)
    with torch.inference_mode(False):  # tensors made in inference mode keep no version of what is written to them
        for name in list(leaves):
            place(module, name, QuantizedLinear.from_linear(leaves.pop(name), scales.get(name, 0.0)))
        module.to(_companion_dtype(device)).requires_grad_(False).eval()
    for _, root, family, config in encoders:
        entry = entry_of(root, family, config)
        if entry is not None and not isinstance(root, EncoderModel):
            setattr(root.config, ENTRY, entry)  # which is what transformers' save_pretrained writes
    return model


def quantization_error(model: nn.Module | SentenceEncoder, inputs: Iterable[Any]) -> dict[str, float]:
    """What int8 would cost each layer of a model that is still in floating point, by its name, the largest first.

    The cost is ||int8 output - output|| / ||output|| over all tokens of the inputs, where the layer gets what it gets
    in the model as it is: errors of earlier layers are not in it. The names are those that `quantize(keep=...)` takes.

    Args:
        model: as for `quantize`; it is not changed.
        inputs: dicts of the model's keyword arguments; for a SentenceEncoder texts.

    Raises as `quantize` does.
    """
    leaves = _linears(_module_of(model), [])
    int8 = {name: QuantizedLinear.from_linear(leaf).eval() for name, leaf in leaves.items()}
    squares: dict[str, torch.Tensor] = {}

    def observe(name: str, x: torch.Tensor, out: torch.Tensor) -> None:
        pair = torch.stack([int8[name](x).double() - out.double(), out.double()])
        squares[name] = squares.get(name, 0) + pair.flatten(1).square().sum(1)

    _watch(model, leaves, inputs, observe)
    errors = {name: (error / total).sqrt().item() if total else 0.0 for name, (error, total) in squares.items()}
    return dict(sorted(errors.items(), key=lambda item: -item[1]))


def is_quantized(model: nn.Module) -> bool:
    return any(isinstance(module, QuantizedLinear) for module in model.modules())


def _module_of(model: Any) -> nn.Module:
    module = model.model if isinstance(model, SentenceEncoder) else model
    if not isinstance(module, nn.Module) or not any(_encoders(module)):
        hint = "; call fastbert.accelerate on it first" if hasattr(model, "config") else ""
        raise TypeError(f"{type(model).__name__} is no model of fastbert, nor one that it has accelerated{hint}")
    return module


def _encoders(model: nn.Module) -> Iterator[tuple[str, Any, Family, EncoderConfig]]:
    """(name, base model, family, config) of every base model in a tree, ours or transformers'."""
    for name, module in model.named_modules():
        forward = module.__dict__.get("forward")
        if isinstance(module, EncoderModel):
            yield name, module, module.family, module.running_config
        elif isinstance(forward, _Forward):
            yield name, module, forward.plan.family, _live(module, forward.plan)[0]


def _linears(model: nn.Module, keep: list[str]) -> dict[str, nn.Linear]:
    """The Linear leaves of the layers, by name, without those that `keep` names. Raises ConfigError."""
    names = {
        f"{name}.{path}".removeprefix("."): get_leaf(root, path)
        for name, root, family, config in _encoders(model)
        for path in family.linear_paths(config)
    }
    matches = {pattern: [name for name in names if _names(pattern, name)] for pattern in keep}
    for pattern, matched in matches.items():
        if not matched:
            raise ConfigError(f"keep: {pattern!r} names no layer; they are called {', '.join(list(names)[:6])}, ...")
    leaves: dict[str, nn.Linear] = {}
    for name, leaf in names.items():
        if any(name in matched for matched in matches.values()):
            continue
        if isinstance(leaf, QuantizedLinear):
            raise ConfigError(f"{name} is int8 already")
        if not is_plain(leaf, nn.Linear):
            raise ConfigError(
                f"{name} is a {type(leaf).__name__} with hooks or a forward of its own, or no nn.Linear: merge adapters"
                " and remove hooks first, or keep it"
            )
        if not torch.isfinite(leaf.weight).all():
            raise ConfigError(f"{name} has a weight that is not finite")
        leaves[name] = leaf
    return leaves


def _names(pattern: str, name: str) -> bool:
    """Whether `pattern` matches a module's name, or that of a module which holds it."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[: i + 1]), pattern) for i in range(len(parts)))


def _companion_dtype(device: torch.device) -> torch.dtype:
    """What a model computes in between its int8 layers: bfloat16, but never an emulated one."""
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    elif extension_error() is None:
        from fastbert import _C

        native = _C.has_bf16()
    else:
        native = False
    return torch.bfloat16 if native else torch.float32


def _input_scales(
    model: nn.Module | SentenceEncoder, leaves: dict[str, nn.Linear], inputs: Iterable[Any]
) -> dict[str, float]:
    """For each leaf max|x| / 127 over all inputs. Percentiles and the scale of least squares lost: docs/int8.md."""
    largest: dict[str, torch.Tensor] = {}

    def observe(name: str, x: torch.Tensor, out: torch.Tensor) -> None:
        if x.numel():
            largest[name] = torch.maximum(largest.get(name, x.new_zeros(())), x.abs().amax())

    _watch(model, leaves, inputs, observe)
    scales = {name: value.item() / 127 for name, value in largest.items()}
    if infinite := [name for name, scale in scales.items() if not 0 <= scale < float("inf")]:
        raise InputError(f"calibration: {infinite[0]} got values that are not finite")
    return scales


def _watch(
    model: nn.Module | SentenceEncoder,
    leaves: dict[str, nn.Linear],
    inputs: Iterable[Any],
    observe: Callable[[str, torch.Tensor, torch.Tensor], None],
) -> None:
    """Run the inputs in eval mode; `observe` gets a leaf's name, what goes in and what comes out."""

    def hook(name: str) -> Callable:
        return lambda module, args, out: observe(name, args[0], out)

    with ExitStack() as stack, torch.inference_mode():
        stack.enter_context(_eval_mode(_module_of(model)))
        for name, leaf in leaves.items():
            stack.callback(leaf.register_forward_hook(hook(name)).remove)
        count = 0
        for given in [inputs] if isinstance(model, SentenceEncoder) else inputs:
            if isinstance(model, SentenceEncoder):
                count += len(model.encode(given))
            elif isinstance(given, Mapping):
                model(**given)
                count += 1
            else:
                raise TypeError(f"an input is a {type(given).__name__}; it must be a dict of the model's arguments")
        if count == 0:
            raise InputError("there are no inputs to measure with")


@contextmanager
def _eval_mode(module: nn.Module) -> Iterator[None]:
    training = [child for child in module.modules() if child.training]
    module.eval()
    try:
        yield
    finally:
        for child in training:
            child.training = True
