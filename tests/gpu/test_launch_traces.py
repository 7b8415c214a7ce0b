"""Steps that differ in all that may vary launch the same on the same memory: a CUDA graph may be all of them.

They run in a process of their own (tests/support/traced_steps.py), since this one has Triton's interpreter. Nothing is
compiled there, which takes a second a kernel; a file of facts in its place would be old with each change of a model.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from facts import printed
from launch_trace import Launches, Recorder, Trace, differences

pytestmark = pytest.mark.dear_to_set_up

# Sound steps, and how often what they capture runs: their buckets' graphs, and the optimizer's second.
SOUND = {"one batch": [3, 3], "bf16": [3, 3], "accumulation": [6, 3], "two buckets": [3, 6, 3]}
KINDS = ("differences", "forbidden", "left", "moved", "host waits", "host left")
# What sees a fault, and what stands in its first line there.
SEEN = {
    "CountOfTheHost": {"differences": "aten.div.Tensor"},
    "RateOfTheHost": {"differences": "aten.fill_.Scalar(numbers"},
    "NumbersMadeInTheStep": {"differences": "aten.copy_.default(numbers", "forbidden": "aten.lift_fresh"},
    "GradientsDropped": {"differences": "aten.zeros_like", "left": "of step 0: 64 bytes"},
    "DrawsForItself": {"forbidden": "aten.randint"},
    "StateMadeLate": {"differences": "aten.zeros_like.default(moments", "left": ": 212992 bytes"},
    "LoggedOutput": {"left": "of step 0: 4 bytes"},
    "LossAskedFor": {"forbidden": "aten._local_scalar_dense"},
    "SizedByLabels": {"differences": "aten.index_select"},
    "LabelsLookedFor": {"differences": "aten.nonzero", "forbidden": "aten.nonzero"},
    "BatchReplaced": {"differences": "aten._to_copy.default(unnamed", "host left": ": 432 bytes"},
    "WeightMoved": {"differences": "_embed_fwd_kernel", "moved": "True", "host left": ": 2752 bytes"},
    "LossesReadInEachStep": {"host waits": "tolist"},
    "LossesKeptInEachStep": {"host left": ": 4096 bytes"},
}


@pytest.fixture(scope="module")
def cases():
    return printed("traced_steps.py")


def seen(case: dict) -> dict[str, str]:
    """By what sees something: its first line."""
    found = {kind: case[kind] for kind in KINDS if case[kind]}
    return {kind: lines[0] if isinstance(lines, list) else str(lines) for kind, lines in found.items()}


@pytest.mark.simulated
@pytest.mark.parametrize("name", SOUND)
def test_what_is_captured_is_one_trace(cases, name):
    """When it is captured, and in all later steps: the same launches, nothing that a capture forbids, no memory that
    was not there before. What the host does around it waits for nothing, and leaves no memory either.
    """
    assert seen(cases[name]) == {}
    assert cases[name]["runs"] == SOUND[name]


@pytest.mark.simulated
def test_the_host_copies_what_a_step_goes_by(cases):
    """And writes nothing else on the device: the optimizer's `steps` lie where torch's own are."""
    batches = {"one batch": [0], "bf16": [0], "accumulation": [0, 0], "two buckets": [1]}
    for name, buckets in batches.items():
        copied = ["numbers", *(what for i in buckets for what in ("seeds", f"batch of bucket {i}"))]
        copies = [f"aten.copy_.default {what}" for what in copied]
        assert cases[name]["host writes"] == [*copies, "aten.add_.Tensor steps"]


@pytest.mark.simulated
@pytest.mark.parametrize("name", SOUND)
def test_the_steps_differ_in_all_that_may_vary(cases, name):
    for steps in cases[name]["contents"]:
        for first, second in pairwise(steps):
            assert first.keys() == second.keys()
            assert [what for what in first if first[what] == second[what]] == []


@pytest.mark.simulated
def test_a_trace_has_all_kinds_of_launches(cases):
    """Kernels, the optimizer's among them, products, copies, fills, and one sum into all gradients."""
    launches = Counter()
    for captured in cases["one batch"]["launches"]:
        launches.update(captured)
    kernels = {name: count for name, count in launches.items() if name.startswith("_")}
    assert kernels == {
        "_embed_fwd_kernel": 1, "_dropout_kernel": 2, "_add_layer_norm_fwd_kernel": 4, "_attention_tiles_kernel": 1,
        "_attention_fwd_kernel": 1, "_activation_fwd_kernel": 1, "_share_of_a_label_kernel": 1,
        "_cross_entropy_kernel": 1, "_add_layer_norm_bwd_kernel": 4, "_add_shares_kernel": 4,
        "_activation_bwd_kernel": 1, "_attention_records_kernel": 1, "_attention_dkdv_kernel": 1,
        "_attention_dq_kernel": 1, "_sum_runs_kernel": 2, "_square_sums_kernel": 1, "_norm_kernel": 1,
        "_adamw_kernel": 1, "_merge_kernel": 2,
    }  # fmt: skip
    others = {"aten.addmm.default", "aten.mm.default", "aten.mm.out", "aten._to_copy.default", "aten.zeros.default"}
    assert others <= launches.keys() and launches["aten._foreach_add_.List"] == 1
    casts = (cases[name]["launches"][0]["aten._to_copy.default"] for name in ("one batch", "bf16"))
    assert next(casts) + 16 <= next(casts)  # of what is outside of the layers, which have one for all


