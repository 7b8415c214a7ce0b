"""The dtypes of a checkpoint's tensors, and of what a caller asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from fastbert.errors import ConfigError

if TYPE_CHECKING:
    from fastbert.models.base import PreTrainedModel


def is_finite(t: torch.Tensor) -> bool:
    """Whether all values are: what is not finite makes the sum so, and a sum is read once, without a copy."""
    return bool(t.sum().isfinite()) or bool(t.isfinite().all())  # finite values, too, may have a sum that is not


def common_dtype(
    model: PreTrainedModel, weights: dict[str, torch.Tensor], in_float32: list[str]
) -> tuple[torch.dtype | None, list[str]]:
    """The floating-point dtype that most of the checkpoint's values have, and the keys that no model could run with it.

    A float32 LayerNorm may stand in a model of 16 bits, which runs so. An int8 layer's scales have their own dtype.
    """
    norms = {name for name, module in model.named_modules() if isinstance(module, (nn.LayerNorm, nn.RMSNorm))}
    sizes = {
        key: t.numel()
        for key, t in model.state_dict().items()
        if key in weights and key not in in_float32 and t.is_floating_point()
        if not key.endswith(("weight_scale", "input_scale"))
    }
    values: dict[torch.dtype, int] = {}
    for key, size in sizes.items():
        values[weights[key].dtype] = values.get(weights[key].dtype, 0) + size
    common = max(values, key=lambda dtype: values[dtype], default=None)
    may_stay = torch.float32 if common in (torch.bfloat16, torch.float16) else common
    odd = [
        key
        for key in sizes
        if weights[key].dtype not in (common, may_stay if key.rpartition(".")[0] in norms else common)
    ]
    return common, odd


def parse_dtype(dtype: torch.dtype | str | None, others: tuple[str, ...] = ()) -> torch.dtype | None:
    """A torch dtype from itself or its name; None and "auto" mean the checkpoint's own. Raises ConfigError.

    others: names that the caller knows beside these.
    """
    if dtype in ("int8", torch.int8):
        raise ConfigError('a model is loaded in floating point; fastbert.quantize(model, "int8") comes after that')
    if dtype is None or dtype == "auto" or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return None if isinstance(dtype, str) else dtype
    names = {"float32": torch.float32, "fp32": torch.float32, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
             "float16": torch.float16, "fp16": torch.float16, "float64": torch.float64}  # fmt: skip
    if dtype not in names:
        more = "".join(f", {name}" for name in others)
        raise ConfigError(f"unknown dtype {dtype!r}; valid names: auto, {', '.join(names)}{more}")
    return names[dtype]
