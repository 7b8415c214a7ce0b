"""What a served model does: texts to sequences of tokens, batches of sequences to rows of numbers, rows to answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastbert.checkpoint.pretrained import read_config
from fastbert.data.sentence_folder import transformer_folder
from fastbert.hub import resolve
from fastbert.sentences import Reranker, SentenceEncoder
from fastbert.sentences.scorer import Tokenized
from fastbert.sentences.text_model import TextModel

WHOLE = 2**31 - 1  # a batch is cut already


@dataclass
class Engine:
    """A model by its kind: "embedding", "reranker" (one label) or "classifier"."""

    name: str
    kind: str
    model: TextModel
    compute: Callable[[list[Any]], np.ndarray]
    labels: list[str]

    @property
    def width(self) -> int:
        return self.model.dim if isinstance(self.model, SentenceEncoder) else len(self.labels)

    def tokenize(self, inputs: list[Any], prompt: str = "") -> tuple[list[Any], list[int], int | None]:
        """(sequences, their lengths, the first that was cut or None) of texts or pairs.

        Raises InputError for what is not valid Unicode.
        """
        if prompt:
            inputs = [prompt + text for text in inputs]
        encodings = self.model.tokenizer.encode_batch_fast(inputs)
        cut = next((i for i, encoding in enumerate(encodings) if encoding.overflowing), None)
        if self.kind == "embedding":
            sequences: list[Any] = [encoding.ids for encoding in encodings]
            return sequences, [len(ids) for ids in sequences], cut
        sequences = [Tokenized(encoding.ids, encoding.type_ids) for encoding in encodings]
        return sequences, [len(one.ids) for one in sequences], cut


def load_engine(name: str, dtype: str, device: str | None) -> Engine:
    """The model of a folder or a name: by its config.json a classifier, a reranker, or else an encoder.

    Raises what `from_pretrained` of these raises.
    """
    config = read_config(transformer_folder(resolve(name)))
    if any(kind.endswith("ForSequenceClassification") for kind in config.extra.get("architectures") or ()):
        scorer = Reranker.from_pretrained(name, dtype=dtype, device=device)
        labels = [label for _, label in sorted(id2label(scorer).items())]
        kind = "reranker" if scorer.num_labels == 1 else "classifier"
        return Engine(name, kind, scorer, lambda batch: scorer.logits(batch, batch_tokens=WHOLE).cpu().numpy(), labels)
    encoder = SentenceEncoder.from_pretrained(name, dtype=dtype, device=device)

    def vectors(batch: list[list[int]]) -> np.ndarray:
        return encoder.encode_ids(batch, batch_tokens=WHOLE, normalize=False).cpu().numpy()

    return Engine(name, "embedding", encoder, vectors, [])


def id2label(scorer: Reranker) -> dict[int, str]:
    """The labels' names, by transformers' rule where the config has none."""
    named = scorer.model.config.id2label
    return {i: named.get(i, f"LABEL_{i}") for i in range(scorer.num_labels)}
