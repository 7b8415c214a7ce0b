"""The ways in which a training step may run: op by op, with all layers as one op, as a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.gpu.simulated.no_graphs import NoGraphs
from fastbert.backend import FUSED, SUPPORTS
from fastbert.cuda_graphs.capture import CudaGraphs, Graphs
from fastbert.training.optimizers import clip_and_step

MAX_NORM = 1.0


@contextmanager
def op_by_op() -> Iterator[None]:
    """Within the block no backend has an op that stands for several."""
    kept = {op: (dict(FUSED[op]), dict(SUPPORTS[op])) for op in FUSED}
    for op in kept:
        FUSED[op].clear()
        SUPPORTS[op].clear()
    try:
        yield
    finally:
        for op, (fused, supports) in kept.items():
            FUSED[op].update(fused)
            SUPPORTS[op].update(supports)


@contextmanager
def layers_seen() -> Iterator[list[int]]:
    """How many layers each call of such an op had, in the block."""
    found: list[int] = []
    kept = {op: dict(table) for op, table in FUSED.items()}

    def noting(run: Callable[..., Any]) -> Callable[..., Any]:
        def noted(x: torch.Tensor, operands: Any, *rest: Any, **options: Any) -> Any:
            found.append(len(operands.layers))
            return run(x, operands, *rest, **options)

        return noted

    for table in FUSED.values():
        for backend, (accepts, run) in table.items():
            table[backend] = accepts, noting(run)
    try:
        yield found
    finally:
        for op, table in kept.items():
            FUSED[op].update(table)


def graphs_on(device: torch.device) -> Graphs:
    """A GPU's own; elsewhere, for smoke tests, what runs each time what they would repeat."""
    return CudaGraphs(device) if device.type == "cuda" else NoGraphs()


def plain_step(
    loss_of: Callable[[Any], torch.Tensor], optimizer: torch.optim.Optimizer, batches: Sequence[Any]
) -> torch.Tensor:
    """A step as a loop has it: gradients of the batches are added up, clipped, and gone behind it. Returns the loss."""
    losses = []
    for batch in batches:
        loss = loss_of(batch)
        loss.backward()
        losses.append(loss.detach())
    clip_and_step(optimizer, MAX_NORM)
    optimizer.zero_grad()
    return torch.stack(losses).sum()
