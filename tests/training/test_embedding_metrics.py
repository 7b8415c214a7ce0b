"""What evaluation says of embeddings is what sentence-transformers' evaluators and scipy say."""

# ruff: noqa: F811  (a fixture that is imported is also an argument)
from __future__ import annotations

import numpy as np
import pytest
import torch
from embedding_tasks import RANKING, SCORED, folder, rows, task_of, write  # noqa: F401
from seeds import numpy_generator

from fastbert.training.finetuning.embedding_metrics import ranks_metrics, spearman

library = pytest.importorskip("sentence_transformers")
EPS = torch.finfo(torch.float64).eps  # metrics are means of as many numbers as there are rows


def test_spearman_is_theirs(folder, tmp_path):
    from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator

    data = rows(SCORED, 40, seed=1)
    path = write(tmp_path / "eval.jsonl", data)
    task = task_of(folder, rows(SCORED, 8), eval=(path,), dims=("32", "8"))
    found, model = task.evaluate(task.model.eval()), library.SentenceTransformer(str(folder), device="cpu")
    columns = [[row[c] for row in data] for c in SCORED]
    for dim, name in ((32, "spearman"), (8, "spearman_8")):
        evaluator = EmbeddingSimilarityEvaluator(*columns, truncate_dim=dim, main_similarity="cosine")
        theirs = evaluator(model)
        wanted = next(v for k, v in theirs.items() if "spearman_cosine" in k)
        assert found[name] == pytest.approx(wanted, abs=len(data) * EPS)


def test_retrieval_is_theirs(folder, tmp_path):
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

    data = rows(RANKING[:3], 60, seed=2)
    data += [{**data[0], "positive": data[3]["positive"]}]  # an anchor with two positives, a text for two anchors
    task = task_of(folder, rows(RANKING, 8), eval=(write(tmp_path / "eval.jsonl", data),))
    found = task.evaluate(task.model.eval())
    corpus = {t: t for row in data for t in (row["positive"], row["negative_1"])}
    relevant: dict[str, set[str]] = {}
    for row in data:
        relevant.setdefault(row["anchor"], set()).add(row["positive"])
    evaluator = InformationRetrievalEvaluator({t: t for t in relevant}, corpus, relevant, main_score_function="cosine")
    theirs = evaluator(library.SentenceTransformer(str(folder), device="cpu"))
    for name in ("accuracy_at_1", "mrr_at_10", "accuracy_at_10"):
        assert found[name] == pytest.approx(theirs[f"cosine_{name.replace('_at_', '@')}"], abs=len(data) * EPS)


def test_metrics_of_vectors():
    """Ties share their rank; a text that is an anchor and a document is not looked for by itself."""
    scipy = pytest.importorskip("scipy.stats")
    draw = numpy_generator(0)
    vectors, scores = torch.from_numpy(draw.normal(size=(60, 8))), draw.integers(0, 4, 30)
    pairs = [np.arange(30), np.arange(30, 60)]
    cosines = torch.nn.functional.cosine_similarity(vectors[:30], vectors[30:]).numpy()
    assert spearman(vectors, pairs, scores) == pytest.approx(scipy.spearmanr(cosines, scores).statistic)
    square = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]])
    assert ranks_metrics(square, [np.array([0, 1]), np.array([1, 0])])["accuracy_at_1"] == 1.0
    triplets = [np.array([0, 1]), np.array([2, 2]), np.array([1, 0])]
    assert ranks_metrics(square, triplets) == {"accuracy_at_1": 0.0, "accuracy_at_10": 1.0, "mrr_at_10": 0.5}
