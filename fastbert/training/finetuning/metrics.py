"""How good answers are: losses and scores by scikit-learn, SciPy and seqeval."""

from __future__ import annotations

import numpy as np
import torch
from scipy.special import expit, log_softmax

from fastbert.sentences.scorer import label_probabilities


def class_metrics(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Of one label a row: the mean cross-entropy, the share that is right, and the mean of the classes' F1."""
    from sklearn.metrics import f1_score

    best = logits.argmax(-1)
    loss = -log_softmax(logits.astype(np.float64), -1)[np.arange(len(labels)), labels].mean()
    return {
        "loss": float(loss),
        "accuracy": float((best == labels).mean()),
        "macro_f1": float(f1_score(labels, best, average="macro", zero_division=0.0)),
    }


def several_metrics(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Of several labels at once: a label is said where its sigmoid is above 0.5."""
    from sklearn.metrics import f1_score

    said = label_probabilities(torch.from_numpy(logits), "multi_label_classification").numpy() > 0.5
    wanted = labels > 0.5
    x = logits.astype(np.float64)
    loss = -np.where(wanted, np.log(expit(x)), np.log(expit(-x))).mean()
    scores = {
        f"{average}_f1": float(f1_score(wanted, said, average=average, zero_division=0.0))
        for average in ("micro", "macro")
    }
    return {"loss": float(loss), **scores, "accuracy": float((said == wanted).all(-1).mean())}


def number_metrics(logits: np.ndarray, wanted: np.ndarray) -> dict[str, float]:
    """Of a regression: the mean square error, and the correlations; 0 where all values are the same."""
    from scipy.stats import pearsonr, spearmanr

    x, y = logits[:, 0].astype(np.float64), wanted.astype(np.float64)
    has_two = len(x) > 1 and np.ptp(x) > 0 and np.ptp(y) > 0
    return {
        "loss": float(((x - y) ** 2).mean()),
        "pearson": float(pearsonr(x, y)[0]) if has_two else 0.0,
        "spearman": float(spearmanr(x, y)[0]) if has_two else 0.0,
    }


def tag_metrics(said: list[list[str]], wanted: list[list[str]], is_entities: bool) -> dict[str, float]:
    """Of tags: the share of words that is right; where they spell entities, seqeval's precision, recall and F1, too."""
    right = sum(a == b for one, other in zip(said, wanted, strict=True) for a, b in zip(one, other, strict=True))
    metrics = {"accuracy": right / max(1, sum(map(len, wanted)))}
    if is_entities:
        from seqeval.metrics import f1_score, precision_score, recall_score

        scores = {"precision": precision_score, "recall": recall_score, "f1": f1_score}
        metrics |= {name: float(score(wanted, said, zero_division=0)) for name, score in scores.items()}
    return metrics
