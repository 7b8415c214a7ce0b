"""`make gpu` on machines that are lent for minutes: a run that is ended early, goes on elsewhere, or meets a crash."""

from __future__ import annotations

import json
import math
import os
import select
import subprocess
import sys
import time

import pytest
import torch

from benchmarks.gpu import kernels, models, ops, stamp, suite
from benchmarks.gpu.checks import Timer, Where
from benchmarks.gpu.record import entry_tables, open_record, results_in, results_of, run_limited
from fastbert.native.availability import triton_error

pytestmark = pytest.mark.skipif(triton_error() is not None, reason=str(triton_error()))
STAMP = {**stamp.make_stamp("0123456789ab"), "dirty": False}


@pytest.fixture
def template(tmp_path):
    record = open_record("kernels", tmp_path / "out", STAMP, lambda line: record.said.append(line), smoke=True)
    record.path.parent.mkdir()
    record.said = []
    return record


def test_a_part_is_not_begun_when_too_little_time_is_left(template):
    assert suite.run(["cpu", "ops"], template, within=suite.LEAST_SECONDS - 1) == 1
    assert not list(template.path.parent.iterdir())
    assert template.said[-2] == "not begun within 29 s, the same command goes on with: cpu, ops"


def test_one_command_ends_within_eight_minutes(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(suite, "run", lambda *arguments: given.append(arguments[4]) or 0)
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # which main sets, and which must not be left behind
    assert suite.main(["--smoke", "--output", str(tmp_path)]) == 0
    assert suite.main(["--smoke", "--output", str(tmp_path), "--within", "500"]) == 0
    assert given == [480, 500]


def test_a_part_gets_what_is_left_and_a_little_less_for_itself(template, monkeypatch):
    commands = []

    def process(command, seconds):
        commands.append((command[-1], seconds))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(suite, "run_limited", process)
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0 + 50 * len(commands))  # a part takes 50 seconds
    suite.run(["cpu", "models"], template, arguments=["--smoke"], within=400)
    assert commands == [("290", 300), ("340", 350)]


@pytest.mark.parametrize("code,said", ((1, "its process ended with exit code 1"), (suite.HAS_FAILED, None)))
def test_an_unexpected_exception_is_not_taken_for_a_result(code, said, template, monkeypatch):
    monkeypatch.setattr(suite, "run_limited", lambda command, seconds: subprocess.CompletedProcess(command, code))
    assert suite.run(["ops"], template, arguments=["--smoke"]) == 1
    path = template.path.with_name("ops.json")
    assert path.exists() == (said is not None)
    assert said is None or json.loads(path.read_text())["entries"]["ops"]["failed"] == said


def test_a_run_goes_on_in_another_folder(template, tmp_path, monkeypatch):
    default = tmp_path / "default"
    for part, of in (("ops", STAMP), ("profile", {**STAMP, "extension": "another"}), ("cpu", STAMP)):
        record = open_record(part, default, of, template.say, smoke=True)
        record.complete = True
        record.add("entry", {"numbers": {part: {"a": 1.0}}})
    folder = template.path.parent
    open_record("cpu", folder, STAMP, template.say, smoke=True).write()  # what is there stays
    suite.take_over(default, folder, STAMP, suite.together(["ops"]))
    assert sorted(path.name for path in folder.iterdir()) == ["cpu.json", "ops.json"]
    assert not json.loads((folder / "cpu.json").read_text())["entries"]
    assert suite.run(["ops"], template) == 0 and f"ops: done already, in {folder / 'ops.json'}" in template.said
    monkeypatch.setattr(suite, "run_part", lambda record: record.write())
    assert suite.run(["cpu"], template, kept=tmp_path / "kept") == 1  # for a command that has another folder
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["cpu.json", "ops.json"]


