"""`make gpu PART=tune` on small sizes, in Triton's interpreter: candidates for attention's blocks."""

from __future__ import annotations

import importlib
import json

import pytest
import torch

from benchmarks.gpu import kernels, stamp, suite, tune
from benchmarks.gpu.checks import Where
from benchmarks.gpu.record import open_record
from benchmarks.gpu.tune import Candidate
from fastbert.native.availability import triton_error

pytestmark = [
    pytest.mark.skipif(triton_error() is not None, reason=str(triton_error())),
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the real sizes"),
]
STAMP = {**stamp.make_stamp("0123456789ab"), "dirty": False}
WHERE = Where(torch.device("cpu"), torch.bfloat16, "triton", True)


@pytest.fixture
def record(tmp_path):
    """A record of the part; what is said goes to the list `said`."""
    record = open_record("tune", tmp_path, STAMP, lambda line: record.said.append(line), smoke=True)
    record.said = []
    return record


def test_it_times_every_candidate_beside_the_table_and_goes_on(record, monkeypatch):
    assert suite.PARTS["tune"].is_extra
    assert suite.run(["tune"], record) == 0
    entries = json.loads(record.path.read_text())["entries"]
    forward = entries["fwd, head_dim 32"]["numbers"]
    assert list(forward) == ["16 x 16, 4 warps, 2 stages", "32 x 16, 4 warps, 2 stages"]
    assert all(row["32"] > 0 and row["32, over the table's"] > 0 for row in forward.values())
    found = entries["candidates"]["numbers"]["dkdv head_dim 32 S 32"]
    assert found["best"] == "32 x 16, 4 warps, 2 stages" and found["table"] == "32 x 32, 4 warps, 2 stages"
    assert any(line.startswith("fwd head_dim 32 S 32: table 32 x 32") for line in record.said)
    monkeypatch.setattr(tune, "contest", None)  # nothing is timed again
    assert suite.run(["tune"], record) == 0


def test_the_table_and_the_other_kernels_come_back():
    blocks, backward = (importlib.import_module(f"fastbert.kernels.{name}") for name in ("blocks", "attention_bwd"))
    before = blocks.blocks_of, backward._attention_dq_kernel
    batch, candidate = tune.Batch(WHERE, 32, 32), Candidate(16, 16, 4, 2)
    with pytest.raises(ZeroDivisionError), tune.alone("dkdv", candidate):
        assert blocks.attention_blocks("dkdv", batch.q, 32, False).tile == 16
        assert blocks.attention_blocks("dq", batch.q, 32, False).tile == 32
        assert isinstance(backward._attention_dq_kernel, tune._Nothing)
        raise ZeroDivisionError
    assert before == (blocks.blocks_of, backward._attention_dq_kernel)
    for which in tune.PRODUCTS:
        batch.check(which, candidate)


def test_a_wrong_candidate_is_not_timed(monkeypatch):
    right = tune.Batch.run

    def wrong(batch, which, candidate):
        return tuple(t * (1 if candidate is None else 1.1) for t in right(batch, which, candidate))

    monkeypatch.setattr(tune.Batch, "run", wrong)
    row = tune.contest(None, [tune.Batch(WHERE, 32, 32)], "fwd", Candidate(16, 16, 4, 2))
    assert row["why not"].startswith("AssertionError: differs from the table's by")


def test_what_does_not_compile_is_reported_and_what_spills_is_not_the_best(record, monkeypatch):
    record.smoke = False
    asked = {(64, "fwd"): [Candidate(128, step, 8, 3) for step in (16, 32, 64, 128)]}
    monkeypatch.setattr(tune, "candidates", lambda smoke: asked)
    monkeypatch.setattr(tune, "LENGTHS", (512,))
    trials = {16: {"why not": "OutOfResources: shared memory"}, 32: {"spills": 0, "registers": 255}}
    trials |= {64: {"spills": 32, "registers": 255}, 128: None}  # the last one was not reached
    monkeypatch.setattr(tune, "tried", lambda record, where, asked: [trials[trial[3].step] for trial in asked])

    class Batch:
        def __init__(self, where, head_dim, length):
            self.length = length

        def present(self, which):
            return Candidate(128, 128, 8, 3)

        def check(self, which, candidate):
            pass

        def rates(self, timer, which, candidate):
            return 100.0 * candidate.step, candidate.step / 50

    monkeypatch.setattr(tune, "Batch", Batch)
    tune.run_part(record)
    numbers = record.entries["fwd, head_dim 64"]["numbers"]
    assert [list(row) for row in numbers.values()] == [
        ["why not"],
        ["512", "512, over the table's", "registers", "spills"],
        ["512", "512, over the table's", "registers", "spills"],
    ]
    summary = record.entries["candidates"]
    assert summary["failed"] == "1 of 4 candidates were not tried, or not reached, in time"
    assert summary["numbers"]["fwd head_dim 64 S 512"]["best"] == "128 x 32, 8 warps, 3 stages"


