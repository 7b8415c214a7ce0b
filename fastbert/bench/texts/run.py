"""What the two modes share: their settings, and the steps from a model to its contestants' turns."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastbert.bench.compete import BenchmarkError, Say, WorkerError, step
from fastbert.bench.texts.contestants import CONTESTANTS
from fastbert.bench.texts.folder import Source
from fastbert.messages import install

WORKER = "fastbert.bench.texts.worker"
TEXTS_FILE = "texts.json"  # the corpus, or what was made
PACKAGES = (  # whose versions a result must name
    "transformers",
    "tokenizers",
    "sentence_transformers",
    "onnxruntime",
    "openvino",
    "nncf",
    "ctranslate2",
    "fastembed",
)


@dataclass(frozen=True)
class TextSettings:
    """One run of either mode, which is told by `lengths` or `texts`; the other fields as in BenchSettings."""

    source: Source
    precisions: tuple[str, ...]
    contestants: tuple[str, ...]
    rounds: int
    restarts: int
    threads: int
    output: Path | None = None
    lengths: tuple[int, ...] = ()  # of single texts
    processes: int = 1  # of a contestant at once
    texts: tuple[str, ...] = ()  # of a corpus


class Steps:
    """The steps of a run before its turns, each in a process of its own, in the folder of the run.

    `size`: what is to be noted of the texts.
    """

    def __init__(self, settings: TextSettings, folder: str, masked: bool, say: Say):
        if importlib.util.find_spec("transformers") is None:
            raise BenchmarkError(f"the benchmark needs transformers: {install('bench')}")
        self.settings, self.folder, self.masked, self.say = settings, folder, masked, say
        source = settings.source
        if settings.texts:
            Path(folder, TEXTS_FILE).write_text(json.dumps(settings.texts), encoding="utf-8")
        self.size = self.step(
            "folder", shape=source.shape, source=str(source.folder), longest=source.longest, lengths=settings.lengths
        )

    def task(self, action: str, **task: Any) -> dict[str, Any]:
        settings = self.settings
        run = {"folder": self.folder, "masked": self.masked}
        return {"action": action, "threads": settings.threads, "processes": settings.processes, **run, **task}

    def step(self, action: str, **task: Any) -> dict[str, Any]:
        return step(WORKER, **self.task(action, **task))

    def contestants(self, precision: str, action: str, **task: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """(the tasks of those that can compete at a precision, the results of all: empty, or why one can not)."""
        tasks: dict[str, Any] = {}
        results: dict[str, Any] = {}
        for name in self.settings.contestants:
            contestant = CONTESTANTS[name]
            if precision not in contestant.precisions:
                continue
            missing = contestant.missing()
            results[name] = {"skipped": missing} if missing else {}
            if contestant.prepare is not None and not missing:
                self.say(f"preparing {name} {precision}")
                try:
                    self.step("prepare", contestant=name, precision=precision)
                except WorkerError as error:
                    results[name] = {"failed": str(error)}
            if not results[name]:
                tasks[name] = self.task(action, contestant=name, precision=precision, **task)
        return tasks, results
