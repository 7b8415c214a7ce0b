"""What the host does for one training step on a GPU, part by part, without a GPU.

    PYTHONPATH=.:tests/support python tests/support/dry_step.py

BERT-base's twelve layers, masked words, bf16 under autocast, dropout: the operators, launches and Python of the real
step, on the real dispatcher, with autograd and Triton's launcher. Products end where a library would launch them
(stubbed_products.cpp, which is compiled first), Triton's launches before the driver (dry_launches), and what a GPU has
of torch's optimizer as a few launches over all weights does nothing; tensors are so small that copies take next to
nothing. A GPU's own launches, and its library's products, take a few microseconds each beside this.

Both ways of the layers run in turn, some steps of each: op by op, and all of them as one op. What they launch is
counted in a process of its own, since to count a launch takes as long as one.

    valgrind --tool=callgrind --instr-atstart=no python tests/support/dry_step.py callgrind "one op"

counts the instructions of ten steps of one way, which a neighbour on the machine does not change.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from built import built
from dry_launches import DryDriver, as_gpu, make, without_layers_as_one_op
from torch.profiler import ProfilerActivity, profile
from torch.utils.cpp_extension import include_paths, library_paths

from fastbert import ops
from fastbert.backend import use_backend
from fastbert.packed_inputs import PackedInputs, pack_inputs
from fastbert.training.loop import _seed
from fastbert.training.optimizers import _clip_then_step, make_optimizer, parameter_groups
from fastbert.training.schedules import Schedule

LAYERS, SHARE = 12, 0.5
LENGTHS, COUNTED = (2, 1, 1), (40, 17, 7)  # of what is timed; and of what is counted, with several blocks of each kind
HIDDEN, INNER = 8, 16
BLOCKS, STEPS = 10, 12  # each way takes turns of so many steps, the first two of which are left out: they are cold
PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm")
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


def stub_products() -> None:
    """For the rest of the process. torch warns that somebody else's kernels were there."""
    source = Path(__file__).with_name("stubbed_products.cpp")
    places = [f"-I{path}" for path in include_paths()] + [f"-L{path}" for path in library_paths()]
    command = ["g++", "-O2", "-std=c++20", "-shared", "-fPIC", str(source), *places, "-lc10", "-ltorch_cpu"]

    def make(unfinished: Path) -> None:
        subprocess.run([*command, "-o", str(unfinished)], check=True)

    torch.ops.load_library(str(built("dry_step", source.stem, (command, torch.__version__), [source], make)))


class Step:
    """One step of `Loop`, cut into its parts. is_one_op: of the layers. lengths: of the batch."""

    def __init__(self, is_one_op: bool, lengths: tuple[int, ...]) -> None:
        self.layers = nullcontext if is_one_op else without_layers_as_one_op
        sizes = {"hidden_size": HIDDEN, "num_attention_heads": 1, "intermediate_size": INNER}
        self.model = make("bert", "MaskedLM", torch.float32, num_hidden_layers=LAYERS, **sizes).train()
        groups = parameter_groups(self.model, 1e-4)
        self.optimizer = make_optimizer("adamw", groups, (0.9, 0.999), 1e-8)
        self.schedule = Schedule(self.optimizer, "linear", 1000, 10)
        self.host, self.seeds = batch(lengths), ops.StepSeeds("cpu")
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
            "clipping and the optimizer": self.optimize,
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
        seeds = ops.seeds_from(self.seeds)
        with torch.autocast("cpu", torch.bfloat16), use_backend("triton"), seeds, self.layers(), ops.only_backward():
            self.loss = self.model(**self.device, num_items_in_batch=total).loss

    def backward(self) -> None:
        with ops.only_recorded_writes(), use_backend("triton"):
            self.loss.backward()

    def optimize(self) -> None:
        _clip_then_step(self.optimizer, [p for group in self.optimizer.param_groups for p in group["params"]], 1.0)

    def end(self) -> None:
        self.optimizer.zero_grad()
        self.losses.append(torch.stack([self.loss.detach()]).sum())
        self.number += 1


