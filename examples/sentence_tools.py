"""KeyBERT, BERTopic, SetFit and MTEB with a SentenceEncoder as their embedding model, beside sentence-transformers.

Too heavy for `make test`. docs/sentences.md quotes the output of

    pip install keybert bertopic setfit mteb 'fastbert-kernels[demo]' sentence-transformers
    python examples/sentence_tools.py

Each tool runs twice on real weights, without dropout. Printed: how far its results are apart, how many texts our
encoder read for it (its trainer's are not among them), and the seconds of each.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import fastbert
from fastbert.checkpoint.pretrained import resolve

TEXTS = (Path(__file__).parent / "sentences.txt").read_text(encoding="utf-8").splitlines()
MODEL = "all-MiniLM-L6-v2"


def keybert(model: Any) -> np.ndarray:
    """The keywords of five documents and their distances: compared as numbers, and as words."""
    from keybert import KeyBERT

    found = KeyBERT(model=model).extract_keywords([" ".join(TEXTS[i : i + 8]) for i in range(0, 40, 8)], top_n=5)
    return np.array([[(sum(map(ord, word)), score) for word, score in document] for document in found])


def bertopic(model: Any) -> np.ndarray:
    """The topic of each text, with a seed for UMAP: the vectors go through its own backend."""
    from bertopic import BERTopic
    from bertopic.backend._utils import select_backend
    from umap import UMAP

    backend = select_backend(model)
    assert backend.embedding_model is model  # an object that it does not know it replaces without a word
    topics = BERTopic(embedding_model=model, umap_model=UMAP(random_state=1, n_neighbors=5), min_topic_size=5)
    labels, _ = topics.fit_transform(TEXTS)
    assert len(set(labels)) > 2
    return backend.embed(TEXTS)


def setfit(model: Any) -> np.ndarray:
    """Fine-tuned on 16 texts with SetFit's own trainer: the probabilities of other texts."""
    from datasets import Dataset
    from setfit import SetFitModel, Trainer, TrainingArguments
    from sklearn.linear_model import LogisticRegression

    made = SetFitModel(model_body=model, model_head=LogisticRegression(), labels=["short", "long"])
    few = TEXTS[:16]
    data = Dataset.from_dict({"text": few, "label": [int(len(text) > np.median([*map(len, few)])) for text in few]})
    arguments = TrainingArguments(max_steps=5, batch_size=8, report_to="none", seed=1, show_progress_bar=False)
    arguments.eval_strategy = "no"
    Trainer(model=made, args=arguments, train_dataset=data).train()
    return np.asarray(made.predict_proba(TEXTS[16:60]))


def mteb(model: Any) -> np.ndarray:
    """Its wrapper and its evaluator of sentence pairs, on pairs that are here: the hub has its own."""
    from mteb.models.sentence_transformer_wrapper import SentenceTransformerEncoderWrapper
    from sentence_transformers.evaluation import EmbeddingSimilarityEvaluator

    wrapped = SentenceTransformerEncoderWrapper(model)
    assert wrapped.model is model
    first, second = TEXTS[:100], TEXTS[100:200]
    gold = [1 / (1 + abs(len(a) - len(b))) for a, b in zip(first, second, strict=True)]
    scores = EmbeddingSimilarityEvaluator(first, second, gold, write_csv=False)(wrapped.model)
    vectors = wrapped.model.encode_query(first)
    return np.append(wrapped.similarity(vectors, vectors).numpy().ravel(), list(scores.values()))


def without_dropout(folder: Path) -> Path:
    """The model's folder with a config in which nothing is dropped: who trains draws no numbers then."""
    shutil.copytree(resolve(MODEL), folder)
    path = folder / "config.json"
    changes = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}))
    return folder


def run(tool: Callable[[Any], np.ndarray], folder: Path) -> str:
    from sentence_transformers import SentenceTransformer

    read = 0
    encoder = fastbert.SentenceEncoder.from_pretrained(folder, device="cpu")
    run_batch = encoder._vectors_of

    def counted(ids: list[list[int]], *rest: Any) -> Any:
        nonlocal read
        read += len(ids)
        return run_batch(ids, *rest)

    encoder._vectors_of = counted  # type: ignore[method-assign]
    start = time.perf_counter()
    ours = tool(encoder.as_sentence_transformer())
    middle = time.perf_counter()
    theirs = tool(SentenceTransformer(str(folder), device="cpu"))
    seconds = middle - start, time.perf_counter() - middle
    assert ours.shape == theirs.shape and read > 0
    apart = np.abs(ours - theirs).max()
    return f"{tool.__name__:<9} {apart:9.1e} {read:8,} {seconds[0]:8.1f} {seconds[1]:8.1f}"


if __name__ == "__main__":
    tools = {tool.__name__: tool for tool in (keybert, bertopic, setfit, mteb)}
    print(f"{'tool':<9} {'apart':>9} {'texts':>8} {'ours, s':>8} {'theirs, s':>8}")
    with tempfile.TemporaryDirectory() as parent:
        folder = without_dropout(Path(parent, "model"))
        for name in sys.argv[1:] or tools:
            print(run(tools[name], folder), flush=True)
