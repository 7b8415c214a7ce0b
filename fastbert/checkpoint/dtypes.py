"""The dtypes of a checkpoint's tensors, and of what a caller asks for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from fastbert.errors import ConfigError

if TYPE_CHECKING:
    from fastbert.models.base import PreTrainedModel


def is_finite(t: torch.Tensor) -> bool:
    """Whether all values are: what is not finite makes the sum so, and a sum is read once, without a copy."""
    return bool(t.sum().isfinite()) or bool(t.isfinite().all())  # finite values, too, may have a sum that is not


_SCALES = ("weight_scale", "input_scale")  # of an int8 layer, which have a dtype of their own


def main_dtype(tensors: Iterable[torch.Tensor]) -> torch.dtype | None:
    """The floating-point dtype that most of the values have; None where there are none."""
    values: dict[torch.dtype, int] = {}
    for t in tensors:
        if t.is_floating_point():
            values[t.dtype] = values.get(t.dtype, 0) + t.numel()
    return max(values, key=lambda dtype: values[dtype], default=None)


@contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """What is made inside, and names no dtype, has this one. For constructors of users: other threads see it, too."""
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(before if dtype is None else dtype)
        yield
    finally:
        torch.set_default_dtype(before)


def common_dtype(
    model: PreTrainedModel, weights: dict[str, torch.Tensor], in_float32: list[str]
) -> tuple[torch.dtype | None, list[str]]:
    """The floating-point dtype that most of the checkpoint's values have, and the keys that no model could run with it.

    A float32 LayerNorm may stand in a model of 16 bits, which runs so. An int8 layer's scales have their own dtype.
    """
    norms = {name for name, module in model.named_modules() if isinstance(module, (nn.LayerNorm, nn.RMSNorm))}
    counted = {
        key: weights[key]
        for key, t in model.state_dict().items()
        if key in weights and key not in in_float32 and t.is_floating_point() and not key.endswith(_SCALES)
    }
    common = main_dtype(counted.values())
    may_stay = torch.float32 if common in (torch.bfloat16, torch.float16) else common
    odd = [
        key
        for key, t in counted.items()
        if t.dtype not in (common, may_stay if key.rpartition(".")[0] in norms else common)
    ]
    return common, odd


# torch's names, and the short ones.
NAMES = {
    **dict.fromkeys(("float32", "float", "fp32"), torch.float32),
    **dict.fromkeys(("bfloat16", "bf16"), torch.bfloat16),
    **dict.fromkeys(("float16", "half", "fp16"), torch.float16),
    **dict.fromkeys(("float64", "double"), torch.float64),
}


def parse_dtype(dtype: torch.dtype | str | None, others: tuple[str, ...] = ()) -> torch.dtype | None:
    """A torch dtype from itself or its name; None and "auto" mean the checkpoint's own. Raises ConfigError.

    others: names that the caller knows beside these.
    """
    if dtype in ("int8", torch.int8):
        raise ConfigError('a model is loaded in floating point; fastbert.quantize(model, "int8") comes after that')
    if dtype is None or dtype == "auto" or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return None if isinstance(dtype, str) else dtype
    if dtype not in NAMES:
        more = "".join(f", {name}" for name in others)
        raise ConfigError(f"unknown dtype {dtype!r}; valid names: auto, {', '.join(NAMES)}{more}")
    return NAMES[dtype]
