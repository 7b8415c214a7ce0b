"""One part's results, written to its file as they come, and the tables that are made of all parts' files.

What is in a file already is not measured again.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import util
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.stamp import same_run

Say = Callable[[str], None]


def failures_of_a_kernel() -> tuple[type[BaseException], ...]:
    """What a broken kernel, or another version of torch or Triton, may raise."""
    python = (AssertionError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, ImportError, OSError)
    if util.find_spec("triton") is None:
        return python
    from triton.errors import TritonError

    return (*python, TritonError)


def run_limited(command: list[str], seconds: float, **options: Any) -> subprocess.CompletedProcess:
    """subprocess.run in a session of its own, which ends with its processes' processes. Raises TimeoutExpired."""
    process = subprocess.Popen(command, text=True, start_new_session=True, **options)
    try:
        stdout, stderr = process.communicate(timeout=seconds)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


RESULT = "result: "  # what a line of a child's results begins with


def say_result(found: Any) -> None:
    """Of a child, to the process that has started it by `results_of`."""
    sys.stdout.write(f"{RESULT}{json.dumps(found)}\n")
    sys.stdout.flush()


def results_in(out: str) -> list[Any]:
    """What `say_result` wrote, among what libraries write; a line that was cut off is none."""
    found = []
    for line in out.splitlines():
        if line.startswith(RESULT):
            try:
                found.append(json.loads(line.removeprefix(RESULT)))
            except json.JSONDecodeError:
                continue
    return found


def results_of(command: list[str], seconds: float) -> tuple[list[Any], str | None]:
    """A child's results until it ended; and why that was too early, None where it was not."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired as expired:
        out = expired.stdout.decode() if isinstance(expired.stdout, bytes) else expired.stdout or ""
        return results_in(out), f"not ready after {seconds:.0f} s"
    died = None
    if done.returncode != 0:
        died = f"exit code {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1][:300]}"
    return results_in(done.stdout), died


@dataclass
class Record:
    """`entries` {name: what was found}; one with "failed" or "skipped" says why. `figures`: what targets are set for.

    smoke: small sizes, on any device; the numbers mean nothing. deadline: of time.monotonic(), when the part should be
    through; what it starts in sessions of their own would outlive its end.
    """

    part: str
    path: Path
    stamp: dict[str, Any]
    say: Say
    smoke: bool = False
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    complete: bool = False
    deadline: float = math.inf

    @property
    def left(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self.deadline - time.monotonic())

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def failures(self) -> dict[str, str]:
        return {name: entry["failed"] for name, entry in self.entries.items() if "failed" in entry}

    @property
    def is_done(self) -> bool:
        return self.complete and not self.failures

    def run(self, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """`measure()` under `name`, unless that has been done; an exception fails this entry and nothing else."""
        if name in self.entries and "failed" not in self.entries[name]:
            return self.entries[name]
        start = time.perf_counter()
        try:
            entry = measure()
        except failures_of_a_kernel() as error:  # nothing is hidden: the part fails by it
            entry = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}
            entry["traceback"] = traceback.format_exc(limit=-4)
        if "skipped" not in entry:
            entry["seconds"] = round(time.perf_counter() - start, 3)
        return self.add(name, entry)

    def add(self, name: str, entry: dict[str, Any]) -> dict[str, Any]:
        self.entries[name] = entry
        for kind in ("failed", "skipped"):
            if kind in entry:
                self.say(f"{self.part} {name}: {kind}: {entry[kind]}")
        self.write()
        return entry

    def write(self) -> None:
        content = {
            "part": self.part,
            "complete": self.complete,
            "smoke": self.smoke,
            "seconds": round(self.seconds, 1),
            "stamp": self.stamp,
            "figures": self.figures,
            "facts": self.facts,
            "entries": self.entries,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        half = self.path.with_suffix(".part")  # a kill never leaves half a file
        half.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        half.replace(self.path)


def open_record(
    part: str, folder: Path, stamp: dict[str, Any], say: Say, smoke: bool = False, again: bool = False
) -> Record:
    """A part's record, with what an earlier run of the same commit, kernels and machine has found."""
    record = Record(part, folder / f"{part}.json", stamp, say, smoke)
    if again or not record.path.exists():
        return record
    earlier = json.loads(record.path.read_text(encoding="utf-8"))
    if earlier.get("smoke") == smoke and same_run(earlier["stamp"], stamp):
        for name in ("entries", "figures", "facts", "complete", "seconds"):
            setattr(record, name, earlier[name])
    return record


# --------------------------------------------------------------------------------------------------------------------
# Targets beside what was reached, and tables in Markdown

Content = dict[str, Any]  # of a part's JSON file


class Target(NamedTuple):
    """A figure's name in the parts' results, what it is in words, and the bound that it is to keep."""

    label: str
    bound: float
    at_most: bool = False

    def is_met(self, reached: float) -> bool:
        return reached <= self.bound if self.at_most else reached >= self.bound

    def text(self) -> str:
        return f"{'<=' if self.at_most else '>='} {number(self.bound)}"


