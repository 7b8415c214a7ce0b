"""The timer and the benchmark's own honesty: a wrong output gets no time, what is missing says why."""

from __future__ import annotations

import importlib.util
import json
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from seeds import manual_seed

from fastbert.bench import ceiling, compete, report, worker
from fastbert.bench.contestants import CONTESTANTS, Contestant
from fastbert.bench.jobs import BenchJob
from fastbert.bench.timing import Timing, describe_machine, measure_once
from fastbert.cli import main
from fastbert.testing.cases import MODELS, WORKLOADS, Workload

pytestmark = pytest.mark.dear_to_set_up
BY_NAME = {workload.id: workload for workload in WORKLOADS}
SETTINGS = compete.BenchSettings(
    model="tiny",
    precisions=("float32",),
    workloads=(BY_NAME["1x16"],),
    contestants=("fastbert", "transformers-sdpa", "absent"),
    rounds=2,
    restarts=1,
    threads=1,
)


def test_the_timer_calls_until_the_time_is_full(monkeypatch):
    """By a clock that goes on with the calls alone: a busy machine's own would say anything."""
    calls, now = [], [0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def taking_two():
        calls.append(1)
        now[0] += 2

    assert measure_once(taking_two, min_seconds=5) == 2
    assert len(calls) == 3  # the first number of calls that takes 5 seconds
    assert measure_once(taking_two, min_seconds=0) == 2 and len(calls) == 4


def test_quantiles():
    assert Timing.of([5.0, 1.0, 3.0, 2.0, 4.0]) == Timing(3.0, 2.0, 4.0, 5)


def test_machine_description_is_whole():
    machine = describe_machine()
    assert machine["torch"] == torch.__version__ and machine["cpu"] and machine["threads"] >= 1


@pytest.fixture(scope="module")
def cells(tmp_path_factory) -> compete.Run:
    """A run whose checkpoint and oracle of 1x16 are there."""
    cells = compete.Run(SETTINGS, str(tmp_path_factory.mktemp("bench")), say=lambda line: None)
    compete.step(**cells.task("checkpoint", model="tiny"))
    compete.step(**cells.task("reference", model="tiny", workload="1x16"))
    cells.references.add("1x16")
    return cells


@pytest.fixture(scope="module")
def row(cells) -> dict:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONTESTANTS, "absent", Contestant(("float32",), CONTESTANTS["fastbert"].load, ("no_such_thing",)))
        return cells.cell("float32", BY_NAME["1x16"])


@pytest.mark.full  # a worker is a process that loads all of it; the report is made of made-up rows
def test_a_whole_cell(row):
    ours, theirs = row["results"]["fastbert"], row["results"]["transformers-sdpa"]
    for result in (ours, theirs):
        assert result["tokens_per_second"] == pytest.approx(16 / result["timing"]["median"])
        assert result["timing"]["rounds"] == 2 and result["cosine"] == pytest.approx(1.0)
        assert result["share_of_ceiling"] == pytest.approx(result["gflops"] / row["ceiling_gflops"])
        assert result["start_seconds"] > 0 and 100 < result["peak_memory"] / 2**20 < 2000
    assert row["results"]["absent"] == {
        "skipped": "not installed: no_such_thing (pip install -e '.[bench]' in a clone of fastbert)"
    }
    assert report.best_peer(row) == "transformers-sdpa"


@pytest.mark.full  # as the one before
def test_a_run_writes_its_results_and_resumes(row, monkeypatch, tmp_path):
    measured = []

    def cell(self, precision, workload):
        measured.append((precision, workload.id))
        return {**row, "dtype": precision, "workload": workload.id}

    monkeypatch.setattr(compete.Run, "cell", cell)
    settings = replace(SETTINGS, output=tmp_path / "new" / "folder")
    compete.run(settings, print)
    more = replace(settings, precisions=("float32", "bfloat16"), resume=True)
    whole = compete.run(more, print)
    assert measured == [("float32", "1x16"), ("bfloat16", "1x16")]
    assert json.loads((settings.output / "results.json").read_text()) == whole
    table = (settings.output / "results.md").read_text()
    assert table == report.to_markdown(whole) + "\n"
    assert re.search(r"^\| float32 \| fastbert \| \*\*[\d,]+\*\* \([\d.]+x transformers-sdpa, \d+%\) \|", table, re.M)
    assert "| bfloat16 | absent | skipped |" in table and "- bfloat16 absent skipped: not installed: no_such" in table
    assert (settings.output / "results.png").exists() == (importlib.util.find_spec("matplotlib") is not None)
    with pytest.raises(compete.BenchmarkError, match=r"another run's \(rounds 2, now 3\)"):
        compete.run(replace(more, rounds=3), print)


@pytest.mark.full  # as the ones before
def test_a_wrong_output_gets_no_time(cells, tmp_path):
    reference = Path(cells.folder, "1x16.pt")
    expected = torch.load(reference, weights_only=True)
    wrong = {key: value + 0.1 for key, value in expected.items()}  # as if the contestants were
    out = expected["float32"][None]
    with pytest.raises(AssertionError, match="max error"):
        worker.check("ours", "float32", out, BY_NAME["1x16"], wrong)
    torch.save(wrong, reference)
    try:
        task = cells.task("contest", contestant="fastbert", precision="float32", workload="1x16")
        answers, failures = compete.compete({"fastbert": task}, 1, 1)
    finally:
        torch.save(expected, reference)
    assert "max error" in failures["fastbert"] and answers == {"fastbert": []}


