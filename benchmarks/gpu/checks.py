"""What all checks of a kernel on its own device share: results and gradients against the oracle, there too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from fastbert.testing.numerics import GRADIENT_FACTOR, OUTPUT_FACTOR, assert_close_to_reference

Tensors = dict[str, torch.Tensor]
Function = Callable[..., torch.Tensor]
Check = tuple[str, Callable[[], None]]  # its name, and what raises AssertionError
Checks = Iterator[Check]


@dataclass(frozen=True)
class Where:
    """One backend in one dtype on one device; `smoke`: sizes for the interpreter."""

    device: torch.device
    dtype: torch.dtype
    backend: str
    smoke: bool

    def randn(self, *shape: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
        """Values of `dtype`, drawn in fp32."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return (torch.randn(shape, generator=generator, device=self.device) * scale).to(self.dtype)

    def integers(self, limit: int, *shape: int, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randint(limit, shape, generator=generator, device=self.device)

    def choose(self, small, large):
        return small if self.smoke else large


def differentiate(function: Function, tensors: Tensors, seed: int = 7) -> Tensors:
    """{"out": function(**tensors), "d" + name: gradient}; the cotangent is the same in every dtype."""
    dtype = next(iter(tensors.values())).dtype
    leaves = {name: t.detach().clone().requires_grad_() for name, t in tensors.items()}
    out = function(**leaves)
    generator = torch.Generator(out.device).manual_seed(seed)
    # Exact in bf16 and fp16: small whole eighths.
    dout = torch.randint(-16, 17, out.shape, generator=generator, device=out.device) / 8 if out.dim() else None
    if out.requires_grad:  # the formula of nothing at all has no graph
        out.backward(None if dout is None else dout.to(out.dtype))
    gradients = {f"d{n}": torch.zeros_like(t) if t.grad is None else t.grad for n, t in leaves.items()}
    assert all(t.dtype == dtype for t in gradients.values())
    return {"out": out.detach(), **gradients}


def compare(ours: Function, literal: Function, tensors: Tensors) -> None:
    """Output and gradients of `ours` against the oracle, `literal` in float64, by the error rule; and in inference."""
    actual = differentiate(ours, tensors)
    baseline = differentiate(literal, tensors)
    oracle = differentiate(literal, {name: t.double() for name, t in tensors.items()})
    for name, found in actual.items():
        factor = OUTPUT_FACTOR if name == "out" else GRADIENT_FACTOR
        assert_close_to_reference(found, oracle[name], baseline[name].to(found.dtype), factor, name)
    with torch.no_grad():  # where less is written down for backward
        assert torch.equal(ours(**tensors), actual["out"]), "inference gives other bits than training"


def same_bits(one: Tensors, other: Tensors) -> None:
    differing = [name for name in one if not torch.equal(one[name], other[name])]
    assert not differing, f"two runs differ in {', '.join(differing)}"


def repeats(function: Function, tensors: Tensors) -> None:
    """Forward and backward give the same bits twice."""
    same_bits(differentiate(function, tensors), differentiate(function, tensors))


def assert_keep_rate(kept: torch.Tensor, dropout_p: float) -> None:
    """Six standard deviations of a coin's count."""
    share, draws = kept.double().mean().item(), kept.numel()
    bound = 6 * (dropout_p * (1 - dropout_p) / draws) ** 0.5
    assert abs(share - (1 - dropout_p)) < bound, f"{share:.6f} of {draws} were kept, not {1 - dropout_p} +- {bound:.6f}"
