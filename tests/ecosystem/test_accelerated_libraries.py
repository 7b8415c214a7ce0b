"""Larger libraries around a live transformers model: the same work with it plain and accelerated, and calls counted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from seeds import manual_seed, shifted
from test_accelerated_tools import FOLDER, TEXTS, assert_all_packed, no_fallback, with_head  # noqa: F401

import fastbert
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference


def sentence_model() -> Any:
    library = pytest.importorskip("sentence_transformers")
    model = library.SentenceTransformer(FOLDER, device="cpu")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(FOLDER)


def as_plain(model: Any, use: Callable[[Any], Any]) -> Any:
    """`use(model)` of the accelerated model, against transformers' own in float32 and float64; returns the model."""
    exact, near = (torch.as_tensor(use(m)) for m in (copy.deepcopy(model).double(), copy.deepcopy(model)))
    actual = torch.as_tensor(use(fastbert.accelerate(model)))
    assert_close_to_reference(actual.float(), exact.double(), near.float(), GRADIENT_FACTOR)
    return model


@pytest.mark.full  # test_packing_collators.py has their trainer, too
def test_sentence_transformers_trainer(tmp_path):
    datasets, library = pytest.importorskip("datasets"), pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    data = datasets.Dataset.from_dict({"anchor": TEXTS * 3, "positive": (TEXTS[1:] + TEXTS[:1]) * 3})

    def losses(model: Any) -> list[float]:
        arguments = library.SentenceTransformerTrainingArguments(
            output_dir=str(tmp_path),
            max_steps=3,
            per_device_train_batch_size=3,
            logging_steps=1,
            use_cpu=True,
            seed=shifted(1),
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = library.SentenceTransformerTrainer(
            model=model, args=arguments, train_dataset=data, loss=MultipleNegativesRankingLoss(model)
        )
        trainer.train()
        found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert len(found) == 3
        return found

    assert_all_packed(as_plain(sentence_model(), losses), 2 * 3)


def test_keybert():
    library = pytest.importorskip("keybert")
    texts = TEXTS[:3]

    def keywords(model: Any) -> list[list[tuple[str, float]]]:
        return library.KeyBERT(model=model).extract_keywords(texts, top_n=3)

    model = sentence_model()
    wanted, found = keywords(copy.deepcopy(model)), keywords(fastbert.accelerate(model))
    for theirs, ours in zip(wanted, found, strict=True):
        assert [word for word, _ in theirs] == [word for word, _ in ours]
        # KeyBERT rounds to four places.
        np.testing.assert_allclose([score for _, score in ours], [score for _, score in theirs], rtol=0, atol=1.01e-4)
    assert_all_packed(model, 2)


@pytest.mark.full  # test_own_inference.py has it with our own encoder
def test_datasets_map():
    datasets = pytest.importorskip("datasets")

    def vectors(model: Any) -> np.ndarray:
        data = datasets.Dataset.from_dict({"text": TEXTS})
        made = data.map(lambda rows: {"v": model.encode(rows["text"])}, batched=True, batch_size=3)
        return np.array(made["v"])

    assert_all_packed(as_plain(sentence_model(), vectors), 2)


@pytest.mark.full  # test_own_training.py has it with our own class
def test_lightning():
    library = pytest.importorskip("lightning")
    collate = transformers.DataCollatorWithPadding(tokenizer())
    rows = [{**tokenizer()(text), "labels": i % 2} for i, text in enumerate(TEXTS)]

    def losses(model: Any) -> list[float]:
        found: list[float] = []

        class Module(library.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def training_step(self, batch: Any, _: int) -> torch.Tensor:
                found.append((loss := self.model(**batch).loss).item())
                return loss

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.01)

        quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = library.Trainer(max_epochs=2, accelerator="cpu", enable_model_summary=False, **quiet)
        trainer.fit(Module(), torch.utils.data.DataLoader(rows, batch_size=3, collate_fn=collate))
        return found

    model = as_plain(with_head("SequenceClassification", num_labels=2), losses)
    assert_all_packed(model, 4)


@pytest.mark.full  # test_own_inference.py has it with our own class
def test_bertviz():
    library = pytest.importorskip("bertviz")
    inputs = tokenizer()(TEXTS[1], return_tensors="pt")

    def attentions(model: Any) -> torch.Tensor:
        found = model(**inputs, output_attentions=True).attentions
        tokens = tokenizer().convert_ids_to_tokens(inputs["input_ids"][0])
        assert "lighthouse" in library.head_view(found, tokens, html_action="return").data
        return torch.stack(found).detach()

    model = transformers.AutoModel.from_pretrained(FOLDER, attn_implementation="eager").eval()
    assert_all_packed(as_plain(model, attentions), 1)


def test_captum():
    """It attributes to padded tensors, between a module and the next: transformers' own code runs."""
    library = pytest.importorskip("captum.attr")
    inputs = tokenizer()(TEXTS[:2], padding=True, return_tensors="pt")

    def attributions(model: Any) -> torch.Tensor:
        def score(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return model(ids, attention_mask=mask).logits[:, 1]

        explained = library.LayerIntegratedGradients(score, model.bert.embeddings.word_embeddings)
        given = {"additional_forward_args": (inputs["attention_mask"],), "n_steps": 4}
        found = explained.attribute(inputs["input_ids"], torch.zeros_like(inputs["input_ids"]), **given)
        return found.sum(-1).detach()

    model = with_head("SequenceClassification", num_labels=2)
    expected = attributions(copy.deepcopy(model))
    with pytest.warns(UserWarning, match=r"embeddings.word_embeddings has hooks \(captum"):
        assert torch.equal(attributions(fastbert.accelerate(model)), expected)
    status = fastbert.status(model)
    assert status.others > 0 and status.why_not.startswith("embeddings.word_embeddings has hooks")
    model(**inputs)  # its hooks are gone
    assert fastbert.status(model).packed == status.packed + 1


@pytest.mark.full  # what is exported is transformers' own code
def test_onnx(tmp_path):
    """A graph holds transformers' own code, which computes the same for every mask."""
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=50
    )
    manual_seed(0)
    model = transformers.BertForSequenceClassification(config).eval()
    plain, path = copy.deepcopy(model), str(tmp_path / "model.onnx")
    ids = torch.randint(5, 50, (3, 7))
    inputs = {"input_ids": ids, "attention_mask": (torch.arange(7) < torch.tensor([[7], [3], [5]])).long()}
    names = {"input_names": list(inputs), "output_names": ["logits"]}
    with pytest.warns(UserWarning, match=r"torch.jit.trace and torch.export record transformers' own code"):
        torch.onnx.export(fastbert.accelerate(model), (), path, kwargs=inputs, dynamo=True, verbose=False, **names)
    other = {**inputs, "attention_mask": inputs["attention_mask"].flip(0)}
    found = runtime.InferenceSession(path).run(None, {name: t.numpy() for name, t in other.items()})[0]
    exact, near = (m(**other).logits.detach() for m in (copy.deepcopy(plain).double(), plain))
    assert_close_to_reference(torch.from_numpy(found), exact, near, GRADIENT_FACTOR)
    assert fastbert.status(model).why_not.startswith("torch.jit.trace and torch.export record")