def test_int8_is_gated_by_the_cosine_of_its_worst_sequence():
    manual_seed(0)
    workload, oracle = Workload("two", (9, 2)), torch.randn(11, 64, dtype=torch.float64)
    out = torch.zeros(2, 9, 64)
    out[0], out[1, :2] = oracle[:9].float(), oracle[9:].float()
    assert worker.check("q", "int8", out + 0.1 * torch.randn(out.shape), workload, {"float64": oracle}) > 0.99
    out[1, :2] = torch.randn(2, 64)  # the short one: hardly seen in a mean over all tokens
    with pytest.raises(AssertionError, match=r"q: cosine to the oracle .* is under 0.98"):
        worker.check("q", "int8", out, workload, {"float64": oracle})


@pytest.mark.full
def test_a_worker_says_why_it_died(cells):
    with pytest.raises(compete.WorkerError, match=r"^KeyError: 'huge'$"):
        compete.step(**cells.task("checkpoint", model="huge"))


def test_operations_are_counted_by_hand():
    expected = sum(n * (2 * 12 * (4 * 768**2 + 2 * 768 * 3072) + 4 * n * 768 * 12) for n in (3, 128))
    assert report.operations_of("bert-base", Workload("", (3, 128))).executed == expected


def test_ratios_and_shares():
    workload = BY_NAME["8x128"]
    assert report.ceiling_of([[1.0, 5.0], [9.0, 4.0], [2.0, 6.0]]) == 5.0  # medians 2 and 5
    assert report.ceiling_of([]) is None

    def result(seconds: float) -> dict:
        answers = [{"cosine": 0.5, "start_seconds": 1.0}, {"cosine": 0.25, "start_seconds": 3.0}]
        answers += [{"seconds": seconds * k, "peak_memory": k} for k in (1, 2, 3)]
        return report.result_of("bert-base", workload, 1000.0, answers)

    ours = result(0.25)
    assert ours["tokens_per_second"] == 2048 and ours["cosine"] == 0.25 and ours["start_seconds"] == 2.0
    assert ours["peak_memory"] == 3
    assert ours["share_of_ceiling"] == pytest.approx(report.operations_of("bert-base", workload).executed / 0.5 / 1e12)
    row = {"results": {"fastbert": ours, "fastbert-torch": result(0.1), "onnxruntime": result(0.75)}}
    row["results"] |= {"openvino": result(0.5), "transformers-sdpa": {"failed": "why"}}
    assert report.best_peer(row) == "openvino" and report.ratio(row, "fastbert") == pytest.approx(2.0)
    assert report.ratio(row, "transformers-sdpa") is None
    assert report.ratio({"results": {"fastbert": ours}}, "fastbert") is None


@pytest.mark.parametrize(
    "arguments, message",
    (
        ("--dtypes float16", "--dtypes: unknown 'float16'; known are float32, bfloat16, int8"),
        ("--contestants fastbert,nobody", "--contestants: unknown 'nobody'; known are fastbert, "),
        ("--workloads 1x16,,", "--workloads: unknown '', ''; known are 1x16, "),
        ("--model bert-huge", f"--model: unknown 'bert-huge'; known are {', '.join(MODELS)}"),
        ("--rounds 0", "argument --rounds: '0' is not a whole number of at least 1"),
        ("--threads x", "argument --threads: 'x' is not a whole number of at least 1"),
        ("--resume", "--resume needs --output"),
    ),
)
def test_bad_arguments_give_one_error(arguments, message, capsys):
    assert main(["bench", *arguments.split()]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"fastbert: error: {message}") and captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.full  # the peers are pinned
@pytest.mark.filterwarnings("ignore:::torch", "ignore:::transformers")  # what tracing says of branches
@pytest.mark.parametrize(
    "name, precision, masked",
    (
        ("onnxruntime", "float32", True),
        ("onnxruntime", "int8", False),
        ("openvino", "float32", False),
        ("openvino", "bfloat16", True),
        ("openvino-weights", "int8", True),
        ("openvino-calibrated", "int8", False),
    ),
)
def test_runtimes_pass_the_check(name, precision, masked, cells, tmp_path):
    contestant = CONTESTANTS[name]
    if (missing := contestant.missing()) is not None:
        pytest.skip(missing)
    workload = Workload("two", (9, 4 if masked else 9))
    worker.write_reference("tiny", Path(cells.folder, "checkpoint"), workload, tmp_path / "reference.pt")
    job = BenchJob(Path(cells.folder, "checkpoint"), tmp_path, precision, masked, threads=1)
    facts = contestant.prepare(job)
    assert "onnxruntime" not in name or facts["fused_operators"]["Attention"] == 2
    input_ids, mask = workload.batch()
    call = contestant.load(job, input_ids, mask if masked else None)
    expected = torch.load(tmp_path / "reference.pt", weights_only=True)
    assert worker.check(name, precision, call(), workload, expected) > 0.99


@pytest.mark.parametrize("workload", ("8x128", "32-ragged"))
def test_workloads_are_those_of_the_design(workload):
    lengths = next(w for w in WORKLOADS if w.id == workload).lengths
    assert len(lengths) == int(workload.split("x")[0].split("-")[0])
    if workload == "32-ragged":
        assert max(lengths) == 167 and sum(lengths) == 32 * 55


@pytest.mark.parametrize("has_bfloat16", (True, False))
def test_the_ceiling_of_int8_is_a_product_that_onednn_has(has_bfloat16, monkeypatch):
    """Without bfloat16 of the processor's own, oneDNN computes it number by number: 0.03 GFLOP/s for 130."""
    monkeypatch.setattr(ceiling, "ROWS", 3)
    monkeypatch.setattr(ceiling.torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_bfloat16)
    made = ceiling.gemm("int8", 8, 5)()
    assert made.shape == (3, 5) and made.dtype is (torch.bfloat16 if has_bfloat16 else torch.float32)
