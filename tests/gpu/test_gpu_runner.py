"""`make gpu` on small sizes, in Triton's interpreter where there is no GPU: its parts, how they resume and fail."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace

import pytest
import torch

from benchmarks.gpu import kernels, report, rowwise, stamp, suite, tokens
from benchmarks.gpu.checks import assert_keep_rate
from benchmarks.gpu.models import entry_of, figures, memory_figures
from benchmarks.gpu.record import open_record
from benchmarks.gpu.subject import Subject, lengths
from benchmarks.gpu.timer import Timer
from fastbert.bench.compete import Worker
from fastbert.ops._common import triton_error

pytestmark = pytest.mark.skipif(triton_error() is not None, reason=str(triton_error()))
STAMP = {**stamp.make_stamp("0123456789ab"), "dirty": False}
TASK = {"threads": 1, "model": "tiny", "limit": 60, "smoke": True}


@pytest.fixture
def template(tmp_path):
    """A record in a folder of its own; what is said goes to the list `said`."""
    record = open_record("kernels", tmp_path, STAMP, lambda line: record.said.append(line), smoke=True)
    record.said = []
    return record


def content_of(template, part: str) -> dict:
    return json.loads((template.path.parent / f"{part}.json").read_text())


@pytest.mark.parametrize("part", (pytest.param("kernels", marks=pytest.mark.full), "ops", "models", "graphs"))
def test_a_part_runs_and_is_not_run_again(part, template, monkeypatch):
    assert suite.run([part], template) == 0
    content = content_of(template, part)
    assert content["complete"] and content["stamp"] == STAMP and content["smoke"]
    entries = content["entries"]
    skipped = {name for name, entry in entries.items() if "skipped" in entry}
    assert not any("failed" in entry for entry in entries.values())
    assert skipped == {name for name in entries if name.endswith(" cuda") and not torch.cuda.is_available()}
    if part == "kernels":
        assert {job.id for job in kernels.jobs(True, template.device)} == set(entries) - skipped
        assert all(entry["checks"] for name, entry in entries.items() if name not in skipped)
        ran = {name.split("/")[0].split(" ")[0]: name.rsplit(" ", 1)[1] for name in entries if name not in skipped}
        assert ran["attention"] == ran["add_layer_norm"] == ran["feed_forward"] == ran["cross_entropy"] == "triton"
    if part == "ops":
        assert content["facts"]["copy_bytes_per_second"] > 0 and content["figures"]["add_layer_norm_fwd"] > 0
        assert content["entries"]["attention head_dim 32"]["numbers"]["fastbert"]["bwd 32"] > 0
    if part == "models":
        for name in ("forward tiny bf16", "training tiny amp"):
            results = content["entries"][name]["results"]
            assert all(results[b][c]["tokens_per_second"] > 0 for b in results for c in results[b])
            assert results["half"]["fastbert"]["tokens"] == sum(lengths("half", True)) == 4 + 8 + 12 + 16
    if part == "graphs":
        assert content["entries"]["outputs tiny"]["batches"] == 20
    table = (template.path.parent / "results.md").read_text()
    assert f"| {part} | {len(entries)} | 0 | {len(skipped)} |" in table
    monkeypatch.setitem(suite.PARTS, part, suite.Part("no.such.module", "run", 1))
    assert suite.run([part], template) == 0
    assert f"{part}: done already, in {template.path.parent / part}.json" in template.said
    assert suite.run([part], replace(template, stamp={**STAMP, "kernel_hash": "another"})) == 1


def test_a_failing_entry_fails_its_part_alone_and_is_tried_again(template, monkeypatch):
    jobs = kernels.jobs
    few = ("pooling", "cross_entropy")
    monkeypatch.setattr(kernels, "jobs", lambda *of: [job for job in jobs(*of) if job.checks in few])
    literal = tokens.reference.pooling
    monkeypatch.setattr(tokens.reference, "pooling", lambda *args, **kwargs: literal(*args, **kwargs) * 1.5)
    monkeypatch.setitem(suite.PARTS, "sanitizer", suite.Part("no.such.module", "run", 1))
    assert suite.run(["sanitizer", "kernels", "memory"], template) == 1
    entries = content_of(template, "kernels")["entries"]
    (pooling,) = (name for name in entries if name.startswith("pooling"))
    assert "ragged mean: AssertionError: out: max error" in entries[pooling]["failed"]
    assert "failed" not in entries["cross_entropy bfloat16 triton"]
    assert "No module named 'no'" in content_of(template, "sanitizer")["entries"]["sanitizer"]["failed"]
    assert content_of(template, "memory")["complete"]
    assert any(line.startswith(f"- kernels {pooling}: failed: ") for line in template.said)
    monkeypatch.setattr(tokens.reference, "pooling", literal)
    kept = kernels.CHECKS["cross_entropy"]
    monkeypatch.setitem(kernels.CHECKS, "cross_entropy", None)  # is not run again
    assert suite.run(["kernels"], template) == 0
    monkeypatch.setitem(kernels.CHECKS, "cross_entropy", kept)
    assert suite.run(["kernels"], template, again=True) == 0
    monkeypatch.delitem(kernels.CHECKS, "add_layer_norm")
    assert suite.run(["kernels"], template, again=True) == 1
    failed = content_of(template, "kernels")["entries"]["add_layer_norm"]["failed"]
    assert failed == "has a kernel for GPUs, and no check here"


def test_inference_must_have_the_bits_of_training(monkeypatch):
    right = rowwise.ops.cross_entropy

    def wrong(**operands):
        return right(**operands) * (1 if torch.is_grad_enabled() else 1 + 1e-6)

    monkeypatch.setattr(rowwise.ops, "cross_entropy", wrong)
    results = list(kernels.run_checks(kernels.Job("cross_entropy", "float32", "triton", True)))
    assert results[0][1] == "AssertionError: inference gives other bits than training"


def test_a_process_of_its_own(tmp_path, capfd, monkeypatch):
    arguments = ["--smoke", "--part", "memory", "--output", str(tmp_path), "--commit", "0123456789ab"]
    assert suite.main(arguments) == 0
    content = json.loads((tmp_path / "memory.json").read_text())
    assert content["entries"]["memory"]["skipped"].startswith("there is no GPU") or torch.cuda.is_available()
    assert "| latency, 1 x 32, CUDA graphs, ms | <= 0.6 |  | not measured |" in capfd.readouterr().out

    monkeypatch.setattr(suite, "run_limited", lambda command, seconds: subprocess.CompletedProcess(command, -11))
    monkeypatch.setattr(suite.stamps, "make_stamp", lambda commit: STAMP)
    assert suite.main([*arguments, "--again"]) == 1
    failed = json.loads((tmp_path / "memory.json").read_text())["entries"]["memory"]["failed"]
    assert failed == "its process ended with exit code -11"


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is about machines without a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert suite.main([]) == 1
    assert capsys.readouterr().out.startswith("there is no GPU here")


@pytest.mark.parametrize("verdict", ("clean", "error"))
def test_the_sanitizer(verdict, template, monkeypatch, tmp_path):
    tool = tmp_path / "compute-sanitizer"
    does = {"clean": 'shift 6; exec "$@"', "error": "echo '========= Invalid __global__ read of size 2 bytes'; exit 86"}
    arguments = "--tool memcheck --error-exitcode 86 --report-api-errors no"
    tool.write_text(f'#!/bin/sh\n[ "$1 $2 $3 $4 $5 $6" = "{arguments}" ] || exit 1\n{does[verdict]}\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(kernels, "SANITIZED", ("cross_entropy",))
    assert suite.run(["sanitizer"], template) == (0 if verdict == "clean" else 1)
    entries = content_of(template, "sanitizer")["entries"]
    entry = entries["memcheck cross_entropy bfloat16 triton"]
    if verdict == "clean":
        assert entry["checks"] == ["9x16x37x5", "smoothing and z-loss", "no label"]
    else:
        assert entry["failed"] == "exit code 86: Invalid __global__ read of size 2 bytes"


# --------------------------------------------------------------------------------------------------------------------
# Contestants


def test_a_contestant_in_a_process():
    worker = Worker(
        {**TASK, "contestant": "fastbert", "mode": "training", "precision": "amp"}, "benchmarks.gpu.subject"
    )
    try:
        ready = worker.answer()
        assert ready == {
            "full": {"tokens": 64, "peak_memory": ready["full"]["peak_memory"]},
            "half": {"tokens": 40, "peak_memory": ready["half"]["peak_memory"]},
        }
        assert worker.ask("half")["seconds"] > 0 and worker.ask("full")["seconds"] > 0
    finally:
        worker.close()


@pytest.mark.parametrize("mode", ("forward", "training"))
def test_a_wrong_model_is_not_timed(mode):
    subject = Subject({**TASK, "contestant": "fastbert", "mode": mode, "precision": "bf16"})
    subject.check("half")
    with torch.no_grad():
        next(p for n, p in subject.model.named_parameters() if "intermediate.dense.weight" in n).mul_(1.2)
    with pytest.raises(AssertionError, match="half output: max error"):
        subject.check("half")


def test_figures_take_the_smaller_ratio_and_the_larger_memory():
    def results(ours, theirs):
        batch = {
            "fastbert": {"tokens_per_second": ours, "peak_memory": 6},
            "transformers-sdpa": {"tokens_per_second": 1.0, "peak_memory": theirs},
            "transformers-compile": {"tokens_per_second": theirs, "peak_memory": 2 * theirs},
        }
        return {"results": {"full": batch, "half": batch}}

    entries = {"training bert-base amp": results(30.0, 10.0), "training bert-large amp": results(8.0, 4.0)}
    found = dict(figures(entries))
    assert found == {
        "training_bert-base": 30.0, "training_bert-large": 8.0,
        "training_over_compile_full": 2.0, "training_over_compile_half": 2.0,
    }  # fmt: skip
    assert memory_figures(entries) == {"training_memory_ratio": 1.5}
    assert set(found) | {"training_memory_ratio"} <= set(report.TARGETS)
    failed = entry_of({"full": {"fastbert": {"failed": "why"}, "transformers-sdpa": {"tokens_per_second": 2.0}}})
    assert failed["failed"] == "full: why" and failed["numbers"]["transformers-sdpa"] == {"full, tokens/s": 2.0}


def test_targets_and_timer(monkeypatch):
    assert report.TARGETS["latency_ms"].is_met(0.6) and not report.TARGETS["latency_ms"].is_met(0.61)
    assert report.TARGETS["attention_fwd_512"].is_met(335.0) and not report.TARGETS["pooling_fwd"].is_met(0.8)
    calls = []
    timer = Timer(torch.device("cpu"), rounds=3)
    found = timer.medians({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")})
    assert calls == ["a", "b"] + ["a", "b"] * 3 and found["a"] >= 0
    clock = iter(range(100))

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = next(clock)

        def query(self):
            return is_late

        def elapsed_time(self, end):  # milliseconds
            return 1000.0 * (end.at - self.at)

    waits, is_late = [], False
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(len(calls)))
    timer.is_gpu, calls[:] = True, []
    assert timer.medians({"a": lambda: calls.append("a")}) == {"a": 1.0}  # a tick from event to event
    assert waits == [3, 6]  # once warm, and before the times are read
    assert timer.note() == {}
    is_late = True
    timer.medians({"a": lambda: None})
    assert timer.note() == {"note": "the GPU waited for the host: a"} and timer.note() == {}
    with pytest.raises(AssertionError, match="were kept"):
        assert_keep_rate(torch.rand(10000) < 0.8, 0.25)


# --------------------------------------------------------------------------------------------------------------------
# Stale or not


def test_stale_results_name_what_changed(tmp_path):
    def write(folder: str, part: str, time: str, sources: dict, name: str | None = "NVIDIA H200"):
        path = tmp_path / folder / f"{part}.json"
        path.parent.mkdir(exist_ok=True)
        content = {"gpu": name, "time": time, "sources": sources, "kernel_hash": stamp.kernel_hash(sources)}
        path.write_text(json.dumps({"part": part, "stamp": content}))

    now = {"kernels/a.py": "1", "kernels/b.py": "2"}

    def verdict():
        return stamp.staleness(sorted(tmp_path.glob("*/*.json")), now)

    assert verdict() == (False, "no GPU results yet")
    write("cpu", "kernels", "2026-09-01", {}, name=None)
    (tmp_path / "cpu" / "results.json").write_text('{"machine": {}}')
    (tmp_path / "cpu" / "list.json").write_text("[]")
    assert verdict() == (False, "no GPU results yet")
    write("old", "kernels", "2026-01-01", {"kernels/a.py": "0"})
    write("new", "kernels", "2026-02-01", now)
    is_current, line = verdict()
    assert is_current and line.startswith("new: GPU results are those of the present kernels")
    write("new", "ops", "2026-02-02", {"kernels/a.py": "1", "kernels/b.py": "9", "kernels/c.py": "3"})
    is_current, line = verdict()
    assert not is_current and line.splitlines()[1:] == ["  ops: kernels/b.py, kernels/c.py"]


def test_only_committed_results_count(tmp_path, monkeypatch):
    for folder, name in (("one", "ops"), ("two", "ops")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.json").write_text("{}")
    monkeypatch.setattr(stamp, "ROOT", tmp_path)
    assert len(stamp.committed_results(tmp_path)) == 2  # no git here
    for command in (["init", "-q"], ["add", "one"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    assert [path.parent.name for path in stamp.committed_results(tmp_path)] == ["one"]


def test_the_hash_is_of_all_that_kernels_are_made_from(tmp_path):
    names = {name.split("/")[0] + "/" + name.split("/")[1] for name in stamp.source_hashes()}
    assert {"kernels/blocks.py", "csrc/include", "fastbert/ops"} <= names
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "a.py").write_text("1")
    first = stamp.source_hashes(tmp_path)
    (tmp_path / "kernels" / "a.py").write_text("2")
    (tmp_path / "kernels" / "notes.txt").write_text("no source")
    assert list(first) == ["kernels/a.py"] and stamp.changed_files(first, stamp.source_hashes(tmp_path)) == set(first)
    assert stamp.slug("NVIDIA H200") == "nvidia-h200"
