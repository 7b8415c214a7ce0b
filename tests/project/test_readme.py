"""The README stays true: its table is what the registries say, and its examples run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import fastbert
from fastbert.backend import Backend, _supports
from fastbert.bench.report import to_markdown
from fastbert.models.auto import _CLASSES

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
FAMILIES = {
    "bert": "BERT",
    "roberta": "RoBERTa",
    "xlm-roberta": "XLM-R",
    "distilbert": "DistilBERT",
    "albert": "ALBERT",
    "electra": "ELECTRA",
    "megatron-bert": "pre-norm BERT",
}
HEAD_NAMES = {
    "Model": "encoder",
    "MaskedLM": "masked LM",
    "PreTraining": "pre-training",
    "NextSentencePrediction": "next sentence",
    "SequenceClassification": "sequence classification, regression",
    "TokenClassification": "token classification",
    "QuestionAnswering": "question answering",
    "MultipleChoice": "multiple choice",
}


def support_tables() -> str:
    """Head x family, and op x backend, from the registries."""
    lines = ["| head | " + " | ".join(FAMILIES.values()) + " |", "|---|" + ":-:|" * len(FAMILIES)]
    for head in HEAD_NAMES:
        cells = ["yes" if (family, head) in _CLASSES else "-" for family in FAMILIES]
        lines.append(f"| {HEAD_NAMES[head]} | " + " | ".join(cells) + " |")
    lines += ["", "| op | " + " | ".join(b.value for b in Backend) + " |", "|---|" + ":-:|" * len(Backend)]
    for op, table in sorted(_supports.items()):
        cells = ["yes" if b is Backend.TORCH or b in table else "-" for b in Backend]
        lines.append(f"| `{op}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def test_support_tables_are_those_of_the_registries():
    fastbert.backends()  # registers every op
    assert {model_type for model_type, _ in _CLASSES} == set(FAMILIES)
    assert {head for _, head in _CLASSES} == set(HEAD_NAMES)
    assert support_tables() in README, "README.md must hold:\n" + support_tables()


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "amd-epyc-2-cores"


def test_the_speed_table_is_the_committed_result():
    (section,) = re.findall(r"<!-- speed: .*? -->\n(.*?)\n<!-- end of speed -->", README, re.DOTALL)
    assert section.startswith((RESULTS / "results.md").read_text(encoding="utf-8").strip())
    for chart in re.findall(r"!\[[^\]]*\]\(([^)]*)\)", section):
        assert (Path(__file__).parents[2] / chart).is_file()


@pytest.mark.parametrize(
    "folder", sorted(path.parent for path in RESULTS.parent.glob("*/results.json")), ids=lambda p: p.name
)
def test_committed_tables_are_made_from_the_committed_timings(folder):
    report = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert (folder / "results.md").read_text(encoding="utf-8") == to_markdown(report) + "\n"


BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda b: b.split("\n")[0][:40])
def test_examples_run(block, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    exec(compile(block, "README.md", "exec"), {})


def test_there_are_six_examples_and_every_variable_is_listed():
    assert len(BLOCKS) == 6
    sources = [p.read_text() for p in (Path(fastbert.__file__).parent).rglob("*.py")]
    sources.append((Path(__file__).parents[2] / "setup.py").read_text())
    used = {name for text in sources for name in re.findall(r"environ[^\n]*\"(FASTBERT_\w+)\"", text)}
    assert used == set(re.findall(r"^\| `(FASTBERT_\w+)` \|", README, re.MULTILINE))


def test_dtypes_named_in_the_readme_run():
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(4, 2, 16, dtype=dtype)
        out = fastbert.ops.attention(x, x, x, torch.tensor([0, 1, 4], dtype=torch.int32), 3, backend="torch")
        assert out.dtype == dtype and out.isfinite().all()
