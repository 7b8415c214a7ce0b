"""What the host does for a captured training step, without a GPU: from a batch in pinned memory to the replays' return.

    PYTHONPATH=.:tests/support python tests/support/replay_time.py

The tree, the optimizer and the numbers of BERT-base with a masked-LM head; replays, which are one call of CUDA each,
return at once. What is left is Python's: a look at the tree and the optimizer, seeds, rates, and the batch's copy.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from dry_launches import make
from dry_step import COUNTED, LAYERS, batch

from fastbert.training.graphed import GraphedStep
from fastbert.training.graphed.buckets import Sizes, Staged, bucket_for, stage
from fastbert.training.optimizers import make_optimizer, parameter_groups

ROUNDS = 500
DROPOUTS = 3 * LAYERS + 1  # of a step: so many seeds


class Stubs:
    """Nothing is run, and replays return."""

    def unsupported(self, device: torch.device) -> str | None:
        return None

    def warm(self, run: Callable[[], None]) -> None:
        """Nothing."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        return lambda: None

    def nbytes(self) -> int:
        return 0

    def free(self) -> None:
        """Nothing."""


def make_step() -> tuple[GraphedStep, Staged]:
    model = make("bert", "MaskedLM", torch.float32, num_hidden_layers=LAYERS, hidden_size=64, num_attention_heads=1)
    optimizer = make_optimizer("adamw", parameter_groups(model, 1e-4), (0.9, 0.999), 1e-8)
    step = GraphedStep(model.train(), optimizer, lambda *given: torch.zeros(()), max_norm=1.0, graphs=Stubs())
    step._seeds.take(DROPOUTS)
    packed = batch(COUNTED)
    return step, stage(packed, bucket_for(Sizes.of(packed)))


def timed(call: Callable[[int], object]) -> tuple[float, float]:
    """Microseconds: the median, and what a tenth of the calls take at most."""
    times = []
    for number in range(ROUNDS):
        start = time.perf_counter()
        call(number)
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times), statistics.quantiles(times, n=10)[0]


def main() -> None:
    torch.set_num_threads(1)
    step, staged = make_step()
    looks = "a look at the tree and the optimizer"
    parts: dict[str, Callable[[int], object]] = {
        "a captured step": lambda number: step(staged, [10.0], seed=number),
        "a trainer's, between rows of the log": lambda number: step(staged, [10.0], seed=number, looks=False),
        f"  {looks}": lambda number: step._look(1),
        "  seeds": lambda number: step._seeds.begin(number),
        "  rates, decays, the step's number": lambda number: step._flat.begin([10.0]),  # type: ignore[union-attr]
    }
    for name, call in parts.items():
        median, low = timed(call)
        sys.stdout.write(f"{name:40s} {median:6.0f} us, a tenth of the calls within {low:.0f}\n")
    assert step.why_eager is None


if __name__ == "__main__":
    main()
