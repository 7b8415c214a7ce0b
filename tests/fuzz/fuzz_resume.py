"""`fastbert finetune --resume`: runs that a signal ends, and what may have changed before they go on.

With nothing changed the bytes are those of an undisturbed run. What has changed is refused by its name, in one
line; the folder stays as it was, and once the change is undone, the run goes on.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import tiny
from draw import Draw
from fuzz_cli import SIGNALS, assert_user_error, finish, start
from fuzz_driver import Fuzzer
from fuzz_files import templates
from safetensors.torch import load_file

from fastbert.training.folder import DIGESTS

LABELS = ("no", "yes", "maybe")
WORDS = tiny.WORDS.split()


def rows_of(draw: Draw, count: int) -> list[dict[str, str]]:
    return [
        {"text": " ".join(draw.choice(WORDS) for _ in range(draw.integer(1, 9))), "label": LABELS[i % 3]}
        for i in range(count)
    ]


def write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def other_label(draw: Draw, rows: list) -> None:
    row = draw.choice(rows)
    row["label"] = LABELS[(LABELS.index(row["label"]) + 1) % 3]


def other_word(draw: Draw, rows: list) -> None:
    row = draw.choice(rows)
    words = row["text"].split()
    at = draw.integer(0, len(words) - 1)
    words[at] = WORDS[(WORDS.index(words[at]) + 1) % len(WORDS)]
    row["text"] = " ".join(words)


def other_order(draw: Draw, rows: list) -> None:
    rows.append(rows.pop(0))


def one_more(draw: Draw, rows: list) -> None:
    rows.append(dict(rows[-1]))


def one_less(draw: Draw, rows: list) -> None:
    rows.pop(draw.integer(0, len(rows) - 1))


CHANGES: dict[str, Callable[[Draw, list], None]] = {
    change.__name__: change for change in (other_label, other_word, other_order, one_more, one_less)
}
OPTIONS = (("--learning-rate", 3e-4), ("--batch-size", 5), ("--max-length", 9), ("--seed", 77), ("--warmup", 0.5))


class Run:
    """The command of one run, and its files."""

    def __init__(self, draw: Draw, place: Path):
        self.files = {"train": place / "train.jsonl", "eval": place / "eval.jsonl"}
        self.rows = {"train": rows_of(draw, draw.integer(9, 30)), "eval": rows_of(draw, 6)}
        for name, path in self.files.items():
            write(path, self.rows[name])
        self.flags = [
            "--batch-size", draw.choice((4, 2, 7)), "--epochs", draw.integer(1, 3), "--seed", draw.integer(0, 76),
            "--save-every", draw.choice((1, 2, 5)), "--eval-every", draw.choice((100, 1, 3)), "--max-length", 16,
        ]  # fmt: skip
        draw.note(f"  {len(self.rows['train'])} rows, {' '.join(map(str, self.flags))}")

    def command(self, folder: Path) -> list:
        data = ["--train", self.files["train"], "--eval", self.files["eval"]]
        return ["finetune", "--model", templates()["ours"], *data, *self.flags, "--output", folder]


def contents(folder: Path) -> dict[str, str]:
    """Of a run's folder, by path; what a lock says goes by the process."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and "lock" not in path.name)
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def results(folder: Path) -> tuple[bytes, object]:
    metrics = json.loads((folder / "metrics.json").read_text())
    numbers = {name: value for name, value in metrics.items() if name not in ("seconds", "tokens_per_second")}
    return (folder / "model.safetensors").read_bytes(), numbers


def interrupt(draw: Draw, arguments: list) -> None:
    name, moment = draw.choice(SIGNALS), draw.integer(0, 9000)
    draw.note(f"  {name} after {moment} ms")
    process = start(arguments)
    time.sleep(moment / 1000)
    process.send_signal(signal.Signals[name])
    finish(process, was_interrupted=name == "SIGINT")


def refused(draw: Draw, run: Run, resume: list, folder: Path) -> None:
    """Something changes, is refused by its name, and is undone."""
    before = contents(folder)
    kind = draw.choice(("train", "eval", "option"))
    if kind == "option":
        name, value = draw.choice(OPTIONS)
        draw.note(f"  resumed with {name} {value}")
        error = assert_user_error(start([*resume, name, value]))
        assert name in error or name[2:].replace("-", "_") in error or name[2:].replace("-", " ") in error, error
    else:
        change, rows = draw.choice(CHANGES), [dict(row) for row in run.rows[kind]]
        CHANGES[change](draw, rows)
        if rows == run.rows[kind]:  # equal rows in another order
            return
        draw.note(f"  {change} in {kind}")
        write(run.files[kind], rows)
        error = assert_user_error(start(resume))
        assert str(run.files[kind]) in error, error
        write(run.files[kind], run.rows[kind])
    assert contents(folder) == before, "the refused run has written"


def resumed(draw: Draw, place: Path) -> None:
    run, whole, folder = Run(draw, place), place / "whole", place / "run"
    code, errors = finish(start(run.command(whole)))
    assert code == 0, errors
    resume = ["finetune", "--output", folder, "--resume"]
    arguments = run.command(folder)
    for _ in range(draw.integer(1, 2)):
        interrupt(draw, arguments)
        if not (folder / DIGESTS).exists():  # nothing has begun
            shutil.rmtree(folder, ignore_errors=True)
            continue
        if draw.flag():
            refused(draw, run, resume, folder)
        arguments = resume
    code, errors = finish(start(arguments))
    assert code == 0, errors
    (weights, metrics), (expected, expected_metrics) = results(folder), results(whole)
    found, wanted = load_file(folder / "model.safetensors"), load_file(whole / "model.safetensors")
    assert all(found[name].equal(t) for name, t in wanted.items()), "other weights than in one go"
    assert weights == expected, "the same weights in other bytes"
    assert metrics == expected_metrics, f"{metrics}, in one go {expected_metrics}"


def run_case(draw: Draw) -> None:
    draw.doing = "resumed"
    place = Path(tempfile.mkdtemp())
    try:
        resumed(draw, place)
    finally:
        shutil.rmtree(place)


FUZZER = Fuzzer("resume", run_case, cases=1, is_slow=True)
