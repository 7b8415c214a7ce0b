"""TextClassifier gives each text, or pair of texts, the probabilities of a model's labels."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from fastbert.data.tokenized import Text
from fastbert.sentences.batches import check_iterable, check_pair, check_text, check_texts, takes_sentences
from fastbert.sentences.loading import LoadArguments
from fastbert.sentences.pool import ProcessPool
from fastbert.sentences.scorer import SequenceScorer, label_names
from fastbert.sentences.text_model import Aggregate, Devices, InferenceOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fastbert.data.chunks import Windows


class TextClassifier(SequenceScorer):
    """What transformers' pipeline for text classification computes, on packed batches."""

    what = "classifier"

    def __init__(self, model_name_or_path: str | os.PathLike[str], **options: Unpack[LoadArguments]):
        """A classifier from the folder or hub id of a model for sequence classification; the rest as for a Reranker.

        `windows` are what a call's are by default: None, or those with which `fastbert finetune` has trained it.
        """
        self._load(model_name_or_path, None, options)

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the labels, LABEL_i where the config has none."""
        return label_names(self.model)

    @takes_sentences
    def predict(
        self,
        inputs: str | Iterable[Text],
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        device: Devices | None = None,
        pool: ProcessPool | None = None,
        chunk_size: int | None = None,
        *,
        batch_tokens: int | None = None,
        windows: Windows | None = None,
        aggregate: Aggregate | None = None,
    ) -> np.ndarray:
        """The probabilities of the labels: (num_labels,) for one text, (inputs, num_labels) for a list.

        They come from a softmax; from a sigmoid for one label, or several at once (`problem_type`); a regression's
        values are as they are. An input of a list is a text or a tuple of two. The arguments are those of a Reranker,
        but for the windows' defaults: the mean of the windows' probabilities ("predict, then average"), so that a
        window says no more than that it is sure, however large its logits are.

        Raises:
            TypeError, InputError: as a Reranker.
        """
        one = isinstance(inputs, str)
        listed = check_texts(inputs) if isinstance(inputs, str) else _check_inputs(inputs)
        windows = self.windows if windows is None else windows
        options = InferenceOptions("", batch_tokens, batch_size, on_host=True, windows=windows, aggregate=aggregate)
        bar_options = {"desc": "classifying"}
        logits = self.shared_rows(listed, options, show_progress_bar, device, pool, chunk_size, **bar_options)
        scores = self.probabilities(logits).numpy()
        return scores[0] if one else scores

    encode = predict


def _check_inputs(inputs: Any) -> list[Any]:
    check_iterable("inputs", inputs, "a text, or a list of texts or of pairs")
    listed = list(inputs)
    for i, one in enumerate(listed):
        if isinstance(one, (list, tuple)):
            listed[i] = check_pair(f"inputs[{i}]", one)
        else:
            check_text(f"inputs[{i}]", one)
    return listed