# On an H200; the table says which GPU it was.
TARGETS = {
    "attention_fwd_512": Target("attention forward, S = 512, TFLOP/s", 335),
    "attention_fwd_1024": Target("attention forward, S = 1024, TFLOP/s", 375),
    "attention_fwd_2048": Target("attention forward, S = 2048, TFLOP/s", 400),
    "attention_bwd_512": Target("attention backward, S = 512, TFLOP/s", 265),
    "attention_bwd_1024": Target("attention backward, S = 1024, TFLOP/s", 345),
    "attention_bwd_2048": Target("attention backward, S = 2048, TFLOP/s", 390),
    "attention_ragged_fwd": Target("attention forward, ragged rate / equal lengths' rate", 0.9),
    "attention_ragged_bwd": Target("attention backward, ragged rate / equal lengths' rate", 0.9),
    "add_layer_norm_fwd": Target("add_layer_norm forward, share of copy bandwidth", 0.85),
    "add_layer_norm_bwd": Target("add_layer_norm backward, share of copy bandwidth", 0.85),
    "embed_layer_norm_fwd": Target("embed_layer_norm forward, share of copy bandwidth", 0.85),
    "pooling_fwd": Target("pooling forward, share of copy bandwidth", 0.85),
    "forward_bert-base": Target("forward BERT-base 64 x 512, tokens/s", 2.6e6),
    "forward_bert-large": Target("forward BERT-large 64 x 512, tokens/s", 0.76e6),
    "training_bert-base": Target("training BERT-base 64 x 512, tokens/s", 0.87e6),
    "training_bert-large": Target("training BERT-large 64 x 512, tokens/s", 0.25e6),
    "forward_over_compile_full": Target("forward over transformers + compile, no padding", 1.3),
    "forward_over_compile_half": Target("forward over transformers + compile, half padding", 2.5),
    "training_over_compile_full": Target("training over transformers + compile, no padding", 1.4),
    "training_over_compile_half": Target("training over transformers + compile, half padding", 2.5),
    "steps_from_16k": Target("steps of BERT-base, masked words, 16k and 64k tokens, graphs, tokens/s", 0.6e6),
    "steps_4k": Target("steps at 4k tokens, graphs, tokens/s: 90 % of that", 0.54e6),
    "steps_over_compile_ragged": Target("steps as graphs over transformers + compile, realistic lengths", 2.0),
    "steps_over_compile_full": Target("steps as graphs over transformers + compile, full length", 1.1),
    "training_memory_ratio": Target("training's peak memory, ours / transformers'", 0.6, at_most=True),
    "latency_ms": Target("latency, 1 x 32, CUDA graphs, ms", 0.6, at_most=True),
}


def number(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def figures_of(contents: list[Content]) -> dict[str, float]:
    return {name: value for content in contents for name, value in content["figures"].items()}


def targets_table(contents: list[Content]) -> list[str]:
    figures = figures_of(contents)
    lines = ["| target | | reached | |", "|---|--:|--:|---|"]
    for name, target in TARGETS.items():
        reached = figures.get(name)
        verdict = "not measured" if reached is None else "met" if target.is_met(reached) else "missed"
        lines.append(f"| {target.label} | {target.text()} | {'' if reached is None else number(reached)} | {verdict} |")
    return lines


def parts_table(contents: list[Content]) -> list[str]:
    lines = ["| part | entries | failed | skipped | seconds | |", "|---|--:|--:|--:|--:|---|"]
    for content in contents:
        entries = content["entries"].values()
        failed, skipped = (sum(kind in e for e in entries) for kind in ("failed", "skipped"))
        state = "failed" if failed else "" if content["complete"] else "not finished"
        lines.append(
            f"| {content['part']} | {len(entries)} | {failed} | {skipped} | {content['seconds']:.0f} | {state} |"
        )
    return lines


def problems(contents: list[Content]) -> list[str]:
    return [
        f"- {content['part']} {name}: {kind}: {entry[kind]}"
        for content in contents
        for name, entry in content["entries"].items()
        for kind in ("failed", "skipped")
        if kind in entry
    ]


def entry_tables(contents: list[Content]) -> list[str]:
    """A table a part, of the numbers that its entries hold under "numbers": {row: {column: number}}."""
    lines: list[str] = []
    for content in contents:
        for name, entry in content["entries"].items():
            rows = entry.get("numbers")
            if not rows:
                lines += ["", f"{content['part']}: {name}: {entry['note']}"] if "note" in entry else []
                continue
            columns = list(dict.fromkeys(column for row in rows.values() for column in row))
            unit = f", {entry['unit']}" if "unit" in entry else ""
            lines += ["", f"{content['part']}: {name}{unit}", "", f"| {' | '.join(['', *columns])} |"]
            lines.append("|---|" + "--:|" * len(columns))
            for label, row in rows.items():
                cells = [row.get(column, "") for column in columns]
                text = [c if isinstance(c, str) else number(c) for c in cells]
                lines.append(f"| {' | '.join([label, *text])} |")
            if "note" in entry:
                lines += ["", entry["note"]]
    return lines


def to_markdown(contents: list[Content]) -> str:
    """All parts of one folder."""
    stamp = max((content["stamp"] for content in contents), key=lambda stamp: stamp["time"])
    smoke = " Smoke test on small sizes: these numbers mean nothing." if any(c["smoke"] for c in contents) else ""
    lines = [
        f"{stamp['gpu'] or 'no GPU'}, driver {stamp['driver']}, {stamp['cpu']}, torch {stamp['torch']},"
        f" Triton {stamp['triton']}, transformers {stamp['transformers']}; fastbert {stamp['commit']}"
        f"{' (dirty)' if stamp['dirty'] else ''}, kernels {stamp['kernel_hash']}, {stamp['time']}.{smoke}",
        "",
        *targets_table(contents),
        "",
        *parts_table(contents),
        *entry_tables(contents),
    ]
    found = problems(contents)
    return "\n".join([*lines, *(["", *found] if found else [])])
