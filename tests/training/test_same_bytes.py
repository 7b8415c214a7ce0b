"""Two equal runs leave equal folders, byte for byte, but for what is a time."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from command_line import run
from finetuning_runs import TEXTS, base, write_rows
from pretraining_runs import write_text
from safetensors.torch import load_file
from seeds import shifted

from fastbert.checkpoint.saving import save
from fastbert.config import EncoderConfig
from fastbert.training.folder import rows_of

TIMES = ("seconds", "tokens_per_second")  # in metrics.json and log.jsonl; the card has the second one in a sentence
SPEED = re.compile(r" tokens at [\d,]+ a second")
COMMON = "--max-length 16 --batch-size 4 --steps 4 --save-every 2 --log-every 2"
RUNS = {
    "label": ("label", "--lora-rank 2 --lora-targets query key value dense"),
    "tags": ("tags", "--task tokens"),
    "vectors": ("score", "--task embedding"),
    "corpus": ("", "--preset baby --vocab-size 60 --vocab-kind wordpiece --step-tokens 1000"),
}
ROWS = [
    {
        "text": text,
        "label": "abc"[i % 3],
        "tokens": text.split(),
        "tags": ["O", *["B-X"] * (len(text.split()) - 1)],
        "sentence1": text,
        "sentence2": TEXTS[-1],
        "score": i / 6,
    }
    for i, text in enumerate(TEXTS)
]


def write_data(folder: Path, label: str) -> list[object]:
    """The files, as options."""
    if not label:
        text = write_text(folder / "text.txt")
        return ["--train", text, "--eval", text]
    columns = {"label": ("text", "label"), "tags": ("tokens", "tags"), "score": ("sentence1", "sentence2", "score")}
    rows = write_rows(folder / "rows.jsonl", [{name: row[name] for name in columns[label]} for row in ROWS])
    return ["--model", base(folder), "--train", rows, "--eval", rows]


def content(folder: Path) -> dict[str, object]:
    """Of every file, by its name; without times."""
    found: dict[str, object] = {
        str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }
    metrics = json.loads((folder / "metrics.json").read_text())
    for name, rows in (("metrics.json", [metrics]), ("log.jsonl", rows_of(folder))):
        found[name] = [[item for item in row.items() if item[0] not in TIMES] for row in rows]
    card = (folder / "README.md").read_text()
    assert SPEED.search(card)
    return found | {"README.md": SPEED.sub("", card)}


@pytest.mark.full  # test_equal_models_are_equal_files
@pytest.mark.parametrize("kind", RUNS)
def test_equal_runs_leave_equal_bytes(kind, tmp_path):
    """With other orders of sets and of Rust's maps, by which `tokenizers` trains vocabularies, too: one is kept."""
    label, options = RUNS[kind]
    data, folders = write_data(tmp_path, label), [tmp_path / place / "run" for place in "ab"]
    for i, folder in enumerate(folders):
        command = ("finetune" if label else "pretrain", *data, *COMMON.split(), *options.split())
        environment = {"PYTHONHASHSEED": str(i + 1), "HF_DATASETS_CACHE": str(tmp_path / "cache")}
        done = run(*command, "--seed", shifted(3), "--output", folder, **environment)
        assert done.returncode == 0, done.stderr
    one, other = map(content, folders)
    assert one.keys() == other.keys() and "model.safetensors" in one
    assert not [name for name in one if one[name] != other[name]]


def test_equal_models_are_equal_files(tmp_path):
    """safetensors draws the order of its metadata. What JSON escapes has the same length in both of its writers."""
    names = ["plain", 'a"b\\c/', "\n\t\r\b\f", "\x00\x1f\x7f", "é ß 語 \u2028 \U0001f600"]
    weights = {name: torch.full((3,), float(i)) for i, name in enumerate(names)}
    written = set()
    for i in range(8):  # of three entries
        save(tmp_path / str(i), weights, EncoderConfig().to_dict())
        written.add((tmp_path / str(i) / "model.safetensors").read_bytes())
    assert len(written) == 1
    found = load_file(tmp_path / "0/model.safetensors")
    assert found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in names)
