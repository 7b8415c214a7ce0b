"""Runs the contestants of `fastbert bench` against each other, in turn.

Every contestant has a process of its own for one batch at one precision, and so has the measurement of the ceiling:
idle thread pools spin, and would halve the speed of others in the same process. A turn is one timing. The turns of a
round follow each other, so a disturbance of the machine reaches everyone. An output that fails its check gets no time.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastbert.bench.contestants import CONTESTANTS
from fastbert.bench.report import ceiling_of, draw_chart, result_of, to_markdown
from fastbert.bench.timing import describe_machine
from fastbert.files import write_text
from fastbert.messages import install
from fastbert.testing.cases import Workload

PACKAGES = ("transformers", "onnxruntime", "openvino", "nncf")  # whose versions a result must name
CEILING = "ceiling"
WORKER = "fastbert.bench.worker"
THREAD_VARIABLES = ("OMP_NUM_THREADS", "RAYON_NUM_THREADS")  # the second: of tokenizers, which counts cores otherwise
SETTLE_SECONDS = 0.05  # between two turns: the last one's thread pool stops spinning (ONNX Runtime's takes 0.03 s)

Say = Callable[[str], None]
Answers = dict[str, list[dict[str, Any]]]


class BenchmarkError(ValueError):
    """What was asked for cannot be measured; the message says why."""


@dataclass(frozen=True)
class BenchSettings:
    """One run. `restarts` starts every contestant anew that many times, since where a process's memory happens to lie
    moves its rate by 5 %; `rounds` is turns a start. `output` is the folder of the results, None writes none."""

    model: str
    precisions: tuple[str, ...]
    workloads: tuple[Workload, ...]
    contestants: tuple[str, ...]
    rounds: int
    restarts: int
    threads: int
    output: Path | None = None
    resume: bool = False


class WorkerError(RuntimeError):
    """A worker died; the message is its last line."""


class ContestantProcess:
    """A process of `module`, which does what `fastbert.bench.worker.serve` tells it to with the task."""

    def __init__(self, task: dict[str, Any], module: str = WORKER):
        self.stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 (close() does); an unread pipe would fill up
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(task)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            text=True,
            env={**os.environ, **{name: str(task["threads"]) for name in THREAD_VARIABLES}},
        )

    def answer(self) -> dict[str, Any]:
        """The next answer. Raises WorkerError when there will be none."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        code = self.process.wait()
        self.stderr.seek(0)
        raise WorkerError((self.stderr.read().strip().splitlines() or [f"died with exit code {code}"])[-1])

    def tell(self, what: str) -> None:
        """Begin one turn; `what` it is, where a worker has several kinds. `answer` waits for its end."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{what}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it died since its last answer: answer() says of what

    def ask(self, what: str = "go") -> dict[str, Any]:
        """One turn."""
        self.tell(what)
        return self.answer()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.stderr):
            if stream is not None and not stream.closed:
                stream.close()


def step(module: str = WORKER, **task: Any) -> dict[str, Any]:
    """A task with one answer, in a process of its own, so that what it loads is gone when the contest begins."""
    worker = ContestantProcess(task, module)
    try:
        return worker.answer()
    finally:
        worker.close()


def compete(
    tasks: dict[str, dict[str, Any]],
    rounds: int,
    restarts: int,
    *,
    turns: Mapping[str, Sequence[str]] | None = None,
    processes: int = 1,
    module: str = WORKER,
) -> tuple[Answers, dict[str, str]]:
    """({name: its answers}, {name: why it failed}) of workers that take turns.

    Args:
        turns: the kinds of turns of a round, in order, and whose turn each is; None: one, everybody's.
        processes: so many of each contestant, who all do its turns at once and answer each for itself.
    """
    turns = {"go": list(tasks)} if turns is None else turns
    answers: Answers = {name: [] for name in tasks}
    failures: dict[str, str] = {}
    for _ in range(restarts):
        workers: dict[str, list[ContestantProcess]] = {name: [] for name in tasks}

        def hear(name: str, several: list[ContestantProcess]) -> None:
            try:
                answers[name] += [worker.answer() for worker in several]
            except WorkerError as error:
                failures[name] = str(error)

        try:
            for name in (name for name in tasks if name not in failures):
                workers[name] += [ContestantProcess(tasks[name], module) for _ in range(processes)]
                hear(name, workers[name])
            for _ in range(rounds):
                for what, names in turns.items():
                    for name in (name for name in names if name not in failures):
                        time.sleep(SETTLE_SECONDS)
                        for worker in workers[name]:
                            worker.tell(what)
                        hear(name, workers[name])
        finally:
            for worker in (worker for several in workers.values() for worker in several):
                worker.close()
    return answers, failures


class Run:
    """What one run keeps between its cells: the folder of models, and what was prepared in it."""

    def __init__(self, settings: BenchSettings, folder: str, say: Say):
        self.settings, self.folder, self.say = settings, folder, say
        self.references: set[str] = set()
        self.prepared: dict[tuple[str, str, bool], dict[str, Any]] = {}

    def task(self, action: str, **task: Any) -> dict[str, Any]:
        return {"action": action, "folder": self.folder, "threads": self.settings.threads, **task}

    def prepare(self, name: str, precision: str, workload: Workload) -> dict[str, Any]:
        """What to note of a contestant's preparation, or {"failed": why}; done once for all batches."""
        key = name, precision, workload.masked
        if CONTESTANTS[name].prepare is None:
            return {}
        if key not in self.prepared:
            self.say(f"preparing {name} {precision}")
            try:
                self.prepared[key] = step(
                    **self.task("prepare", contestant=name, precision=precision, workload=workload.id)
                )
            except WorkerError as error:
                self.prepared[key] = {"failed": str(error)}
        return self.prepared[key]

    def cell(self, precision: str, workload: Workload) -> dict[str, Any]:
        """The row of one precision and batch."""
        if not self.references:
            step(**self.task("checkpoint", model=self.settings.model))
        if workload.id not in self.references:
            step(**self.task("reference", model=self.settings.model, workload=workload.id))
            self.references.add(workload.id)
        results: dict[str, dict[str, Any]] = {}
        tasks = {CEILING: self.task("ceiling", precision=precision)}
        for name in self.settings.contestants:
            if precision not in CONTESTANTS[name].precisions:
                continue
            missing = CONTESTANTS[name].missing()
            results[name] = {"skipped": missing} if missing else dict(self.prepare(name, precision, workload))
            if not {"skipped", "failed"} & results[name].keys():
                tasks[name] = self.task("contest", contestant=name, precision=precision, workload=workload.id)
        answers, failures = compete(tasks, self.settings.rounds, self.settings.restarts)
        rounds = [answer["gflops"] for answer in answers.pop(CEILING) if "gflops" in answer]
        ceiling = ceiling_of(rounds) if CEILING not in failures else None
        if CEILING in failures:
            self.say(f"warning: the best {precision} matrix product was not measured: {failures[CEILING]}")
        for name, replies in answers.items():
            results[name] |= (
                {"failed": failures[name]}
                if name in failures
                else result_of(self.settings.model, workload, ceiling, replies)
            )
        return {"dtype": precision, "workload": workload.id, "ceiling_gflops": ceiling, "results": results}


