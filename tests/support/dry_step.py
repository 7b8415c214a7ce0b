"""What the host does for one training step on a GPU, part by part, without a GPU: the table of docs/gpu.md.

    PYTHONPATH=.:tests/support python tests/support/dry_step.py

BERT-base's twelve layers, masked words, bf16 under autocast, dropout, ragged batches: the operators, launches and
Python of the real step. Triton's launches end before the driver (dry_launches.py). Tensors are so small that a CPU's
arithmetic takes next to nothing. Op by op, and all layers as one op, in turn.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from dry_launches import as_gpu, make, without_layers_as_one_op
from torch.profiler import ProfilerActivity, profile

from fastbert import ops
from fastbert.backend import use_backend
from fastbert.packed_inputs import PackedInputs, pack_inputs
from fastbert.training.optimizers import make_optimizer, parameter_groups

LAYERS, HIDDEN, INNER = 12, 8, 16
TURNS, STEPS, COLD = 10, 12, 2  # of each way; the first steps of a turn are cold, and are left out
PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm")
# What allocates, or says how memory is looked at, and launches nothing.
FREE = frozenset(
    f"aten::{name}"
    for name in (
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "resize_",
        "view",
        "_unsafe_view",
        "_reshape_alias",
        "as_strided",
        "detach",
        "to",
        "resolve_conj",
        "result_type",
        "lift_fresh",
        "select",
        "slice",
        "t",
        "unsqueeze",
    )
)


def batch(number: int) -> PackedInputs:
    """Three texts of 1 to 6 tokens, half of which have a label: most batches have sizes of their own."""
    generator = torch.Generator().manual_seed(number)
    lengths = torch.randint(1, 7, (3,), generator=generator).tolist()
    rows = [torch.randint(1, 100, (length,), generator=generator).tolist() for length in lengths]
    return pack_inputs(rows, labels=[[id if i % 2 == 0 else -100 for i, id in enumerate(row)] for row in rows])


class Step:
    def __init__(self, is_one_op: bool) -> None:
        self.layers = nullcontext if is_one_op else without_layers_as_one_op
        sizes = {"hidden_size": HIDDEN, "num_attention_heads": 1, "intermediate_size": INNER}
        self.model = make("bert", "MaskedLM", torch.float32, num_hidden_layers=LAYERS, **sizes).train()
        self.optimizer = make_optimizer("adamw", parameter_groups(self.model, 1e-4), (0.9, 0.999), 1e-8)
        self.seeds, self.number, self.loss = ops.StepSeeds("cpu"), 0, torch.zeros(())

    def parts(self) -> dict[str, Callable[[], Any]]:
        self.number += 1
        given = batch(self.number)
        return {
            "forward, loss included": lambda: self.forward(given),
            "backward": lambda: self.loss.backward(),
            "clipping and the optimizer": lambda: self.optimizer.step_flat(1.0),
        }

    def forward(self, given: PackedInputs) -> None:
        self.seeds.begin(self.number)
        with torch.autocast("cpu", torch.bfloat16), ops.seeds_from(self.seeds), self.layers():
            self.loss = self.model(**given, num_items_in_batch=float(given["batch"].labelled.numel())).loss


def launched_by(event: Any) -> Any:
    """The operator that a GPU would launch a kernel for, of those that an event is part of; None: it launches nothing.

    A CPU's product copies its bias, and its sum begins with zeros.
    """
    if event.cpu_children or event.name in FREE:
        return None
    parent = event.cpu_parent
    while parent is not None:
        event, parent = parent if parent.name in (*PRODUCTS, "aten::sum") else event, parent.cpu_parent
    return event


def main() -> None:
    torch.set_num_threads(1)
    dry = as_gpu(90)
    steps = {"op by op": Step(False), "one op": Step(True)}
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    counts: dict[tuple[str, str], tuple[int, int, int]] = {}
    with use_backend("triton"):
        for turn in range(TURNS):
            for way, step in steps.items():
                for number in range(STEPS):
                    for name, part in step.parts().items():
                        start = time.thread_time()
                        part()
                        if turn and number >= COLD:
                            times[way, name].append(1e6 * (time.thread_time() - start))
        for way, step in steps.items():
            for name, part in step.parts().items():
                dry.launches.clear()
                with profile(activities=[ProfilerActivity.CPU]) as recorded:
                    part()
                events = [e for e in recorded.events() if e.name.startswith("aten::")]
                owners = {id(owner): owner.name for owner in map(launched_by, events) if owner is not None}
                products = sum(e.name in PRODUCTS for e in events)
                others = sum(owner not in PRODUCTS for owner in owners.values())
                counts[way, name] = sum(dry.launches.values()), products, others
    sys.stdout.write("| | median, us | least, us | kernels of ours, products, others |\n|---|--:|--:|--:|\n")
    for (way, name), each in times.items():
        launches = ", ".join(map(str, counts[way, name]))
        sys.stdout.write(f"| {way}: {name} | {statistics.median(each):,.0f} | {min(each):,.0f} | {launches} |\n")


if __name__ == "__main__":
    main()
