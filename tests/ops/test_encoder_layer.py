"""One layer of every form as one op for training: outputs, gradients, dropout."""

from __future__ import annotations

import pytest
import torch
from layer_forms import CASES, CU_SEQLENS, HIDDEN, INTERMEDIATE, LENGTHS, TOKENS, Case, Layer, fused, literal, make

from fastbert.ops._common import extension_error
from fastbert.ops.attention import attention
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

pytestmark = pytest.mark.skipif(extension_error() is not None, reason=str(extension_error()))

MODES = ("float32", "bfloat16", "autocast")


def differentiate(run, layer: Layer, x: torch.Tensor, needs_dx: bool = True) -> dict[str, torch.Tensor]:
    """run(layer, x), and all gradients."""
    layer, x = layer.map(lambda t: t.detach().clone().requires_grad_()), x.detach().clone().requires_grad_(needs_dx)
    out = run(layer, x)
    leaves = {**({"dx": x} if needs_dx else {}), **layer.tensors()}
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out.dtype)
    gradients = torch.autograd.grad(out, list(leaves.values()), cotangent)
    return {"out": out.detach(), **dict(zip(leaves, gradients, strict=True))}


def check(case: Case, mode: str, keeps=(None,) * 4, seed: int = 0, name: str = "", **shared) -> None:
    dtype = torch.bfloat16 if mode == "bfloat16" else torch.float32
    layer = make(case).map(lambda t: t.to(dtype))
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)

    def ours(layer: Layer, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(seed)
        return fused("encoder_layer", [layer], x, **shared)

    def formula(layer: Layer, x: torch.Tensor) -> torch.Tensor:
        return literal([layer], x, keeps=keeps, **shared)

    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        actual, baseline = differentiate(ours, layer, x), differentiate(formula, layer, x)
    oracle = differentiate(formula, layer.map(torch.Tensor.double), x.double())
    compared = torch.float32 if mode == "float32" else torch.bfloat16
    for key, found in actual.items():
        # Softmax does not see a key's bias without rotary embedding: its gradient is zero but for rounding.
        if key == "bias 1" and not case.form.merged_qkv and case.form.rotary < 0:
            allowed = max(baseline[key].abs().max(), torch.finfo(compared).eps)
            assert (found - oracle[key]).abs().max() <= 8 * allowed
            continue
        assert found.dtype is dtype
        assert_close_to_reference(
            found.to(compared), oracle[key], baseline[key].to(compared), GRADIENT_FACTOR, f"{key} of {name}"
        )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_against_oracle(name, mode):
    check(CASES[name], mode, name=name)


def masks(case: Case, seed: int) -> tuple[torch.Tensor, ...]:
    """What the layer's dropouts keep after torch.manual_seed(seed)."""
    form = case.form
    torch.manual_seed(seed)
    philox = torch.randint(2**62, (4, 2), dtype=torch.int64)

    def keep(which: int, width: int) -> torch.Tensor:
        return torch.ops.fastbert.dropout_cpu(torch.ones(TOKENS, width), philox[which], form.dropouts[which]) != 0

    # Of values that are their tokens' positions in one-hot, where all keys are alike, attention shows its mask.
    width = max(LENGTHS)
    position = torch.cat([torch.arange(n) for n in LENGTHS])
    identity = torch.nn.functional.one_hot(position, width)[:, None].expand(-1, form.num_heads, -1).float()
    torch.manual_seed(seed)
    zeros = torch.zeros_like(identity)
    probabilities = attention(zeros, zeros, identity, CU_SEQLENS, width, dropout_p=form.dropouts[0], backend="cpu")
    return probabilities != 0, keep(1, HIDDEN), keep(2, INTERMEDIATE), keep(3, HIDDEN)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_dropout_against_oracle(name, mode):
    case = CASES[name].with_dropouts(0.1, 0.2, 0.3, 0.4)
    check(case, mode, masks(case, 7), 7, name)
