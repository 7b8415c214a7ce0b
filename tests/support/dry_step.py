"""What the host does for one training step on a GPU, part by part, without a GPU.

    PYTHONPATH=.:tests/support python tests/support/dry_step.py

BERT-base's twelve layers, masked words, bf16 under autocast, dropout: the operators, launches and Python of the real
step, on the real dispatcher, with autograd and Triton's launcher. Its tensors are so small that products and copies
take next to nothing, Triton's launches end before the driver (dry_launches), and what a GPU has of torch's optimizer as
a few launches over all weights does nothing. A GPU's own launches take a few microseconds each beside this.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from dry_launches import DryDriver, as_gpu, make
from torch.profiler import ProfilerActivity, profile

from fastbert import ops
from fastbert.backend import use_backend
from fastbert.packed_inputs import PackedInputs, pack_inputs
from fastbert.training.loop import _seed
from fastbert.training.optimizers import _clip_then_step, make_optimizer, parameter_groups
from fastbert.training.schedules import Schedule

LAYERS, LENGTHS, SHARE = 12, (40, 17, 7), 0.15
ROUNDS = 30
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")
# What allocates, or says how memory is looked at, and launches nothing.
FREE = frozenset(
    f"aten::{name}"
    for name in (
        "empty", "empty_like", "empty_strided", "new_empty", "resize_", "view", "_unsafe_view", "_reshape_alias",
        "as_strided", "detach", "to", "resolve_conj", "result_type", "lift_fresh", "select", "slice", "t", "unsqueeze",
    )
)  # fmt: skip
# Of torch's optimizer: over all weights in a few launches each, on a GPU, and one by one on a CPU.
OVER_ALL = ("_foreach_norm", "_foreach_mul_", "_foreach_add_", "_fused_adamw_")


@contextmanager
def optimizer_without_arithmetic() -> Iterator[Counter[str]]:
    """Counts the calls."""
    calls, kept = Counter[str](), {name: getattr(torch, name) for name in OVER_ALL}
    norm = torch.ones(())

    def instead(name: str, tensors: list[torch.Tensor], *others: Any, **options: Any) -> list[torch.Tensor]:
        calls[name] += 1
        return [norm] * len(tensors)

    for name in OVER_ALL:
        setattr(torch, name, partial(instead, name))
    try:
        yield calls
    finally:
        for name, function in kept.items():
            setattr(torch, name, function)


class Step:
    """One step of `Loop`, cut into its parts."""

    def __init__(self) -> None:
        sizes = {"hidden_size": 64, "num_attention_heads": 1, "intermediate_size": 128}
        self.model = make("bert", "MaskedLM", torch.float32, num_hidden_layers=LAYERS, **sizes).train()
        groups = parameter_groups(self.model, 1e-4)
        self.optimizer = make_optimizer("adamw", groups, (0.9, 0.999), 1e-8)
        self.schedule = Schedule(self.optimizer, "linear", 1000, 10)
        self.host, self.seeds = batch(), ops.StepSeeds("cpu")
        self.number, self.losses = 0, list[torch.Tensor]()
        self.device: PackedInputs = self.host
        self.loss = torch.zeros(())

    def parts(self) -> dict[str, Callable[[], Any]]:
        return {
            "seeds": self.begin,
            "the batch to the device": self.copy,
            "forward": self.forward,
            "backward": self.backward,
            "schedule": lambda: self.schedule.set(self.number),
            "clipping and the optimizer": lambda: _clip_then_step(self.optimizer, list(self.model.parameters()), 1.0),
            "gradients dropped, the loss kept": self.end,
        }

    def begin(self) -> None:
        seed = hash((0, self.number, 0)) % 2**63
        _seed(torch.device("cpu"), seed)
        self.seeds.begin(seed)

    def copy(self) -> None:
        fields = {name: t.clone() if isinstance(t, torch.Tensor) else t for name, t in self.host.items()}
        whose = self.host["batch"]._moved(torch.clone)
        self.device = PackedInputs(fields | {"batch": whose})

    def forward(self) -> None:
        total = float(self.host["batch"].labelled.numel())
        with torch.autocast("cpu", torch.bfloat16), use_backend("triton"), ops.seeds_from(self.seeds):
            self.loss = self.model(**self.device, num_items_in_batch=total).loss

    def backward(self) -> None:
        with ops.only_recorded_writes(), use_backend("triton"):
            self.loss.backward()

    def end(self) -> None:
        self.optimizer.zero_grad()
        self.losses.append(torch.stack([self.loss.detach()]).sum())
        self.number += 1


def batch() -> PackedInputs:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(1, 100, (length,), generator=generator) for length in LENGTHS]
    labels = [torch.where(torch.rand(len(row), generator=generator) < SHARE, row, -100) for row in ids]
    return pack_inputs([row.tolist() for row in ids], labels=[row.tolist() for row in labels])


def timed(step: Step) -> dict[str, float]:
    """Microseconds of each part, medians."""
    found: dict[str, list[float]] = {}
    for i in range(ROUNDS + 5):
        for name, part in step.parts().items():
            start = time.perf_counter()
            part()
            if i >= 5:
                found.setdefault(name, []).append(1e6 * (time.perf_counter() - start))
    return {name: statistics.median(times) for name, times in found.items()}


def launched(step: Step, dry: DryDriver) -> dict[str, tuple[int, int, int]]:
    """Of each part: launches of Triton kernels, of products, and of other kernels of torch."""
    found = {}
    for name, part in step.parts().items():
        dry.launches.clear()
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            part()
        events = [e for e in recorded.events() if e.name.startswith("aten::")]
        products = sum(e.name in PRODUCTS for e in events)
        others = sum(not e.cpu_children and e.name not in FREE and e.name not in PRODUCTS for e in events)
        found[name] = (sum(dry.launches.values()), products, others)
    return found


def main() -> None:
    torch.set_num_threads(1)
    dry = as_gpu(90)
    step = Step()
    for part in step.parts().values():  # what is imported and compiled at the first
        part()
    with optimizer_without_arithmetic() as calls:
        times = timed(step)
        calls.clear()
        counts = launched(step, dry)
    for name, microseconds in times.items():
        sys.stdout.write(f"{name:35s} {microseconds:7.0f} us, launches: {counts[name]}\n")
    facts = {"times": times, "launches": counts, "over all weights": dict(calls)}
    sys.stdout.write(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
