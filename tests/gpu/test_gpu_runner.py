"""`make gpu` on small sizes, in Triton's interpreter where there is no GPU: its parts, how they resume and fail."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace

import pytest
import torch

from benchmarks.gpu import cpu, kernels, profile, rowwise, sequences, stamp, suite
from benchmarks.gpu.checks import Timer, assert_keep_rate
from benchmarks.gpu.models import entry_of, figures, memory_figures
from benchmarks.gpu.record import TARGETS, open_record
from benchmarks.gpu.steps import part as steps
from benchmarks.gpu.steps.batches import BATCHES
from benchmarks.gpu.subject import Subject, lengths
from fastbert.bench.compete import ContestantProcess
from fastbert.native.availability import triton_error

pytestmark = pytest.mark.skipif(triton_error() is not None, reason=str(triton_error()))
STAMP = {**stamp.make_stamp("0123456789ab"), "dirty": False}
MODES = (("forward", "bf16"), ("training", "amp"))
TASK = {"threads": 1, "model": "tiny", "limit": 60, "smoke": True, "batches": ["full", "half"]}


@pytest.fixture
def template(tmp_path):
    """A record in a folder of its own; what is said goes to the list `said`."""
    record = open_record("kernels", tmp_path, STAMP, lambda line: record.said.append(line), smoke=True)
    record.said = []
    return record


def content_of(template, part: str) -> dict:
    return json.loads((template.path.parent / f"{part}.json").read_text())


@pytest.mark.full  # test_a_failing_entry_fails_its_part_alone runs some of a part
@pytest.mark.parametrize("part", ("steps", "kernels", "models", "profile", "ops", "cpu"))
def test_a_part_runs_and_is_not_run_again(part, template, monkeypatch):
    assert suite.run([part], template) == 0
    content = content_of(template, part)
    assert content["complete"] and content["stamp"] == STAMP and content["smoke"]
    entries = content["entries"]
    skipped = {name for name, entry in entries.items() if "skipped" in entry}
    assert not any("failed" in entry for entry in entries.values())
    only_on_gpus = {name for name in entries if name.endswith(" cuda") or name == kernels.SERIALISED}
    assert skipped == (set() if torch.cuda.is_available() else only_on_gpus)
    if part == "steps":
        assert list(entries) == [*steps.CHECK_NAMES.values(), *BATCHES, "all sizes"]
        assert content["figures"]["steps_4k"] > 0 and len(entries["all sizes"]["numbers"]) == 4
        for batch in BATCHES:
            rows = entries[batch]["numbers"]
            assert all(row["launches"] > 0 and row["host ms"] > 0 for row in rows.values())
            assert rows["fastbert, op by op"]["layers in one op"] == 0
    if part == "kernels":
        assert {job.id for job in kernels.jobs(True, template.device)} == set(entries) - skipped
        assert all(entry["checks"] for name, entry in entries.items() if name not in skipped)
        ran = {name.split("/")[0].split(" ")[0]: name.rsplit(" ", 1)[1] for name in entries if name not in skipped}
        assert ran["attention"] == ran["add_rms_norm"] == ran["feed_forward"] == ran["cross_entropy"] == "triton"
    if part == "ops":
        assert content["facts"]["copy_bytes_per_second"] > 0 and content["figures"]["add_layer_norm_fwd"] > 0
        assert entries["attention head_dim 32"]["numbers"]["fastbert"]["bwd 32"] > 0
        assert entries["attention with dropout"]["numbers"]["fastbert"]["bwd 16"] > 0
        kinds = entries["attention, kinds"]["numbers"]
        assert len(kinds) == 8 and all(row["fwd 32"] > 0 and row["bwd 32"] > 0 for row in kinds.values())
        memory_bound = entries["memory-bound, hidden_size 64"]["numbers"]
        assert {"add_rms_norm_fwd, triton", "add_rms_norm_bwd, triton"} <= memory_bound.keys()
        assert entries["gated feed_forward, hidden_size 32"]["numbers"]["apart"]["fwd+bwd 16"] > 0
        products = {name: row["32 -> 128"] for name, row in entries["products"]["numbers"].items()}
        timed = {name for name, rate in products.items() if isinstance(rate, float)}
        assert {"x w + bias", "x w + matrix (addmm, beta = 1)", "gelu of x w + bias, fastbert's epilogue"} <= timed
        assert all(name.startswith("fp8") for name in products.keys() - timed)  # which needs a torch that has it
        assert not any(entries["candidates"]["numbers"].values())  # each was tried, and nothing speaks against it
    if part == "models":
        names = [f"{of} {model} {kind}" for model in ("tiny", "tiny-modernbert") for of, kind in MODES]
        assert list(entries) == names
        for name in names:
            results = entries[name]["results"]
            assert all(results[b][c]["tokens_per_second"] > 0 for b in results for c in results[b])
            assert results["half"]["fastbert"]["tokens"] == sum(lengths("half", True)) == 4 + 8 + 12 + 16
    if part == "profile":
        assert entries["outputs tiny"]["batches"] == 20
        rows = entries["launches and gaps"]["numbers"]
        assert len(rows) == 2 * 2 * 2 + 3 and all(0 <= row["share of gaps"] <= 1 for row in rows.values())
        assert rows["training tiny, fastbert, half"]["launches"] > rows["forward tiny, fastbert, half"]["launches"]
        kernels_of_a_step = entries["training tiny, transformers-sdpa"]["numbers"]
        assert abs(sum(row["share"] for row in kernels_of_a_step.values()) - 1) < 1e-6
    if part == "cpu":
        numbers = entries["scaling"]["numbers"]
        assert len(numbers) == 2 * len(cpu.KINDS)
        assert all(list(row) == [str(n) for n in cpu.counts()] for row in numbers.values())
        assert all(numbers[f"{kind}, over one thread"]["1"] == 1 for kind in cpu.KINDS)
    table = (template.path.parent / "results.md").read_text()
    assert f"| {part} | {len(entries)} | 0 | {len(skipped)} |" in table
    monkeypatch.setitem(suite.PARTS, part, suite.Part("no.such.module", "run", 1))
    assert suite.run([part], template) == 0
    assert f"{part}: done already, in {template.path.parent / part}.json" in template.said
    assert suite.run([part], replace(template, stamp={**STAMP, "kernel_hash": "another"})) == 1


@pytest.mark.simulated
def test_a_failing_entry_fails_its_part_alone_and_is_tried_again(template, monkeypatch):
    jobs = kernels.jobs
    few = ("pooling", "cross_entropy")
    monkeypatch.setattr(kernels, "jobs", lambda *of: [job for job in jobs(*of) if job.checks in few])
    literal = sequences.reference.pooling
    monkeypatch.setattr(sequences.reference, "pooling", lambda *args, **kwargs: literal(*args, **kwargs) * 1.5)
    monkeypatch.setitem(suite.PARTS, "sanitizer", suite.Part("no.such.module", "run", 1))
    monkeypatch.setattr(cpu, "run_part", lambda record: record.write())
    assert suite.run(["sanitizer", "kernels", "cpu"], template) == 1
    entries = content_of(template, "kernels")["entries"]
    (pooling,) = (name for name in entries if name.startswith("pooling"))
    assert "slack mean: AssertionError: out: max error" in entries[pooling]["failed"]
    assert "failed" not in entries["cross_entropy bfloat16 triton"]
    assert "No module named 'no'" in content_of(template, "sanitizer")["entries"]["sanitizer"]["failed"]
    assert content_of(template, "cpu")["complete"]
    assert any(line.startswith(f"- kernels {pooling}: failed: ") for line in template.said)
    monkeypatch.setattr(sequences.reference, "pooling", literal)
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


@pytest.mark.full
def test_a_process_of_its_own(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))  # no sanitizer there either
    arguments = ["--smoke", "--part", "sanitizer", "--output", str(tmp_path), "--commit", "0123456789ab"]
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    assert suite.main(arguments) == 0
    content = json.loads((tmp_path / "sanitizer.json").read_text())
    assert content["entries"]["compute-sanitizer"]["skipped"].startswith("compute-sanitizer is neither")
    out = capfd.readouterr().out
    assert "| latency, 1 x 32, CUDA graphs, ms | <= 0.6 |  | not measured |" in out
    assert out.splitlines()[-2].startswith("| sanitizer | 1 | 0 | 1 |")  # the short table comes last

    monkeypatch.setattr(suite, "run_limited", lambda command, seconds: subprocess.CompletedProcess(command, -11))
    monkeypatch.setattr(suite.stamps, "make_stamp", lambda commit: STAMP)
    assert suite.main([*arguments, "--again"]) == 1
    failed = json.loads((tmp_path / "sanitizer.json").read_text())["entries"]["sanitizer"]["failed"]
    assert failed == "its process ended with exit code -11"


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is about machines without a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert suite.main([]) == 1
    assert capsys.readouterr().out.startswith("there is no GPU here")


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is about machines without a GPU")
def test_scaling_of_the_cpu_needs_no_gpu(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(suite, "run", lambda parts, template, *others: asked.append((parts, template.smoke)) or 0)
    assert suite.main(["--part", "cpu", "--output", str(tmp_path)]) == 0 and asked == [(["cpu"], False)]
    assert suite.main(["--part", "cpu", "--part", "ops", "--output", str(tmp_path)]) == 1


def test_gaps_are_when_nothing_runs():
    span = profile.Span
    # Two steps: b runs beside a's end, then nothing does for 5 us.
    spans = [span("a", 0.0, 10.0), span("b", 8.0, 12.0), span("a", 17.0, 20.0), span("b", 20.0, 22.0)]
    assert profile.gaps_of(spans, 2) == {
        "launches": 2.0,
        "ms": 0.011,
        "busy ms": 0.0085,
        "share of gaps": 5 / 22,
        "longest gap, us": 5.0,
    }
    rows = profile.top_kernels(spans, 2)
    assert rows == {
        "a": {"calls": 1.0, "us": 6.5, "share": 13 / 19}, "b": {"calls": 1.0, "us": 3.0, "share": 6 / 19}
    }  # fmt: skip
    many = [span(f"kernel {i}", float(i), i + 1.0) for i in range(profile.TOP + 3)]
    assert profile.top_kernels(many, 1)["all others"]["calls"] == 3


@pytest.mark.full
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


@pytest.mark.full  # test_a_part_runs has the same code in this process
def test_a_contestant_in_a_process():
    worker = ContestantProcess(
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


@pytest.mark.full
@pytest.mark.parametrize("mode", ("forward", "training"))
@pytest.mark.parametrize("model,weight", (("tiny", "intermediate.dense.weight"), ("tiny-modernbert", "mlp.Wi.weight")))
def test_a_wrong_model_is_not_timed(model, weight, mode):
    subject = Subject({**TASK, "model": model, "contestant": "fastbert", "mode": mode, "precision": "bf16"})
    subject.check("half")
    with torch.no_grad():
        next(p for n, p in subject.model.named_parameters() if weight in n).mul_(1.2)
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
        "training_bert-base": 30.0,
        "training_bert-large": 8.0,
        "training_over_compile_full": 2.0,
        "training_over_compile_half": 2.0,
    }
    assert memory_figures(entries) == {"training_memory_ratio": 1.5}
    assert set(found) | {"training_memory_ratio"} <= set(TARGETS)
    failed = entry_of({"full": {"fastbert": {"failed": "why"}, "transformers-sdpa": {"tokens_per_second": 2.0}}})
    assert failed["failed"] == "full: why" and failed["numbers"]["transformers-sdpa"] == {"full, tokens/s": 2.0}


def test_targets_and_timer(monkeypatch):
    assert TARGETS["latency_ms"].is_met(0.6) and not TARGETS["latency_ms"].is_met(0.61)
    assert TARGETS["attention_fwd_512"].is_met(335.0) and not TARGETS["pooling_fwd"].is_met(0.8)
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
