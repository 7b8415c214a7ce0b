"""What a served model does: texts to sequences of tokens, batches of sequences to rows of numbers, rows to answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fastbert.checkpoint.pretrained import is_classifier, read_config
from fastbert.data.sentence_folder import transformer_folder
from fastbert.data.tokenized import pack
from fastbert.hub import resolve
from fastbert.sentences import Reranker, SentenceEncoder
from fastbert.sentences.text_model import InferenceOptions, TextModel


@dataclass
class Engine:
    """A model by its kind: "embedding", "reranker" (one label) or "classifier"."""

    name: str
    kind: str
    model: TextModel
    labels: list[str]
    options = InferenceOptions(normalize=False)

    @property
    def width(self) -> int:
        return self.model.dim if isinstance(self.model, SentenceEncoder) else len(self.labels)

    def tokenize(self, inputs: list[Any], prompt: str = "") -> tuple[list[Any], list[int], int | None]:
        """(sequences, their lengths, the first that was cut or None) of texts or pairs.

        Raises UnicodeEncodeError for what is not valid Unicode.
        """
        made = self.model.tokenize(inputs, prompt)
        return list(made), made.lengths.tolist(), made.cut[0] if made.cut else None

    def compute(self, sequences: list[Any]) -> np.ndarray:
        """The vectors of sequences, or their logits: (sequences, width)."""
        with torch.inference_mode():
            return self.model.compute(pack(sequences).to(self.model.device), self.options).cpu().numpy()


def load_engine(name: str, dtype: str, device: str | None) -> Engine:
    """The model of a folder or a name: by its config.json a classifier, a reranker, or else an encoder.

    Raises what `from_pretrained` of these raises.
    """
    config = read_config(transformer_folder(resolve(name)))
    if is_classifier(config):
        scorer = Reranker.from_pretrained(name, dtype=dtype, device=device)
        labels = [label for _, label in sorted(id2label(scorer).items())]
        kind = "reranker" if scorer.num_labels == 1 else "classifier"
        return Engine(name, kind, scorer, labels)
    return Engine(name, "embedding", SentenceEncoder.from_pretrained(name, dtype=dtype, device=device), [])


def id2label(scorer: Reranker) -> dict[int, str]:
    """The labels' names, by transformers' rule where the config has none."""
    named = scorer.model.config.id2label
    return {i: named.get(i, f"LABEL_{i}") for i in range(scorer.num_labels)}
