"""A Linear with int8 weights, in the place of the nn.Linear that it was made from."""

from __future__ import annotations

import torch
from torch import nn

from fastbert import ops


class QuantizedLinear(nn.Module):
    """weight int8 (out_features, in_features) times weight_scale float32 (out_features,) is what it stands for.

    `input_scale`: float32 scalar; 0 quantises each row of the input by its own largest value.
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor
    input_scale: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.register_buffer("weight", torch.zeros(out_features, in_features, dtype=torch.int8))
        self.register_buffer("weight_scale", torch.ones(out_features))
        self.register_buffer("input_scale", torch.zeros(()))
        self.input_scale_value = 0.0
        self.register_buffer("bias", torch.zeros(out_features, dtype=dtype) if bias else None)

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> QuantizedLinear:
        """Scales are max|w| / 127 a row (Dettmers et al. 2022, section 2.1); a row of zeros gets 1."""
        quantized = cls(linear.in_features, linear.out_features, linear.bias is not None, linear.weight.dtype)
        weight = linear.weight.detach().float()
        largest = weight.abs().amax(1)
        quantized.weight_scale = torch.where(largest > 0, largest / 127, 1.0)
        quantized.weight = torch.round(weight / quantized.weight_scale[:, None]).to(torch.int8)
        quantized.bias = None if linear.bias is None else linear.bias.detach().clone()
        return quantized

    def _apply(self, fn, recurse=True):
        # Scales stay in float32 when a model is cast: they are what the integers mean.
        scales = self.weight_scale, self.input_scale
        super()._apply(fn, recurse)
        self.weight_scale, self.input_scale = (t.to(self.weight.device) for t in scales)
        return self

    def set_input_scale(self, value: float) -> None:
        """0, or the step of a static quantisation of the input. Kept on the host too: ops take it as a number."""
        self.input_scale.fill_(value)
        self.input_scale_value = float(self.input_scale)

    def _load_from_state_dict(self, *args) -> None:
        super()._load_from_state_dict(*args)
        self.input_scale_value = float(self.input_scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, self.in_features)
        out = ops.linear(
            flat, self.weight, self.bias, weight_scale=self.weight_scale, input_scale=self.input_scale_value
        )
        return out.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
