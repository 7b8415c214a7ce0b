"""The part `steps` of `make gpu`: what its checks see, how its contestants run, and what its tables say."""

from __future__ import annotations

import re

import pytest
import torch

from benchmarks.gpu import profile
from benchmarks.gpu.models import heard
from benchmarks.gpu.record import TARGETS, open_record
from benchmarks.gpu.simulated.no_graphs import NoGraphs
from benchmarks.gpu.steps import part, replays
from benchmarks.gpu.steps.batches import BATCHES, NO_LABEL, SIZES, Texts, lengths_of
from benchmarks.gpu.steps.contestant import GRAPHS, ONE_OP, OP_BY_OP, PROFILE, StepSubject
from benchmarks.gpu.steps.replays import Setting, check_capture, check_loop
from benchmarks.gpu.steps.ways import layers_seen, op_by_op
from fastbert.backend import FUSED, SUPPORTS
from fastbert.bench.compete import ContestantProcess
from fastbert.native.availability import extension_error

SMOKE = Setting(torch.device("cpu"), smoke=True)
TASK = {"threads": 1, "model": "tiny-words", "limit": 60, "smoke": True, "batches": ["1k ragged"]}
TASK |= {"mode": "training", "precision": "amp"}


class Forgetful(NoGraphs):
    """The fourth repetition of what was captured first, a batch's forward and backward, does nothing."""

    def __init__(self) -> None:
        self.captured = self.count = 0

    def capture(self, run):
        run()
        self.captured += 1
        return self.forgetting(run) if self.captured == 1 else run

    def forgetting(self, run):
        def replay() -> None:
            self.count += 1
            if self.count != 4:
                run()

        return replay


class BakedRates(NoGraphs):
    """The optimizer goes by the numbers of the first step."""

    def capture(self, run):
        if run.__qualname__.startswith("GraphedStep._capture_optimizer"):
            (flat,) = (cell.cell_contents for cell in run.__closure__ if hasattr(cell.cell_contents, "numbers"))
            first = flat.numbers.clone()
            return super().capture(lambda: (flat.numbers.copy_(first), run()))
        return super().capture(run)


@pytest.mark.parametrize(
    ("graphs", "said"),
    (
        (Forgetful, r"the loss of step (\d) is another; at the end bert\S+: .* with waits: step \1: losses .*; bert"),
        pytest.param(
            BakedRates,
            r"the loss of step 2 is another; at the end bert\S+: .* with waits: step 1: bert\S+: \d+ of",
            marks=pytest.mark.simulated,
        ),
    ),
)
def test_a_step_that_a_graph_gets_wrong_is_named_with_its_tensor(graphs, said):
    with pytest.raises(AssertionError) as error:
        check_capture(SMOKE, lambda device: graphs())
    assert re.search(said, str(error.value)), str(error.value)


@pytest.mark.simulated
def test_steps_that_differ_without_graphs_are_not_the_graphs_fault(monkeypatch):
    drawn, kept = iter(range(1000)), replays.set_rates

    def rates(optimizer, number):
        kept(optimizer, number)
        optimizer.param_groups[0]["lr"] += 1e-6 * next(drawn)

    monkeypatch.setattr(replays, "set_rates", rates)
    with pytest.raises(AssertionError, match="two runs without graphs: the loss of step 1 is another"):
        check_capture(SMOKE)


