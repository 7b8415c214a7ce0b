"""The error rule (docs/numerics.md): a kernel may err about as much as the literal formula in its dtype."""

from __future__ import annotations

import torch

OUTPUT_FACTOR = 2.0
GRADIENT_FACTOR = 3.0  # gradients, and whole models


def assert_close_to_reference(
    actual: torch.Tensor, oracle: torch.Tensor, baseline: torch.Tensor, factor: float = OUTPUT_FACTOR, name: str = ""
) -> None:
    """Assert max|actual - oracle| <= factor (max|baseline - oracle| + eps max|oracle|), and the same for the means.

    Args:
        actual: the result under test; oracle: the reference in float64; baseline: the reference in actual's dtype. All
            of one shape.
        factor: 2 for outputs, 3 for gradients and whole models.

    Raises:
        AssertionError: shape or dtype differ, something is not finite, or an error is over its bound; the message
            holds both errors and the index of the worst element.
    """
    assert actual.shape == oracle.shape == baseline.shape, (
        f"{name}: shapes {tuple(actual.shape)}, oracle {tuple(oracle.shape)}, baseline {tuple(baseline.shape)}"
    )
    assert oracle.dtype == torch.float64, f"{name}: the oracle runs in float64, not {oracle.dtype}"
    assert actual.dtype == baseline.dtype, f"{name}: dtype {actual.dtype}, baseline {baseline.dtype}"
    if actual.numel() == 0:
        return
    assert torch.isfinite(actual).all(), f"{name}: {int((~torch.isfinite(actual)).sum())} elements are not finite"
    oracle = oracle.detach()  # where it is, they are compared: on a GPU that takes a hundredth of a CPU's time
    error = (actual.detach().to(oracle.device).double() - oracle).abs()
    allowed = (baseline.detach().to(oracle.device).double() - oracle).abs()
    eps = torch.finfo(actual.dtype).eps
    for stat, reduce in (("max", torch.max), ("mean", torch.mean)):
        value = reduce(error).item()
        bound = factor * (reduce(allowed).item() + eps * reduce(oracle.abs()).item())
        worst = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape)) if error.dim() else ()
        assert value <= bound, (
            f"{name}: {stat} error {value:.3e} is over {bound:.3e} ({factor} x (baseline's {reduce(allowed).item():.3e}"
            f" + eps {eps:.1e} x {reduce(oracle.abs()).item():.3e})); worst at {worst}"
        )
