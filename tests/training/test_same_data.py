"""A run goes on with the data with which it began: what has changed since is refused by its name, before the task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from command_line import fails, run_here
from finetuning_runs import TEXTS, base, write_rows
from pretraining_runs import options, write_text
from safetensors.torch import load_file
from seeds import shifted

from fastbert.data import sources
from fastbert.data.sources import digest_of
from fastbert.training.folder import DIGESTS, rows_of
from fastbert.training.pretraining import make_task

ROWS = [{"text": text, "label": ("no", "yes")[i % 2]} for i, text in enumerate(TEXTS * 3)]


def flipped(text: str) -> str:
    return text.replace('"no"', '"on"').replace('"yes"', '"no"').replace('"on"', '"yes"')


CHANGES = {
    "labels": ("train", flipped),
    "names of labels": ("train", lambda text: text.replace('"yes"', '"yea"')),
    "a text of the same length": ("train", lambda text: text.replace("cat", "dog", 1)),
    "the order of rows": ("train", lambda text: "".join(reversed(text.splitlines(keepends=True)))),
    "a row less": ("train", lambda text: text[: text.rindex("{")]),
    "what is judged by": ("eval", flipped),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, dict[str, Path]]:
    """A run of two epochs whose checkpoint is of the first one's end, and its files."""
    place = tmp_path_factory.mktemp("same_data")
    train, held_out = (
        Path(write_rows(place / name, rows)) for name, rows in (("a.jsonl", ROWS), ("b.jsonl", ROWS[:6]))
    )
    done = run_here(
        "finetune",
        "--model",
        base(place),
        "--train",
        train,
        "--eval",
        held_out,
        "--max-length",
        16,
        "--batch-size",
        4,
        "--epochs",
        2,
        "--save-every",
        5,
        "--log-every",
        1,
        "--seed",
        shifted(3),
        "--output",
        place / "run",
    )
    assert done.returncode == 0, done.stderr
    (place / "run/checkpoints/step-000000010").rename(place / "gone")
    return place / "run", {"train": train, "eval": held_out}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_data_are_refused_by_name(change, run):
    folder, files = run
    name, edit = CHANGES[change]
    before = files[name].read_text()
    files[name].write_text(edit(before))
    try:
        assert files[name].read_text() != before
        said = fails("finetune", "--output", folder, "--resume")
    finally:
        files[name].write_text(before)
    assert f"has {name} '{files[name]}' with SHA-256" in said and "a run goes on as it began" in said
    assert rows_of(folder)[-1]["step"] == 10  # nothing was written: the log is as it was


def test_a_file_that_is_gone(run, tmp_path):
    folder, files = run
    files["eval"].rename(tmp_path / "kept")
    said = fails("finetune", "--output", folder, "--resume")
    (tmp_path / "kept").rename(files["eval"])
    assert f"{files['eval']}: No such file or directory" in said


def test_the_same_data_go_on_with_the_same_bits(run):
    """The files' times do not matter. A run of an older version has no hashes: it says so once, and keeps them."""
    folder, files = run
    before, weights = [row["losses"] for row in rows_of(folder)], load_file(folder / "model.safetensors")
    for path in files.values():
        path.write_text(path.read_text())
    kept = (folder / DIGESTS).read_bytes()
    (folder / DIGESTS).unlink()
    done = run_here("finetune", "--output", folder, "--resume")
    assert done.returncode == 0 and f"has no {DIGESTS}" in done.stderr, done.stderr
    assert (folder / DIGESTS).read_bytes() == kept
    assert [row["losses"] for row in rows_of(folder)] == before
    after = load_file(folder / "model.safetensors")
    assert all(torch.equal(after[name], weights[name]) for name in weights)
    again = run_here("finetune", "--output", folder, "--resume")
    assert again.returncode == 0 and DIGESTS not in again.stderr


def test_a_byte_in_the_middle_of_a_corpus(tmp_path):
    """Of the second of two files; the length of every line is as before."""
    files = [write_text(tmp_path / f"{name}.txt", 20, seed) for seed, name in enumerate("ab")]
    new = ("--preset", "baby", "--vocab-size", 60, "--vocab-kind", "wordpiece")
    flags = (*new, "--steps", 2, "--max-length", 24, "--step-tokens", 1000)
    done = run_here("pretrain", "--train", *files, *flags, "--output", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert list(json.loads((tmp_path / "run" / DIGESTS).read_text())["train"]) == [str(path) for path in files]
    content = bytearray(files[1].read_bytes())
    middle = content.index(b"b", len(content) // 2)
    content[middle : middle + 1] = b"d"
    files[1].write_bytes(content)
    said = fails("pretrain", "--output", tmp_path / "run", "--resume")
    assert f"has train '{files[1]}' with SHA-256" in said


def test_what_is_on_the_hub_has_a_hash_of_its_rows(monkeypatch):
    """Of their values, order, columns and names of classes; not of how a cache has cut them into pieces."""
    features = datasets.Features(text=datasets.Value("string"), label=datasets.ClassLabel(names=["no", "yes"]))

    def digest(rows: list[Any], features: datasets.Features = features, pieces: int = 1) -> str:
        made = datasets.Dataset.from_list(rows, features=features)
        shards = [made.shard(pieces, i, contiguous=True) for i in range(pieces)]
        joined = datasets.concatenate_datasets(shards)
        monkeypatch.setattr(sources, "_from_hub", lambda name, split: {"train": joined}[split])
        return digest_of("someone/something")

    usual = digest(ROWS)
    assert usual == digest(ROWS, pieces=3)
    others = [
        digest([{**ROWS[0], "label": "yes"}, *ROWS[1:]]),
        digest([{**ROWS[0], "text": ROWS[0]["text"].upper()}, *ROWS[1:]]),
        digest(ROWS[::-1]),
        digest(ROWS[1:]),
        digest(ROWS, datasets.Features(text=features["text"], label=datasets.ClassLabel(names=["no", "yea", "yes"]))),
    ]
    assert len({usual, *others}) == 6


def test_pretraining_is_judged_by_another_split_of_the_hub(monkeypatch, tmp_path):
    lines, asked = write_text(tmp_path / "text.txt").read_text().splitlines(), []

    def from_hub(name: str, split: str) -> datasets.Dataset:
        asked.append((name, split))
        return datasets.Dataset.from_dict({"text": lines})

    monkeypatch.setattr(sources, "_from_hub", from_hub)
    task = make_task(options("someone/something", steps=1))
    assert task.held_out is not None and set(asked[:-1]) == {("someone/something", "train")}
    assert asked[-1] == ("someone/something", "validation")
