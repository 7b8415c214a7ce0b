"""A Linear with int8 weights, in the place of the nn.Linear that it was made from."""

from __future__ import annotations

import torch
from torch import nn

from fastbert import ops


class QuantizedLinear(nn.Module):
    """x -> x (weight weight_scale)^T + bias, with x in int8 too (Dettmers et al. 2022, section 2.1).

    weight: int8 (out_features, in_features), within +-127. weight_scale: float32 (out_features,), what a step of each
    row stands for. input_scale: float32 scalar, what a step of x stands for; 0 measures each row of x by its own
    largest value. bias: (out_features,), in the model's dtype, or None. All are buffers: there is nothing to train.
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor
    input_scale: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, in_features: int, out_features: int, bias: bool = True, device=None, dtype=None):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.register_buffer("weight", torch.zeros(out_features, in_features, dtype=torch.int8, device=device))
        self.register_buffer("weight_scale", torch.ones(out_features, dtype=torch.float32, device=device))
        self.register_buffer("input_scale", torch.zeros((), dtype=torch.float32, device=device))
        self.register_buffer("bias", torch.zeros(out_features, dtype=dtype, device=device) if bias else None)

    @classmethod
    @torch.no_grad()
    def from_linear(cls, linear: nn.Linear, input_scale: float = 0.0) -> QuantizedLinear:
        """Scales are max|w| / 127 a row; a row of zeros, or too small for a scale, gets 1. The bias is a copy."""
        like = {"device": linear.weight.device, "dtype": linear.weight.dtype}
        quantized = cls(linear.in_features, linear.out_features, linear.bias is not None, **like)
        weight = ops.at_least_fp32(linear.weight)
        scale = (weight.abs().amax(1) / 127).float()
        quantized.weight_scale.copy_(torch.where(scale == 0, 1.0, scale))  # what is not finite stays so
        quantized.weight.copy_(torch.round(weight / quantized.weight_scale[:, None]).clamp(-127, 127))
        if quantized.bias is not None:
            quantized.bias.copy_(linear.bias)
        quantized.input_scale.fill_(input_scale)
        return quantized.train(linear.training)

    def operands(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """weight, bias, weight_scale and input_scale, as ops take them. Raises RuntimeError in training."""
        if self.training and torch.is_grad_enabled():
            raise RuntimeError(
                "an int8 layer cannot be trained: train the model before fastbert.quantize; to run the quantised one,"
                " call its eval()"
            )
        buffers = self._buffers
        return buffers["weight"], buffers["bias"], buffers["weight_scale"], buffers["input_scale"]  # type: ignore

    def in_floating_point(self, x: torch.Tensor) -> torch.Tensor:
        """x (rows, in_features) times the weights that the integers stand for, x itself not rounded to int8."""
        weight, bias, scale, _ = self.operands()
        return torch.nn.functional.linear(x, (weight * scale[:, None]).to(x.dtype), bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias, scale, input_scale = self.operands()
        flat = x.reshape(-1, self.in_features)
        out = ops.linear(flat, weight, bias, weight_scale=scale, input_scale=input_scale)
        return out.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def _apply(self, fn, recurse=True):
        # The scales are what the integers mean: a cast of the model, which leaves integers alone, must not round them.
        bias = self.bias

        def move(t):
            return fn(t.view(torch.int32)).view(torch.float32) if t.dtype is torch.float32 and t is not bias else fn(t)

        return super()._apply(move, recurse)

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ):
        # torch would copy floats into the integers, cut to whole numbers, without a word.
        for name in ("weight", "weight_scale", "input_scale"):
            saved, expected = state_dict.get(prefix + name), self._buffers[name].dtype
            if saved is not None and saved.dtype is not expected:
                error_msgs.append(f"{prefix}{name} is {saved.dtype}; int8 layers have {expected} there")
                return
        saved = state_dict.get(prefix + "weight_scale")
        if saved is not None and not ((saved > 0) & (saved < float("inf"))).all():
            error_msgs.append(f"{prefix}weight_scale holds a value that is not positive and finite")
            return
        arguments = (local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        if prefix + "input_scale" in state_dict:
            scale = self.input_scale.item()
            if not 0 <= scale < float("inf"):
                error_msgs.append(f"{prefix}input_scale is {scale}; it must be 0 or positive")