def batch(lengths: tuple[int, ...]) -> PackedInputs:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(1, 100, (length,), generator=generator) for length in lengths]
    labels = [torch.where(torch.rand(len(row), generator=generator) < SHARE, row, -100) for row in ids]
    return pack_inputs([row.tolist() for row in ids], labels=[row.tolist() for row in labels])


def timed(steps: dict[str, Step]) -> dict[str, dict[str, tuple[float, float]]]:
    """Microseconds of each part of each of the steps, which take turns: the median and the least."""
    found: dict[str, dict[str, list[float]]] = {way: {} for way in steps}
    for _ in range(BLOCKS):
        for way, step in steps.items():
            for i in range(STEPS):
                for name, part in step.parts().items():
                    start = time.thread_time()
                    part()
                    if i >= 2:
                        found[way].setdefault(name, []).append(1e6 * (time.thread_time() - start))
    return {
        way: {name: (statistics.median(times), min(times)) for name, times in parts.items()}
        for way, parts in found.items()
    }


def launched(step: Step, dry: DryDriver) -> dict[str, tuple[int, int, int]]:
    """Of each part: launches of Triton kernels, of products, and of other kernels of torch."""
    found = {}
    for name, part in step.parts().items():
        dry.launches.clear()
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            part()
        events = [e for e in recorded.events() if e.name.startswith("aten::")]
        products = sum(e.name in PRODUCTS for e in events)
        owners = {id(owner): owner.name for owner in map(launched_by, events) if owner is not None}
        found[name] = (sum(dry.launches.values()), products, sum(name not in PRODUCTS for name in owners.values()))
    return found


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


def both_ways(lengths: tuple[int, ...]) -> dict[str, Step]:
    """Behind a first step, in which things are imported and compiled, and a second one, whose layers are recorded."""
    steps = {"op by op": Step(False, lengths), "one op": Step(True, lengths)}
    for step in (*steps.values(), *steps.values()):
        for part in step.parts().values():
            part()
    return steps


def count() -> None:
    dry = as_gpu(90)
    steps = both_ways(COUNTED)
    with optimizer_without_arithmetic() as calls:
        counts = {way: launched(step, dry) for way, step in steps.items()}
    sys.stdout.write(json.dumps({"launches": counts, "over all weights": dict(calls)}) + "\n")


def under_callgrind(way: str) -> None:
    torch.set_num_threads(1)
    stub_products()
    as_gpu(90, counts=False)
    step = both_ways(LENGTHS)[way]
    gc.disable()  # whose passes come in some steps
    with optimizer_without_arithmetic():
        for number in range(14):
            if number == 4:
                subprocess.run(["callgrind_control", "-i", "on", str(os.getpid())], check=True, capture_output=True)
            for part in step.parts().values():
                part()
    subprocess.run(["callgrind_control", "-i", "off", str(os.getpid())], check=True, capture_output=True)


def main() -> None:
    torch.set_num_threads(1)
    stub_products()
    as_gpu(90, counts=False)
    steps = both_ways(LENGTHS)
    with optimizer_without_arithmetic():
        times = timed(steps)
    counting = subprocess.run([sys.executable, __file__, "count"], stdout=subprocess.PIPE, text=True, check=True)
    facts = {"times": times, **json.loads(counting.stdout.splitlines()[-1])}
    for way, parts in times.items():
        counts = facts["launches"][way]
        sys.stdout.write(f"{way}\n")
        for name, (median, least) in parts.items():
            sys.stdout.write(f"  {name:35s} {median:7.0f} us, at least {least:5.0f}, launches: {counts[name]}\n")
        totals = [sum(each) for each in zip(*counts.values(), strict=True)]
        medians, leasts = (sum(each) for each in zip(*parts.values(), strict=True))
        sys.stdout.write(f"  {'the step':35s} {medians:7.0f} us, at least {leasts:5.0f}, launches: {totals}\n")
    sys.stdout.write(json.dumps(facts) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["callgrind"]:
        under_callgrind(sys.argv[2])
    elif sys.argv[1:] == ["count"]:
        count()
    else:
        main()
