"""Layers as one op in training, forward and backward, against the literal formula."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from attention_terms import assert_zero_but_for_rounding, key_bias_terms
from layer_specs import CU_SEQLENS, HIDDEN, INTERMEDIATE, LENGTHS, TOKENS, Case, Layer, fused, literal, make
from seeds import manual_seed, torch_generator

from fastbert.backend import Backend, asked_for
from fastbert.ops.attention.attention import attention
from fastbert.testing import reference
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

MODES = ("float32", "bfloat16", "autocast")


def differentiate(run, layer: Layer | Several, x: torch.Tensor, needs_dx: bool = True) -> dict[str, torch.Tensor]:
    """run(layer, x), and all gradients."""
    layer, x = layer.map(lambda t: t.detach().clone().requires_grad_()), x.detach().clone().requires_grad_(needs_dx)
    out = run(layer, x)
    leaves = {**({"dx": x} if needs_dx else {}), **layer.tensors()}
    cotangent = torch.randn(out.shape, generator=torch_generator(5)).to(out.dtype)
    gradients = torch.autograd.grad(out, list(leaves.values()), cotangent)
    return {"out": out.detach(), **dict(zip(leaves, gradients, strict=True))}


@dataclass
class Several:
    """Layers one after the other, as `differentiate` takes them."""

    layers: list[Layer]

    def map(self, f) -> Several:
        return Several([layer.map(f) for layer in self.layers])

    def tensors(self) -> dict[str, torch.Tensor]:
        return {f"{name}, layer {i}": t for i, layer in enumerate(self.layers) for name, t in layer.tensors().items()}


def check(
    cases: list[Case],
    mode: str,
    keeps=(None,) * 4,
    seed: int = 0,
    name: str = "",
    op: str = "encoder_layers_training",
    **shared,
) -> None:
    """The op over layers of these kinds, forward and backward, against float64 by the error rule. keeps: what their
    dropouts keep where it draws after `seed`. shared: of layer_specs.fused and layer_specs.literal.
    """
    dtype = torch.bfloat16 if mode == "bfloat16" else torch.float32
    if mode == "autocast" and any(case.spec.attention.norm is not None for case in cases):
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(AssertionError, match="norms, which autocast"):
            made = [make(case, i).map(lambda t: t.requires_grad_()) for i, case in enumerate(cases)]
            fused(op, made, torch.zeros(TOKENS, HIDDEN), **shared)
        return
    layers = Several([make(case, i) for i, case in enumerate(cases)]).map(lambda t: t.to(dtype))
    x = torch.randn(TOKENS, HIDDEN, generator=torch_generator(1)).to(dtype)

    def ours(several: Several, x: torch.Tensor) -> torch.Tensor:
        manual_seed(seed)
        return fused(op, several.layers, x, **shared)

    def formula(several: Several, x: torch.Tensor) -> torch.Tensor:
        return literal(several.layers, x, keeps=keeps, **shared)

    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        actual, baseline = differentiate(ours, layers, x), differentiate(formula, layers, x)
    with key_bias_terms(reference) as terms:
        oracle = differentiate(formula, layers.map(torch.Tensor.double), x.double())
    compared = torch.float32 if mode == "float32" else torch.bfloat16
    # GPUs' kernels keep the rows between layers in autocast's dtype.
    stream = torch.bfloat16 if mode == "autocast" and asked_for(None) is Backend.TRITON else dtype
    for key, found in actual.items():
        # Without rotary embedding and norms softmax does not see a key's bias.
        spec = cases[int(key[-1])].spec if key[-1].isdigit() else None
        is_keys = spec is not None and key.startswith("bias 1,") and not spec.merges_qkv
        if is_keys and spec.attention.position is None and spec.attention.norm is None:
            assert_zero_but_for_rounding(found, terms[int(key[-1])], compared, f"{key} of {name}")
            continue
        assert found.dtype is dtype or (key == "out" and found.dtype is stream)
        assert_close_to_reference(
            found.to(compared), oracle[key], baseline[key].to(compared), GRADIENT_FACTOR, f"{key} of {name}"
        )


def masks(case: Case, seed: int, backend: str = "cpu") -> tuple[torch.Tensor, ...]:
    """What the layer's dropouts keep after torch.manual_seed(seed)."""
    dropouts = [*case.spec.dropouts.values()]
    manual_seed(seed)
    draws = 4 if dropouts[2] > 0 else 3  # without one inside of the feed-forward there are no numbers for it
    philox = torch.randint(2**62, (draws, 2), dtype=torch.int64)

    def keep(which: int, width: int) -> torch.Tensor:
        drop = getattr(torch.ops.fastbert, f"dropout_{backend}")
        return drop(torch.ones(TOKENS, width), philox[min(which, draws - 1)], dropouts[which]) != 0

    # Of values that are their tokens' positions in one-hot, where all keys are alike, attention shows its mask.
    width = max(LENGTHS)
    position = torch.cat([torch.arange(n) for n in LENGTHS])
    num_heads = case.spec.attention.num_heads
    identity = torch.nn.functional.one_hot(position, width)[:, None].expand(-1, num_heads, -1).float()
    manual_seed(seed)
    zeros = torch.zeros_like(identity)
    probabilities = attention(zeros, zeros, identity, CU_SEQLENS, width, dropout_p=dropouts[0], backend=backend)
    return probabilities != 0, keep(1, HIDDEN), keep(2, INTERMEDIATE), keep(3, HIDDEN)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, t in found.items():
        assert torch.equal(t, expected[name]), name
