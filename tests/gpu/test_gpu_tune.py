"""`make gpu PART=tune` on small sizes, in Triton's interpreter: candidates for attention's blocks."""

from __future__ import annotations

import importlib
import json
import subprocess

import pytest
import torch

from benchmarks.gpu import stamp, suite, tune
from benchmarks.gpu.checks import Where
from benchmarks.gpu.record import open_record
from benchmarks.gpu.tune import Candidate
from fastbert.ops._common import triton_error

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
    found = [{"candidate": [64, "fwd", 128, 16, 8, 3], "why not": "OutOfResources: shared memory"}]
    found += [{"candidate": [64, "fwd", 128, step, 8, 3], "spills": step - 32, "registers": 255} for step in (32, 64)]
    out = "".join(f"result: {json.dumps(each)}\n" for each in found) + "result: {cut"

    def process(command, **options):
        share = out if json.loads(command[-1])["asked"][0][2][1] == 16 else ""
        return subprocess.CompletedProcess(command, 0, share, "")

    class Batch:
        def __init__(self, where, head_dim, length):
            self.length = length

        def present(self, which):
            return Candidate(128, 128, 8, 3)

        def check(self, which, candidate):
            pass

        def rates(self, timer, which, candidate):
            return 100.0 * candidate.step, candidate.step / 50

    monkeypatch.setattr(tune.subprocess, "run", process)
    monkeypatch.setattr(tune, "Batch", Batch)
    tune.run_part(record)
    numbers = record.entries["fwd, head_dim 64"]["numbers"]
    assert [list(row) for row in numbers.values()] == [
        ["why not"], ["512", "512, over the table's", "registers", "spills"],
        ["512", "512, over the table's", "registers", "spills"],
    ]  # fmt: skip
    summary = record.entries["candidates"]
    assert summary["failed"] == "1 of 4 candidates were not compiled, or not reached, in time"
    assert summary["numbers"]["fwd head_dim 64 S 512"]["best"] == "128 x 32, 8 warps, 3 stages"


def test_compiling_runs_each_candidate_once():
    asked = [(32, "fwd", (16, 16, 4, 2)), (32, "dq", (24, 16, 4, 2))]
    right, wrong = tune.compile_here(WHERE, {"asked": asked})
    assert right == {"candidate": [32, "fwd", 16, 16, 4, 2]}
    assert wrong["candidate"] == [32, "dq", 24, 16, 4, 2] and "Error" in wrong["why not"]