def test_a_trial_says_why_a_candidate_may_not_be_timed(monkeypatch):
    trials = [("blocks", 32, "fwd", (16, 16, 4, 2), [32]), ("blocks", 32, "dq", (24, 16, 4, 2), [32])]
    right, wrong = tune.try_here(WHERE, trials)
    assert right == {} and "Error" in wrong["why not"]
    plan = ("plan", 16, 32, False, "epilogue")
    assert list(tune.try_here(WHERE, [plan])) == [{}]
    exact = tune.ops.feed_forward
    monkeypatch.setattr(tune.ops, "feed_forward", lambda *args, **options: exact(*args, **options) * 1.1)
    (wrong,) = tune.try_here(WHERE, [plan])
    assert wrong["why not"].startswith("AssertionError: out: max error")


def test_one_that_faults_or_hangs_takes_no_other_with_it(record, monkeypatch):
    """Four candidates in two processes, the first of which ends in its second: what the others found is kept."""
    record.smoke = False
    trials = [("blocks", i) for i in range(4)]

    def children(command, seconds):
        share = json.loads(command[-1])
        assert seconds == tune.TRIAL_SECONDS
        if share[0][1] == 0:
            return [{"spills": 0}], "exit code -11: "
        return [{"spills": trial[1]} for trial in share], None

    monkeypatch.setattr(tune, "results_of", children)
    monkeypatch.setattr(tune.os, "cpu_count", lambda: 3)
    found = tune.tried(record, WHERE, trials)
    assert found == [{"spills": 0}, {"spills": 1}, {"why not": "exit code -11: "}, {"spills": 3}]
    monkeypatch.setattr(tune.os, "cpu_count", lambda: 2)  # one process, whose others are not reached
    assert tune.tried(record, WHERE, trials) == [{"spills": 0}, {"why not": "exit code -11: "}, None, None]


def test_what_was_not_tried_or_has_failed_is_not_timed(record):
    labels = [f"{which}, {candidate.label}" for which, candidate in tune.few_candidates(WHERE)]
    assert len(labels) == 2
    record.add("candidates", {"numbers": {labels[0]: {}, labels[1]: {"why not": "exit code -11: "}}})
    assert [tune.is_tried(record, label) for label in (*labels, "another")] == [True, False, False]
    assert list(tune.few(record, tune.Timer(WHERE.device, 1), WHERE)["numbers"]) == labels[:1]


def ptx_of(between: str) -> str:
    """Two products of a warpgroup, each of which adds to the same sums, and what stands between them."""
    sums = "%f1, %f2, %f3, %f4"
    product = f"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{{sums}}}, %rd1, %rd2, 1, 1, 1, 0, 0;"
    lines = (
        ".version 8.0",
        ".target sm_90a",
        ".address_size 64",
        ".visible .entry _down_bwd_kernel(.param .u64 out)",
        ".reqntid 128",
        "{",
        ".reg .f32 %f<5>;",
        ".reg .b64 %rd<4>;",
        "ld.param.u64 %rd3, [out];",
        "mov.b64 %rd1, 4611686293305294848;",
        "mov.b64 %rd2, 4611686293305294848;",
        *(f"mov.f32 %f{i}, 0f00000000;" for i in range(1, 5)),
        "wgmma.fence.sync.aligned;",
        product,
        between,
        product,
        "wgmma.commit_group.sync.aligned;",
        "wgmma.wait_group.sync.aligned 0;",
        *(f"st.global.f32 [%rd3+{4 * i}], %f{i};" for i in range(1, 5)),
        "ret;",
        "}",
        "",
    )
    return "\n".join(lines)


def test_waits_that_ptxas_puts_between_products_are_found(tmp_path, record):
    """Its real output: products whose sums are read before they have ended."""
    asked = tmp_path / "_down_bwd_kernel.ptx"
    good, bad = (ptx_of(spoilt) for spoilt in ("", "add.f32 %f1, %f1, %f1;"))
    asked.write_text(good)
    assert kernels.complaints(asked, 90) == []
    asked.write_text(bad)
    assert any("warpgroup.wait is injected" in line for line in kernels.complaints(asked, 90))
    for key, text in (("good", good), ("bad", bad)):
        (tmp_path / key).mkdir()
        (tmp_path / key / asked.name).write_text(text)
        made = {"num_warps": 4, "num_stages": 3, "target": {"arch": 90}}
        (tmp_path / key / "_down_bwd_kernel.json").write_text(json.dumps(made))
    entry = kernels.serialised(tmp_path)
    assert list(entry["numbers"]) == ["_down_bwd_kernel, 4 warps, 3 stages, bad"]
    assert entry["note"] == "of 2 kernels with wgmma ptxas complains of 1"
    (tmp_path / "none").mkdir()
    assert "skipped" in kernels.serialised(tmp_path / "none")
