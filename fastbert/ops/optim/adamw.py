"""AdamW with clipping, over all weights of a model at once (Loshchilov & Hutter 2017, algorithm 2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fastbert.backend import Backend, register, select
from fastbert.native.availability import extension_error
from fastbert.ops._common import define

# Lists are as long as the weights; float32, contiguous, gradients, means and squares of a weight's shape. Where there
# are rows (int64, ascending), the gradient is that of these rows of the weight, the others' is zero, and only these
# take the step. For each such weight there is: done, int32 (a number a row), how many steps of the history each row
# has had; history, float32 (steps that there is room for, 6), of which this step writes row number `count`, the steps
# before. steps: float32 (), the steps done before, counted up here. Returns the gradients' norm, a float32 (); NaN
# where max_norm is 0, which does not ask for it.
_SCHEMA = (
    "(Tensor(a!)[] weights, Tensor[] gradients, Tensor?[] rows, Tensor(b!)[] means, Tensor(c!)[] squares,"
    " Tensor(d!)[] steps, Tensor(e!)[] dones, Tensor(f!)[] histories, int[] counts, float[] rates, float[] decays,"
    " float beta1, float beta2, float eps, float max_norm) -> Tensor"
)
# The rows (None: all) take the steps of the history that they have not had, each with a gradient of zero.
_DEFERRED_SCHEMA = (
    "(Tensor(a!) weight, Tensor(b!) mean, Tensor(c!) square, Tensor(d!) done, Tensor? rows, Tensor history, int count)"
    " -> ()"
)


def _fake(weights, *others):
    return torch.empty((), dtype=torch.float32)


_OPS = {Backend.CPU: define("adamw_cpu", _SCHEMA, _fake)}
_DEFERRED = define("adamw_deferred_cpu", _DEFERRED_SCHEMA, lambda *arguments: None)


class DeferredRows:
    """The steps of AdamW that rows of a table without a gradient have not had yet: 24 bytes a step, and 4 a row.

    A table of words has a hundred times the rows that a step looks up. A row without a gradient takes a step all the
    same: its means decay, and move it. These steps need nothing but the row itself, so they wait until the row is
    looked up again, and are then done in one reading of it, with the bits that they would have had one by one.

    weight, mean, square: the table's, (rows, ...). Nothing else writes to them while steps wait (count is not 0).
    done: int32 (rows,), how many of the steps each row has had. history: float32 (room, 6), all that a step goes by:
    the learning rate, the decay, the betas and eps may be others in each. count: steps.
    """

    ROOM = 64

    def __init__(self, weight: torch.Tensor, mean: torch.Tensor, square: torch.Tensor):
        self.weight, self.mean, self.square = weight, mean, square
        self.done = torch.zeros(weight.shape[0], dtype=torch.int32)
        self.history = torch.empty(self.ROOM, 6)
        self.count = 0
        self._seen = self._versions()

    def make_room(self) -> None:
        if self.count == len(self.history):
            self.history = torch.cat([self.history, torch.empty_like(self.history)])

    def is_of(self, weight: torch.Tensor, mean: torch.Tensor, square: torch.Tensor) -> bool:
        return self.weight is weight and self.mean is mean and self.square is square

    def check(self) -> None:
        """Raises RuntimeError: somebody has written to the table while steps waited. Which of its numbers were to take
        these steps is not to be known any more.
        """
        if self.count and self._seen != self._versions():
            raise RuntimeError(
                f"a table of shape {tuple(self.weight.shape)} was written to while rows of it lacked up to {self.count}"
                " steps of AdamW: do these steps (catch_up) before it is written to"
            )

    def note(self) -> None:
        """The table is as AdamW has left it."""
        self._seen = self._versions()

    def _versions(self) -> list[tuple[int, int]]:
        return [(t.data_ptr(), t._version) for t in (self.weight, self.mean, self.square)]


def adamw_deferred(deferred: DeferredRows, *, rows: torch.Tensor | None = None) -> None:
    """Do the steps that rows of a table lack, in place: of `rows`, int64 (any number,), or of all.

    Raises RuntimeError: there is no such row, or the table was written to meanwhile.
    """
    if deferred.count == 0:
        return
    deferred.check()
    with torch.no_grad():
        _DEFERRED(
            deferred.weight, deferred.mean, deferred.square, deferred.done, rows, deferred.history, deferred.count
        )
    if rows is None:
        deferred.done.zero_()
        deferred.count = 0
    torch.autograd.graph.increment_version([deferred.weight])
    deferred.note()


def _supports_cpu(*tensors) -> str | None:
    # By sets of what they have: there are hundreds, and a loop over them took a quarter of a millisecond.
    for traits in {(t.device, t.dtype, t.layout, type(t)) for t in tensors}:
        device, dtype, layout, of = traits
        if device.type != "cpu":
            return f"tensors are on {device.type}"
        if dtype is not torch.float32 or layout is not torch.strided or of not in _PLAIN:
            return f"{of.__name__} of dtype {dtype} (has plain tensors of float32)"
    if not all([t.is_contiguous() for t in tensors]):
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
    deferred: Sequence[DeferredRows | None] | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Change weights, means, squares and steps in place by one step; returns the norm of all gradients, float32 ().

    Args:
        weights, gradients: lists of float32 tensors, one gradient a weight. They stay as they are where the gradients
            are clipped. A gradient may be sparse in its first dimension, as that of nn.Embedding(sparse=True): the
            rows that it does not have are zero, and take their step, too, or later: see `deferred`.
        means, squares: the moving means of the gradients and of their squares, of the weights' shapes.
        steps: float32 (), a tensor a weight: how many steps it has had; 1 is added.
        rates, decays: the learning rate and the weight decay of each weight.
        max_norm: if all gradients together are longer, they are shortened to it (Pascanu et al. 2013). 0: they are
            not, and the norm that is returned is NaN.
        deferred: of each weight, what its rows lack, made of the same weight, mean and square; rows without a gradient
            are left as they are, and `adamw_deferred` is to be called before anybody reads them. None: all rows take
            the step here.

    Raises BackendError: the backend that was asked for cannot serve the call. ValueError: `deferred` of another table.
    RuntimeError: a row has a gradient, but lacks steps from before, so that what was looked up was not the row; or a
    table was written to meanwhile.
    """
    if not weights:
        return torch.tensor(0.0 if max_norm > 0 else float("nan"))
    with torch.no_grad():
        gradients = [_by_rows(g) if g.is_sparse else g for g in gradients]
        values = [g.values() if g.is_sparse else g for g in gradients]
        waiting = [None] * len(gradients) if deferred is None else deferred
        if select("adamw", backend, *weights, *values) is Backend.TORCH:
            for each in waiting:
                if each is not None:
                    adamw_deferred(each)
            dense = [g.to_dense() if g.is_sparse else g for g in gradients]
            return _adamw_torch(weights, dense, means, squares, steps, rates, decays, beta1, beta2, eps, max_norm)
        rows = [g.indices()[0] if g.is_sparse else None for g in gradients]
        lates = {
            i: waiting[i] or DeferredRows(weights[i], means[i], squares[i])
            for i, of in enumerate(rows)
            if of is not None
        }
        for i, each in lates.items():
            if not each.is_of(weights[i], means[i], squares[i]):
                raise ValueError(f"deferred[{i}] is of another table than weight {i}, or of other means")
            each.check()
            each.make_room()
        changed = list(weights)
        norm = _OPS[Backend.CPU](
            changed,
            values,
            rows,
            *(list(tensors) for tensors in (means, squares, steps)),
            [each.done for each in lates.values()],
            [each.history for each in lates.values()],
            [each.count for each in lates.values()],
            list(rates),
            list(decays),
            beta1,
            beta2,
            eps,
            max_norm,
        )
        torch.autograd.graph.increment_version(changed)  # for those that keep something made of the weights
        for i, each in lates.items():
            each.count += 1
            each.note()
            if waiting[i] is None:
                adamw_deferred(each)
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
    for i, rate_and_decay in enumerate(zip(rates, decays, strict=True)):
        groups.setdefault(rate_and_decay, []).append(i)
    for (rate, decay), members in groups.items():
        torch_adamw(
            *([of[i] for i in members] for of in (weights, gradients, means, squares)),
            [],
            [steps[i] for i in members],
            foreach=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=rate,
            weight_decay=decay,
            eps=eps,
            maximize=False,
        )
    return norm
