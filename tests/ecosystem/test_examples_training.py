"""The examples that are programs run as they are: on the sample files, and a tiny model for the real one."""

from __future__ import annotations

import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from full import left_to_full

import fastbert
from fastbert.training.finetuning import make_task
from fastbert.training.options import FinetuneOptions, options_of, read_yaml
from fastbert.training.run import execute

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = {
    "hf_trainer": "--steps=4",
    "accelerate_loop": "--epochs=1",
    "lightning_module": "--epochs=1",
    "sentence_transformers_trainer": "--steps=4",
    "few_labels": "--pairs=1",
}
SAYS = {
    "hf_trainer": "eval_accuracy",
    "accelerate_loop": "accuracy",
    "lightning_module": "accuracy",
    "sentence_transformers_trainer": "calls ran packed",
    "few_labels": "after 32 pairs: ",
}


# test_own_training.py and test_own_sentences.py have these trainers.
@left_to_full(lambda p: p["name"] in ("hf_trainer", "sentence_transformers_trainer"))
@pytest.mark.parametrize("name", STEPS)
def test_example(name, tmp_path, monkeypatch, capsys):
    for library in ("datasets", "transformers", "accelerate", "lightning", "sentence_transformers"):
        pytest.importorskip(library)
    model = tiny.write_model(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", f"--model={model}", "--output=out", STEPS[name]])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert SAYS[name] in capsys.readouterr().out
    if name in ("sentence_transformers_trainer", "few_labels"):
        assert fastbert.SentenceEncoder(tmp_path / "out").dim == 32
    else:
        found = fastbert.TextClassifier(tmp_path / "out", device="cpu").predict(["Where is my parcel right now?"])
        assert found.shape == (1, 4)


def test_recipe_of_embeddings(tmp_path, monkeypatch):
    """The options of the YAML file, with the sizes of a tiny model."""
    recipe = EXAMPLES / "finetune_embedding.yaml"
    options = options_of(FinetuneOptions, read_yaml(recipe), str(recipe))
    model = str(tiny.write_model(tmp_path / "model"))
    monkeypatch.chdir(EXAMPLES.parent)
    small = replace(options, model=model, dims=("32", "8"), steps=2, output=str(tmp_path / "out"))
    metrics = execute(small, make_task)
    assert {"eval_mrr_at_10", "eval_mrr_at_10_8", "eval_accuracy_at_1"} <= set(metrics)