def run(settings: BenchSettings, say: Say) -> dict[str, Any]:
    """Measure every precision and batch; results.json, results.md and results.png in `settings.output`.

    results.json is written after every cell; with `resume` its cells are kept, if they are this machine's, commit's and
    settings', and only the others are measured. Raises BenchmarkError.
    """
    if importlib.util.find_spec("transformers") is None:
        raise BenchmarkError(f"the benchmark needs transformers: {install('bench')}")
    report = _new_report(settings)
    if settings.output is not None:
        settings.output.mkdir(parents=True, exist_ok=True)
        if settings.resume:
            _take_over(report, settings.output / "results.json")
    done = {(row["dtype"], row["workload"]) for row in report["rows"]}
    with tempfile.TemporaryDirectory(prefix="fastbert-bench-") as folder:
        cells = Run(settings, folder, say)
        for precision in settings.precisions:
            for workload in settings.workloads:
                if (precision, workload.id) in done:
                    continue
                row = cells.cell(precision, workload)
                report["rows"].append(row)
                say(f"{workload.id} {precision}: " + ", ".join(_short(*item) for item in row["results"].items()))
                if settings.output is not None:
                    write_text(settings.output / "results.json", json.dumps(report, indent=1) + "\n")
    if settings.output is not None:
        write_text(settings.output / "results.md", to_markdown(report) + "\n")
        if importlib.util.find_spec("matplotlib") is None:
            say("no chart: matplotlib is not installed")
        else:
            draw_chart(report, settings.output / "results.png")
    return report


def machine_of(threads: int, packages: Sequence[str]) -> dict[str, Any]:
    """What a report says of where it was measured, with the versions of those packages that are there."""
    installed = [package for package in packages if importlib.util.find_spec(package) is not None]
    versions = {package: importlib.metadata.version(package) for package in installed}
    return describe_machine() | {"threads": threads, "packages": versions}


def _new_report(settings: BenchSettings) -> dict[str, Any]:
    return {
        "machine": machine_of(settings.threads, PACKAGES),
        "model": settings.model,
        "contestants": list(settings.contestants),
        "rounds": settings.rounds,
        "restarts": settings.restarts,
        "rows": [],
    }


def _take_over(report: dict[str, Any], path: Path) -> None:
    """Take the rows of an interrupted run, if it was the same but for the date and which cells were asked for."""
    if not path.exists():
        return
    earlier = json.loads(path.read_text(encoding="utf-8"))

    def identity(of: dict[str, Any]) -> dict[str, Any]:
        machine = {key: value for key, value in of["machine"].items() if key != "date"}
        return machine | {key: value for key, value in of.items() if key not in ("machine", "rows")}

    here, there = identity(report), identity(earlier)
    differing = [f"{key} {there.get(key)}, now {here.get(key)}" for key in here if here[key] != there.get(key)]
    if differing:
        raise BenchmarkError(f"{path} is another run's ({'; '.join(differing)}): give a new folder, or no --resume")
    report["rows"] = earlier["rows"]


def _short(name: str, result: dict[str, Any]) -> str:
    rate = result.get("tokens_per_second")
    reason = next((f"{status} ({result[status]})" for status in ("skipped", "failed") if status in result), "")
    return f"{name} {rate:,.0f}" if rate is not None else f"{name} {reason}"