@pytest.mark.simulated
@pytest.mark.parametrize("fault", SEEN)
def test_what_no_graph_could_repeat_is_seen(cases, fault):
    found = seen(cases[fault])
    assert found.keys() == SEEN[fault].keys()
    assert all(part in found[kind] for kind, part in SEEN[fault].items()), found


@pytest.mark.simulated
def test_every_case_is_checked(cases):
    assert cases.keys() == {*SOUND, *SEEN}


class NoKernels(Launches):
    def __init__(self):
        super().__init__(None)  # nothing launches


def trace_of(step, *tensors: torch.Tensor, recorder: Recorder | None = None) -> Trace:
    recorder = recorder or Recorder(NoKernels())
    recorder.name({f"x{i}": t for i, t in enumerate(tensors)})
    with recorder.step() as trace:
        step(*tensors)
    return trace


def test_memory_that_is_taken_again_has_another_name():
    """Whether the second result lies where the first one was, which is freed, or elsewhere, says nothing."""

    def step(x, held):
        held.append(x + 1)
        if len(held) > 1:
            held.clear()
        x[32:].add_((x + 2)[32:])

    x = torch.ones(64)
    freed, kept = (trace_of(lambda x, held=held: step(x, held), x) for held in ([x], []))
    assert freed.launches == kept.launches
    assert freed.launches == [
        "aten.add.Tensor(x0+0 float32[64] by [1], 1) -> [#0+0 float32[64] by [1]]",
        "aten.add.Tensor(x0+0 float32[64] by [1], 2) -> [#1+0 float32[64] by [1]]",
        "aten.add_.Tensor(x0+128 float32[32] by [1], #1+128 float32[32] by [1]) -> [x0+128 float32[32] by [1]]",
    ]
    assert freed.left == [] and kept.left == ["#0 of step 0: 256 bytes"]


def test_what_happens_in_a_pause_is_another_step():
    inner, outer, found = Recorder(NoKernels()), Recorder(NoKernels()), []

    def step(x):
        made = x + 1
        with outer.paused(), inner.step() as trace:
            made.mul_(made.max().item())
        found.append(trace)
        x.add_(made)

    found.append(trace_of(step, torch.ones(4), recorder=outer))
    within, around = found
    assert around.counts() == {"aten.add.Tensor": 1, "aten.add_.Tensor": 1} and around.forbidden == []
    assert within.counts() == {"aten.max.default": 1, "aten._local_scalar_dense.default": 1, "aten.mul_.Tensor": 1}
    assert within.forbidden == ["aten._local_scalar_dense.default"] and around.left == within.left == []


def test_what_a_capture_forbids_is_seen_however_it_is_written():
    x = torch.arange(1.0, 4.0)
    ways = (
        lambda x: x.tolist(), lambda x: x[0].item(), lambda x: bool(x[0]), lambda x: x.nonzero(), lambda x: x[x > 1],
        lambda x: x.masked_fill_(x > 1, x.max().item()), lambda x: x.unique(), lambda x: x.cpu(),
        lambda x: torch.tensor([1.0]), lambda x: x.new_tensor(1), lambda x: torch.rand(3), lambda x: x.uniform_(),
        lambda x: torch.nn.functional.dropout(x), lambda x: torch.randperm(3), lambda x: x.bernoulli(0.5),
    )  # fmt: skip
    assert [i for i, way in enumerate(ways) if not trace_of(way, x.clone()).forbidden] == []
    assert trace_of(lambda x: x.relu().masked_fill_(x > 1, 2.0).index_select(0, torch.arange(2)), x).forbidden == []


def test_memory_that_outlives_a_step_is_left():
    x, kept, recorder = torch.ones(4), [], Recorder(NoKernels())
    first = trace_of(lambda x: kept.append(x * 2), x, recorder=recorder)
    second = trace_of(lambda x: x.mul_(kept[0]), x, recorder=recorder)
    assert first.left == ["#0 of step 0: 16 bytes"] and second.left == []
    assert "#0 of step 0+0" in second.launches[0]
    circle = trace_of(lambda x: (loop := [x + 1]).append(loop), x, recorder=recorder)
    assert circle.left == [] and len(circle.launches) == 1
    grown = trace_of(lambda x: kept[0].resize_(100), x, recorder=recorder)
    assert grown.left == ["#0 of step 0: 16 bytes, and now 400"]


def test_differences_are_of_order_numbers_places_and_sizes():
    x = torch.ones(4)
    steps = (
        lambda x: x.add_(1).mul_(2), lambda x: x.mul_(2).add_(1), lambda x: x.add_(1).mul_(3), lambda x: x.add_(1),
        lambda x: x[1:].add_(1), lambda x: x[:3].add_(1), lambda x: (x.add_(1), torch.empty_like(x)),
    )  # fmt: skip
    traces = [trace_of(step, x) for step in steps]
    for i, one in enumerate(traces):
        assert [bool(differences(one, other)) for other in traces] == [i != j for j in range(len(traces))]
        assert differences(one, trace_of(steps[i], torch.ones(4))) == []