def test_the_tables_are_written_after_every_part(template, monkeypatch):
    seen = []
    monkeypatch.setattr(suite, "run_part", lambda record: (record.write(), seen.append(record.part)))
    monkeypatch.setattr(suite, "write_tables", lambda folder: seen.append("tables") or [])
    suite.run(["ops", "cpu"], template)
    assert seen == ["ops", "tables", "cpu", "tables", "tables"]


def test_every_row_of_a_table_has_the_cells_of_its_head():
    numbers = {"tried": {"a": {}, "b": {}}, "timed": {"a": {"x": 1.0}, "b": {"y": "late"}}}
    entries = {name: {"numbers": rows} for name, rows in numbers.items()}
    lines = entry_tables([{"part": "ops", "entries": entries}])
    cells = [line.count("|") - 1 for line in lines if line.startswith("|")]
    assert cells == [1] * 4 + [3] * 4


def test_what_a_command_has_started_ends_with_it(tmp_path, monkeypatch):
    """The pipe that the command's child holds open ends when the child does, however long the machine takes for it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

    def times_out(process, timeout):
        os.set_blocking(reader, True)
        while os.read(reader, 1) == b"":  # it is not open yet
            time.sleep(0.01)
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", times_out)
    with pytest.raises(subprocess.TimeoutExpired):
        run_limited(["sh", "-c", f"(echo begun; exec sleep 3600) > {pipe} & wait"], 1)
    assert os.read(reader, 100) == b"egun\n"
    assert select.select([reader], [], [], 60)[0] and os.read(reader, 1) == b"", "its child is still there"
    os.close(reader)


def test_a_job_is_ended_with_its_part(template, monkeypatch):
    """Sanitized jobs have a session of their own, which the end of the part's would leave alone."""
    limits = []

    def process(command, seconds, **options):
        limits.append(seconds)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(kernels, "run_limited", process)
    monkeypatch.setattr(kernels, "sanitizer", lambda: "compute-sanitizer")
    job = kernels.Job("pooling", "bfloat16", "triton", True)
    kernels.sanitize(template, "memcheck", job)
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    template.deadline = 1007.0
    kernels.sanitize(template, "memcheck", job)
    assert limits == [kernels.SANITIZER_SECONDS, 7]
    assert template.left == 7 and open_record("ops", template.path.parent, STAMP, print).left == math.inf


def test_the_sanitizer_may_be_beside_nvcc(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    assert kernels.sanitizer() is None
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "compute-sanitizer").touch(mode=0o755)
    assert kernels.sanitizer() == str(tmp_path / "bin" / "compute-sanitizer")


def test_only_its_own_lines_are_a_jobs_results():
    noise = '[W730 a warning]\n[]\nresult: ["a", null]\nresult: ["b", "why"]\nresult: ["cut'
    assert results_in(noise) == [["a", None], ["b", "why"]]


def test_a_child_that_dies_or_hangs_leaves_what_it_has_found(monkeypatch):
    says = "import os; print('result: [1]', flush=True); "
    assert results_of([sys.executable, "-c", says], 60) == ([[1]], None)
    assert results_of([sys.executable, "-c", says + "os.kill(os.getpid(), 9)"], 60) == ([[1]], "exit code -9: ")

    def times_out(command, **options):  # as a child that has hung after its first result
        raise subprocess.TimeoutExpired(command, options["timeout"], b"result: [1]\nresult: [2")

    monkeypatch.setattr(subprocess, "run", times_out)
    assert results_of(["never run"], 7) == ([[1]], "not ready after 7 s")


def test_what_was_compiled_is_kept_for_the_next_command(monkeypatch):
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/the/user's")
    suite.keep_caches()
    assert os.environ["TRITON_CACHE_DIR"] == str(stamp.ROOT / "build" / "gpu-cache" / "triton")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/the/user's"
    monkeypatch.delenv("TRITON_CACHE_DIR")


def test_at_most_eight_files_come_back():
    for asked in (["ops"], ["steps", "cpu"], ["tune"], ["tune", "ops"]):
        together = suite.together(asked)
        assert {*asked} <= {*together} and len(together) + 1 <= 8  # a file a part, and results.md