@pytest.mark.simulated
def test_a_capture_that_never_is_repeated_is_seen(monkeypatch):
    """Each batch has ids beyond those of the one before, which are compared with the model's tables, op by op."""
    draw = Texts.draw

    def wider(lengths, vocab_size, seed, labelled):
        return draw(lengths, 50 + seed // 100, seed, labelled)

    monkeypatch.setattr(Texts, "draw", wider)
    with pytest.raises(AssertionError, match=r"^\(captures, replays\) are \(3, "):
        check_capture(SMOKE)


@pytest.mark.full  # the part's own smoke test has what is right
def test_a_loop_that_trains_otherwise_is_seen(monkeypatch):
    right = replays.make_step

    def wrong(*given, **options):
        step = right(*given, **options)
        loss = step.loss
        step.loss = lambda *arguments: 1.1 * loss(*arguments)
        return step

    monkeypatch.setattr(replays, "make_step", wrong)
    with pytest.raises(AssertionError, match="graphs: losses: max error"):
        check_loop(SMOKE)


# --------------------------------------------------------------------------------------------------------------------
# Batches


@pytest.mark.parametrize("smoke", (False, True))
@pytest.mark.parametrize("batch", BATCHES)
def test_a_step_has_nearly_as_many_tokens_as_it_says(batch, smoke):
    lengths, asked = lengths_of(batch, smoke), SIZES[batch.split()[0]] // (64 if smoke else 1)
    assert asked - max(lengths) < sum(lengths) <= asked
    assert (len(set(lengths)) == 1) == batch.endswith("full")
    assert smoke or max(lengths) == (167 if batch.endswith("ragged") else 128 if batch.startswith("1k") else 512)


def test_packed_and_padded_batches_are_the_same_tokens():
    texts = Texts.draw([5, 3, 9, 4], 50, seed=1, labelled=0.5)
    packed, padded = texts.packed(), texts.padded()
    mask = padded["attention_mask"].bool()
    assert sorted(mask.sum(1).tolist()) == [3, 4, 5, 9]
    assert torch.equal(packed["input_ids"].flatten(), padded["input_ids"][mask])
    assert torch.equal(packed["labels"].flatten(), padded["labels"][mask])
    assert (padded["labels"][~mask] == NO_LABEL).all()
    assert texts.num_labels == packed["batch"].labelled.numel() == int((padded["labels"] != NO_LABEL).sum())
    assert "attention_mask" not in Texts.draw([4, 4], 50, seed=1).padded()
    others = [Texts.draw([5, 3, 9, 4], 50, seed) for seed in (2, 3)]
    assert others[0].packed()["batch"].bounds == others[1].packed()["batch"].bounds  # so the same graph takes them


# --------------------------------------------------------------------------------------------------------------------
# Ways and contestants


@pytest.mark.skipif(extension_error() is not None, reason=str(extension_error()))
def test_each_way_is_what_it_says():
    subjects = {name: StepSubject({**TASK, "contestant": name}) for name in (OP_BY_OP, ONE_OP, GRAPHS)}
    ready = {name: subject.prepare("1k ragged") for name, subject in subjects.items()}
    seen = {name: found["layers_in_one_op"] for name, found in ready.items()}
    assert seen == {OP_BY_OP: 0, ONE_OP: 2, GRAPHS: 2}
    assert ready[OP_BY_OP]["layers_op"]["selected"] == "torch" and ready[ONE_OP]["layers_op"]["selected"] == "cpu"
    assert subjects[GRAPHS].graphed.why_eager is None and subjects[ONE_OP].graphed is None
    for subject in subjects.values():
        found = subject.turn("1k ragged")
        assert found["seconds"] > 0 and found["host_seconds"] > 0
        assert subject.turn(f"{PROFILE}1k ragged")["launches"] > 100


@pytest.mark.full  # test_each_way_is_what_it_says has the same code in this process
def test_a_contestant_in_a_process():
    worker = ContestantProcess({**TASK, "contestant": GRAPHS}, StepSubject.__module__)
    try:
        assert heard(GRAPHS, worker, ["1k ragged"])["1k ragged"]["tokens"] == sum(lengths_of("1k ragged", True))
        assert worker.ask("1k ragged")["host_seconds"] > 0
        assert worker.ask(f"{PROFILE}1k ragged")["busy ms"] > 0
    finally:
        worker.close()


def test_ops_for_all_layers_come_back():
    tables = {op: dict(table) for op, table in FUSED.items()}, {op: dict(table) for op, table in SUPPORTS.items()}
    with pytest.raises(ZeroDivisionError), op_by_op():
        assert not any(FUSED[op] or SUPPORTS[op] for op in FUSED) and SUPPORTS["attention"]
        raise ZeroDivisionError
    with layers_seen():
        assert tables[0] != FUSED or not tables[0]
    assert tables == (FUSED, SUPPORTS)


def test_a_graphs_launch_counts_once():
    names = ("cudaLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaStreamSynchronize")
    events = [{"name": name, "cat": "cuda_driver" if name[2] == "L" else "cuda_runtime"} for name in names]
    assert profile.host_launches([*events, {"name": "cudaLaunchKernel", "cat": "kernel"}, {"name": "no cat"}]) == 4


# --------------------------------------------------------------------------------------------------------------------
# Tables


def result(rate: float, **more) -> dict:
    timing = {"median": 100 / rate}
    profiled = {"busy ms": 1.0, "share of gaps": 0.1, "launches": 9.0, "host launches": 2.0}
    found = {"tokens": 100, "tokens_per_second": rate, "timing": timing, "host_seconds": 0.5, "profile": profiled}
    return {**found, "peak_memory": 2e9, **more}


def test_figures_are_the_least_of_sizes_and_kinds():
    rates = {"16k": 9.0, "64k": 8.0, "4k": 7.0}
    results = {
        f"{size} {kind}": {GRAPHS: result(rate - (kind == "full")), part.COMPILED: result(2.0)}
        for size, rate in rates.items()
        for kind in ("ragged", "full")
    }
    found = {"steps_from_16k": 7.0, "steps_4k": 6.0, "steps_over_compile_ragged": 3.5, "steps_over_compile_full": 3.0}
    assert dict(part.figures(results)) == found and found.keys() <= TARGETS.keys()
    results["64k full"] = {GRAPHS: {"failed": "why"}}
    del found["steps_from_16k"]
    assert dict(part.figures(results)) == found
    assert part.summary(results)[GRAPHS] == {
        "4k ragged": 7.0,
        "16k ragged": 9.0,
        "64k ragged": 8.0,
        "4k full": 6.0,
        "16k full": 8.0,
    }


def test_an_entry_says_whether_one_op_ran_all_layers():
    reasons = {"selected": "torch", "triton": "no kernel for this op yet"}
    found = {ONE_OP: result(4.0, layers_in_one_op=12, layers_op=reasons), "transformers-sdpa": {"failed": "no memory"}}
    entry = part.entry_of(found, 12)
    assert "failed" not in entry and "note" not in entry and entry["numbers"][ONE_OP]["layers in one op"] == 12
    assert entry["numbers"]["transformers-sdpa"] == {"tokens/s": "failed: no memory"}
    assert entry["numbers"][ONE_OP]["ms"] == 25e3 and entry["numbers"][ONE_OP]["peak GB"] == 2
    found[ONE_OP]["layers_in_one_op"] = 1
    assert "no kernel for this op yet" in part.entry_of(found, 12)["note"]
    for kind in ("failed", "skipped"):  # what was not prepared in time is tried again
        found[GRAPHS] = {kind: "why"}
        assert part.entry_of(found, 12)["failed"] == f"fastbert, graphs: {kind}: why"


def test_only_what_is_not_there_is_measured(tmp_path, monkeypatch):
    asked = []
    record = open_record("steps", tmp_path, {}, lambda line: None, smoke=True)
    record.entries = {name: {"results": {}} for name in (*part.CHECK_NAMES.values(), *BATCHES)}
    record.entries[BATCHES[0]] = {"failed": "why"}
    monkeypatch.setattr(part, "contest", lambda record, batches: asked.append(batches))
    part.run_part(record)
    assert asked == [[BATCHES[0]]]


def test_a_check_in_a_process_that_dies_fails_and_nothing_else(tmp_path, monkeypatch):
    record = open_record("steps", tmp_path, {}, lambda line: None)
    for given, expected in (
        (([], "exit code -11: "), {"failed": "exit code -11: "}),
        (([{"steps": 50}], None), {"steps": 50}),
    ):
        monkeypatch.setattr(part, "results_of", lambda command, seconds, given=given: given)
        assert part.checked(record, "capture") == expected
