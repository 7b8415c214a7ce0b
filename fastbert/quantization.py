"""fastbert.quantize puts the layers of a live model into int8, in place. quantization_error says what that would cost.

Each row of a weight is rounded to 255 steps. Each token's activations are rounded to 255 steps while the model runs
(Dettmers et al. 2022, "LLM.int8()", section 2.1). docs/int8.md has the measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from fastbert.errors import ConfigError, InputError
from fastbert.layers.quantized import QuantizedLinear
from fastbert.models.base import HasModel
from fastbert.models.quantized import linears_of, make_int8
from fastbert.models.tree import base_models

Quantizable = TypeVar("Quantizable", bound="nn.Module | HasModel")


def quantize(
    model: Quantizable,
    dtype: str | torch.dtype = "int8",
    *,
    keep: str | Iterable[str] = (),
    calibration: Iterable[Any] | None = None,
) -> Quantizable:
    """Put the Linear modules of the encoder's layers into int8, in place. Returns `model`, in eval mode.

    These are query, key, value, the attention's output and both of the feed-forward. Attention itself, heads, pooler,
    embeddings and LayerNorms stay in floating point: in bfloat16 if the device multiplies bfloat16, else in float32.
    Each old weight is freed as soon as its int8 weight is there. The model cannot be trained afterwards: its parameters
    are frozen, and a forward pass in train mode raises RuntimeError.

    Args:
        model: a fastbert model, with or without a head; a SentenceEncoder; a transformers model that
            fastbert.accelerate has sped up; or any module that holds some of these.
        dtype: "int8".
        keep: names of layers that stay in floating point, as model.named_modules() has them, or fnmatch patterns
            `("*.layer.0.*", "*.output.dense")`. The name of a module keeps everything below it.
        calibration: None (the default) gives each token a scale while the model runs, which is most accurate. Inputs,
            as `quantization_error` takes them, fix one scale for each layer instead: the largest value that the layer
            gets from them. This saves the measuring later; larger values are then cut off.

    Raises:
        TypeError: no such model. ConfigError: an unknown dtype, a pattern that names no layer, a layer that is int8
        already or no plain nn.Linear (hooks, LoRA), a weight that is not finite. InputError: calibration without
        inputs, or with values that are not finite. In each case the model is as it was.
    """
    if dtype not in ("int8", torch.int8):
        raise ConfigError(f"unknown dtype {dtype!r}; fastbert quantises to int8")
    module = _module_of(model)
    leaves = linears_of(module, [keep] if isinstance(keep, str) else list(keep))
    scales = {} if calibration is None else _input_scales(model, leaves, calibration)
    make_int8(module, leaves, scales)
    return model


def quantization_error(model: nn.Module | HasModel, inputs: Iterable[Any]) -> dict[str, float]:
    """The error that int8 would cause in each layer of a model in floating point: {name: error}, the largest first.

    The error is ||int8 output - output|| / ||output|| over all tokens of the inputs. Each layer gets the input that it
    gets in the model as it is, so the errors of earlier layers are not in it. `quantize(keep=...)` takes the names.

    Args:
        model: as for `quantize`. It is not changed.
        inputs: dicts of the model's keyword arguments; texts for a SentenceEncoder.

    Raises:
        The errors of `quantize`.
    """
    leaves = linears_of(_module_of(model))
    int8 = {name: QuantizedLinear.from_linear(leaf).eval() for name, leaf in leaves.items()}
    squares: dict[str, torch.Tensor] = {}

    def observe(name: str, x: torch.Tensor, out: torch.Tensor) -> None:
        pair = torch.stack([int8[name](x).double() - out.double(), out.double()])
        squares[name] = squares.get(name, 0) + pair.flatten(1).square().sum(1)

    _watch(model, leaves, inputs, observe)
    errors = {name: (error / total).sqrt().item() if total else 0.0 for name, (error, total) in squares.items()}
    return dict(sorted(errors.items(), key=lambda item: -item[1]))


def _module_of(model: Any) -> nn.Module:
    module = model.model if isinstance(model, HasModel) else model
    if not isinstance(module, nn.Module) or not any(base_models(module)):
        hint = "; call fastbert.accelerate on it first" if hasattr(model, "config") else ""
        raise TypeError(f"{type(model).__name__} is no model of fastbert, nor one that it has accelerated{hint}")
    return module


def _input_scales(model: nn.Module | HasModel, leaves: dict[str, nn.Linear], inputs: Iterable[Any]) -> dict[str, float]:
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
    model: nn.Module | HasModel,
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
        for batch in [inputs] if isinstance(model, HasModel) else inputs:
            if isinstance(model, HasModel):
                count += len(model.encode(batch))
            elif isinstance(batch, Mapping):
                model(**batch)
                count += 1
            else:
                raise TypeError(f"an input is a {type(batch).__name__}; it must be a dict of the model's arguments")
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