def test_a_peer_that_is_not_compiled_in_time_is_skipped_and_says_so(template, monkeypatch):
    limits = {}

    class Late:
        def __init__(self, task, module):
            self.task = task
            limits[task["contestant"]] = task["limit"]

        def answer(self):
            if self.task["contestant"] == models.COMPILED:
                raise models.WorkerError(f"{models.TIME_LIMIT}: {models.COMPILED} was not prepared within 300 s")
            return {batch: {"tokens": 8, "peak_memory": None} for batch in models.BATCHES}

        def ask(self, batch):
            return {"seconds": 2.0}

        def close(self):
            pass

    monkeypatch.setattr(models, "ContestantProcess", Late)
    monkeypatch.setattr(models, "GROUPS", ((0.5, models.FORWARD[:1]),))
    template.smoke, template.deadline = False, math.inf
    models.run_part(template)
    assert limits[models.COMPILED] == models.LONGEST_COMPILED > limits["fastbert"] == models.LONGEST
    (entry,) = template.entries.values()
    assert entry["results"]["full"][models.COMPILED] == {
        "skipped": f"{models.TIME_LIMIT}: {models.COMPILED} was not prepared within 300 s"
    }
    assert entry["numbers"]["fastbert"]["full, tokens/s"] == 4.0 and "failed" not in entry
    monkeypatch.setattr(models, "COMPILED", "fastbert")  # ours is late: that is a failure
    template.entries.clear()
    models.run_part(template)
    assert "TimeLimit" in template.entries["forward bert-base bf16"]["failed"]


def test_a_stamp_tells_which_kernels_were_there(monkeypatch):
    for extension, cuda, expected in ((None, None, "cpu and cuda"), (None, "no", "cpu"), ("no", "no", None)):
        monkeypatch.setattr(stamp, "extension_error", lambda error=extension: error)
        monkeypatch.setattr(stamp, "cuda_error", lambda error=cuda: error)
        found = stamp.make_stamp("x")
        assert found["extension"] == expected
        assert stamp.same_run(found, STAMP) == (expected == STAMP["extension"] and found["commit"] == STAMP["commit"])
    assert (torch.version.cuda is not None) == (found["cuda"] is not None)


def test_a_tool_that_hangs_is_no_tool(monkeypatch):
    def hangs(*args, **options):
        raise subprocess.TimeoutExpired("nvidia-smi", 30)

    monkeypatch.setattr(stamp.subprocess, "run", hangs)
    assert stamp._output("sh", "-c", "true") is None


def test_bytes_are_those_that_must_come_from_memory(template, monkeypatch):
    """A row of a table that all tokens share is read once."""
    where = Where(torch.device("cpu"), torch.bfloat16, "triton", True)
    timer = Timer(where.device, 1)
    monkeypatch.setattr(Where, "integers", lambda where, limit, *shape, seed=0: torch.zeros(shape, dtype=torch.int64))
    monkeypatch.setattr(timer, "medians", lambda calls: dict.fromkeys(calls, 1.0))
    template.facts["copy_bytes_per_second"] = 1.0
    numbers = ops.memory_bound((template, where, timer), 64)["numbers"]
    matrix, ids, row = 32 * 64 * 2, 32 * 8, 64 * 2
    moved = {name.removesuffix(", triton"): row["share of copy"] for name, row in numbers.items()}
    assert moved["embed_layer_norm_fwd"] == matrix + 3 * ids + 3 * row
    assert moved["add_layer_norm_fwd"] == moved["add_layer_norm_bwd"] == 3 * matrix and moved["pooling_fwd"] == matrix


def test_keys_that_a_window_leaves_out_are_no_work():
    for length, window in ((5, 1), (7, 3), (4, 9), (1, 0), (6, -1)):
        index = torch.arange(length)
        seen = (index[:, None] - index).abs() <= (window if window >= 0 else length)
        assert ops.keys_seen(length, window) == int(seen.sum())
