"""AdamW with clipping, over all weights of a model at once (Loshchilov & Hutter 2017, algorithm 2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fastbert.backend import Backend, register, select
from fastbert.ops._common import define, extension_error

# All lists are as long as the weights; float32, contiguous, gradients, means and squares of a weight's shape. Where a
# weight has rows (int64, ascending), its gradient is that of these rows, and the others' is zero. steps: float32 (),
# the steps done before, counted up here. Returns the gradients' norm, a float32 (); NaN where max_norm is 0, which does
# not ask for it.
_SCHEMA = (
    "(Tensor(a!)[] weights, Tensor[] gradients, Tensor?[] rows, Tensor(b!)[] means, Tensor(c!)[] squares,"
    " Tensor(d!)[] steps, float[] rates, float[] decays, float beta1, float beta2, float eps, float max_norm) -> Tensor"
)


def _fake(weights, gradients, rows, means, squares, steps, rates, decays, beta1, beta2, eps, max_norm):
    return torch.empty((), dtype=torch.float32)


_OPS = {Backend.CPU: define("adamw_cpu", _SCHEMA, _fake)}


def _supports_cpu(*tensors) -> str | None:
    for t in tensors:
        if t.device.type != "cpu":
            return f"tensors are on {t.device.type}"
        if t.dtype is not torch.float32 or t.layout is not torch.strided or type(t) not in _PLAIN:
            return f"{type(t).__name__} of dtype {t.dtype} (has plain tensors of float32)"
        if not t.is_contiguous():
            return "a weight or a gradient is not contiguous"
    return extension_error()


_PLAIN = (torch.Tensor, torch.nn.Parameter)

register("adamw", Backend.CPU, _supports_cpu, probe=lambda x, vector: (x.float(),))


def adamw(
    weights: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    means: Sequence[torch.Tensor],
    squares: Sequence[torch.Tensor],
    steps: Sequence[torch.Tensor],
    *,
    rates: Sequence[float],
    decays: Sequence[float],
    beta1: float,
    beta2: float,
    eps: float,
    max_norm: float = 0.0,
    backend: str | None = None,
) -> torch.Tensor:
    """Change weights, means, squares and steps in place by one step; returns the norm of all gradients, float32 ().

    Args:
        weights, gradients: lists of float32 tensors, one gradient a weight. They stay as they are where the gradients
            are clipped. A gradient may be sparse in its first dimension, as that of nn.Embedding(sparse=True): the
            rows that it does not have are zero, and take their step, too.
        means, squares: the moving means of the gradients and of their squares, of the weights' shapes.
        steps: float32 (), a tensor a weight: how many steps it has had; 1 is added.
        rates, decays: the learning rate and the weight decay of each weight.
        max_norm: if all gradients together are longer, they are shortened to it (Pascanu et al. 2013). 0: they are
            not, and the norm that is returned is NaN.

    Raises BackendError: the backend that was asked for cannot serve the call.
    """
    with torch.no_grad():
        gradients = [_by_rows(g) if g.is_sparse else g for g in gradients]
        values = [g.values() if g.is_sparse else g for g in gradients]
        if select("adamw", backend, *weights, *values) is Backend.TORCH:
            dense = [g.to_dense() if g.is_sparse else g for g in gradients]
            return _adamw_torch(weights, dense, means, squares, steps, rates, decays, beta1, beta2, eps, max_norm)
        rows = [g.indices()[0] if g.is_sparse else None for g in gradients]
        changed = list(weights)
        norm = _OPS[Backend.CPU](
            changed, values, rows, *(list(tensors) for tensors in (means, squares, steps)), list(rates), list(decays),
            beta1, beta2, eps, max_norm,
        )  # fmt: skip
        torch.autograd.graph.increment_version(changed)  # for whoever keeps something made of the weights
        return norm


def _by_rows(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.coalesce() if gradient.sparse_dim() == 1 else gradient.to_dense()


def _adamw_torch(weights, gradients, means, squares, steps, rates, decays, beta1, beta2, eps, max_norm):
    from torch.optim.adamw import adamw as torch_adamw

    norm = torch.full((), float("nan"))
    if max_norm > 0:
        norm = torch.nn.utils.get_total_norm(gradients)
        gradients = torch._foreach_mul(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    groups = dict[tuple[float, float], list[int]]()
    for i, kind in enumerate(zip(rates, decays, strict=True)):
        groups.setdefault(kind, []).append(i)
    for (rate, decay), members in groups.items():
        torch_adamw(
            *([of[i] for i in members] for of in (weights, gradients, means, squares)), [], [steps[i] for i in members],
            foreach=True, amsgrad=False, beta1=beta1, beta2=beta2, lr=rate, weight_decay=decay, eps=eps, maximize=False,
        )  # fmt: skip
    return norm
