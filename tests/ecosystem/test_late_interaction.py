"""Scores of late interaction beside sentence-transformers': ops.maxsim, its losses, and its trainer."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import tiny
import torch

import fastbert
from fastbert import ops

QUERIES = ["who sat on the mat", "a dog", "the old house", "cats ran"]
POSITIVES = ["the cat sat on the mat.", "a new dog ran in to the house", "they sat in the old house.", "the cats ran"]
NEGATIVES = ["a dog ran", "who and we", "the mat, the old mat", "a house on the cat"]


def packed(lengths, width, seed=0):
    rows = torch.randn(sum(lengths), width, generator=torch.Generator().manual_seed(seed))
    offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    return torch.nn.functional.normalize(rows, dim=-1), offsets


@pytest.mark.parametrize("length_normalize", (False, True))
def test_scores_are_those_of_sentence_transformers(length_normalize):
    similarity = pytest.importorskip("sentence_transformers.util.similarity")
    q_lengths, d_lengths = (32, 1, 7, 64), (30, 512, 1, 100, 3)
    (queries, of_q), (documents, of_d) = packed(q_lengths, 96), packed(d_lengths, 96, seed=1)
    lists = [list(rows.split(lengths)) for rows, lengths in ((queries, q_lengths), (documents, d_lengths))]
    expected = similarity.maxsim(*lists, length_normalize=length_normalize)
    actual = ops.maxsim(queries, of_q, documents, of_d, length_normalize=length_normalize)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-5)
    pairs = torch.tensor([[0, 3, 3, 1], [4, 0, 1, 2]])
    chosen = [[side[i] for i in index.tolist()] for side, index in zip(lists, pairs, strict=True)]
    expected = similarity.maxsim_pairwise(*chosen, length_normalize=length_normalize)
    actual = ops.maxsim(queries, of_q, documents, of_d, pairs=pairs, length_normalize=length_normalize)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-5)


def multi_vectors(folder: Any) -> Any:
    """A model whose queries have [MASK] tokens that nothing attends to, and no dropout."""
    library = pytest.importorskip("sentence_transformers", minversion="6")
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    expansion = {"strategy": "fixed", "attend": False, "length": 12}
    first = Transformer(str(tiny.write_model(folder, **rates)), query_expansion=expansion)
    torch.manual_seed(1)
    project = Dense(32, 16, False, torch.nn.Identity(), module_input_name="token_embeddings")
    mask, unit = MultiVectorMask(skiplist_words=[".", ","]), Normalize(module_input_name="token_embeddings")
    return library.MultiVectorEncoder(modules=[first, project, mask, unit], device="cpu")


def losses_of(model: Any, ours: bool) -> dict[str, tuple[Any, Any]]:
    """By name a loss, with fastbert's scores or with the library's, and its labels."""
    from sentence_transformers.multi_vector_encoder import losses

    def scores(function: Any) -> dict[str, Any]:
        return {"similarity_fct": function} if ours else {}

    ranking, pairs = scores(fastbert.colbert_scores), scores(fastbert.colbert_scores_pairwise)
    distilled, teacher = (
        scores(fastbert.colbert_kd_scores),
        torch.tensor([[3.0, 1.0], [2.0, 2.5], [4.0, 0.0], [1.0, 0.5]]),
    )
    return {
        "ranking": (losses.MultiVectorMultipleNegativesRankingLoss(model, **ranking), None),
        "cached": (losses.CachedMultiVectorMultipleNegativesRankingLoss(model, mini_batch_size=2, **ranking), None),
        "margin": (losses.MultiVectorMarginMSELoss(model, **pairs), teacher[:, 0] - teacher[:, 1]),
        "distillation": (losses.MultiVectorDistillKLDivLoss(model, **distilled), teacher),
    }


def step(model: Any, name: str, ours: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A loss of queries, positives and negatives, and the gradients of it."""
    loss, labels = losses_of(model, ours)[name]
    model.zero_grad()
    columns = (("query", QUERIES), ("document", POSITIVES), ("document", NEGATIVES))
    features = [model.preprocess(texts, task=task) for task, texts in columns]
    value = loss(features, None if labels is None else labels.to(next(model.parameters()).dtype))
    value = value if isinstance(value, torch.Tensor) else sum(value.values())
    value.backward()
    return value.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("route", ("scores alone", "accelerated"))
@pytest.mark.parametrize("name", ("ranking", "cached", "margin", "distillation"))
def test_losses_and_gradients_by_our_scores(name, route, tmp_path):
    """In float64 theirs; ours is no farther from it than theirs in float32, but for a small factor."""
    theirs = multi_vectors(tmp_path)
    ours = copy.deepcopy(theirs)
    if route == "accelerated":
        fastbert.accelerate(ours)
    _, of_exact = step(copy.deepcopy(theirs).double(), name, False)
    expected, gradients = step(theirs, name, False)
    found, of_ours = step(ours, name, True)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert of_ours.keys() >= gradients.keys() == of_exact.keys()
    for key, wanted in of_exact.items():
        allowed = 4 * (gradients[key] - wanted).norm() + 1e-6 * (1 + wanted.norm())
        assert (of_ours[key] - wanted).norm() <= allowed, key
    assert route != "accelerated" or fastbert.status(ours).others == 0


def test_the_trainer(tmp_path):
    """Three steps of the library's trainer; what stands behind them."""
    library = pytest.importorskip("sentence_transformers", minversion="6")
    datasets = pytest.importorskip("datasets")
    theirs = multi_vectors(tmp_path / "model")
    ours = fastbert.accelerate(copy.deepcopy(theirs))
    rows = datasets.Dataset.from_dict({"query": QUERIES * 3, "positive": POSITIVES * 3, "negative": NEGATIVES * 3})
    logs = []
    for model, is_ours in ((theirs, False), (ours, True)):
        arguments = library.MultiVectorEncoderTrainingArguments(
            str(tmp_path / f"run{is_ours}"),
            max_steps=3,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            optim="sgd",  # Adam would make the rounding of a gradient that is zero, a key bias's, as large as others
            logging_steps=1,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
        )
        loss, _ = losses_of(model, is_ours)["ranking"]
        trainer = library.MultiVectorEncoderTrainer(model, arguments, rows, loss=loss)
        trainer.train()
        logs.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(logs[0]) == 3 and logs[1] == pytest.approx(logs[0], rel=1e-4)
    status = fastbert.status(ours)
    assert status.packed >= 6 and status.others == 0
    for (name, a), b in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-4, msg=name)
