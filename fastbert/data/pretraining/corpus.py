"""A text corpus as token ids in one row: what masked language models are pre-trained on."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from fastbert.data.sources import Source, check_columns, check_texts, import_datasets, load_source
from fastbert.errors import InputError


@dataclass(frozen=True)
class Corpus:
    """Documents, one after the other, without special tokens.

    tokens: int32 (tokens,). segments: int64, where each line or paragraph begins in `tokens`, and at last where the
    last one ends; none is empty. documents: the same for each document, whose ends are ends of segments.
    """

    tokens: np.ndarray = field(repr=False)
    segments: np.ndarray = field(repr=False)
    documents: np.ndarray = field(repr=False)

    def __repr__(self) -> str:
        segments, documents = len(self.segments) - 1, len(self.documents) - 1
        return f"Corpus({len(self.tokens):,} tokens, {segments:,} segments, {documents:,} documents)"


def tokenize_corpus(
    source: Source,
    tokenizer: Tokenizer,
    *,
    column: str = "text",
    split: str = "train",
    processes: int | None = None,
    delimiter: str | None = None,
) -> Corpus:
    """The corpus of `source` (see `load_source`, for `split` and `delimiter`, too), tokenised once: `datasets` keeps
    what came out for the next run.

    In files of text a line is a segment, and a blank line ends a document; elsewhere each row's `column` is a document,
    and a line of it a segment. A document without tokens is left out. `processes`: that tokenise; None: this one alone,
    in which `tokenizers` uses all cores.

    Raises InputError: no such column, or no tokens at all.
    """
    datasets = import_datasets()
    rows = load_source(source, split, delimiter=delimiter)
    where = str(source) if isinstance(source, (str, os.PathLike)) else "the corpus"
    check_columns(rows, [column], where)
    is_lines = rows.info.builder_name == "text"
    features = datasets.Features(
        {"ids": datasets.List(datasets.Value("int32")), "segment": datasets.List(datasets.Value("int32"))}
    )
    tokenized = rows.map(
        _Tokenize(tokenizer.to_str(), column, where),
        batched=True,
        with_indices=True,
        remove_columns=rows.column_names,
        features=features,
        num_proc=processes,
        desc="tokenizing",
    )
    tokens, ends = _flat(tokenized, "ids")
    sizes, _ = _flat(tokenized, "segment")  # tokens of each line, by row
    if not len(tokens):
        raise InputError("the corpus has no tokens")
    segments = np.concatenate([[0], np.cumsum(sizes[sizes > 0], dtype=np.int64)])
    if is_lines:  # a row is a line, and an empty one is the end of a document
        row_ends = ends[1:]
        stops = np.append(row_ends[np.diff(ends) == 0], row_ends[-1])
    else:
        stops = ends[1:]
    documents = np.unique(np.concatenate([[0], stops]))
    return Corpus(tokens, segments, documents.astype(np.int64))


class _Tokenize:
    """What `datasets` maps and fingerprints: the same tokenizer and column are the same work."""

    def __init__(self, tokenizer: str, column: str, where: str):
        self.tokenizer, self.column, self.where = tokenizer, column, where
        self._loaded: Tokenizer | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"tokenizer": self.tokenizer, "column": self.column, "where": self.where, "_loaded": None}

    def __call__(self, rows: Mapping[str, list[Any]], indices: Sequence[int]) -> dict[str, list[Any]]:
        if self._loaded is None:
            self._loaded = Tokenizer.from_str(self.tokenizer)
        ids, segments = [], []
        check_texts(rows[self.column], indices, self.column, self.where)
        split = [text.splitlines() for text in rows[self.column]]
        encoded = iter(
            self._loaded.encode_batch_fast([line for lines in split for line in lines], add_special_tokens=False)
        )
        for lines in split:
            line_ids = [next(encoded).ids for _ in lines]
            ids.append([i for line in line_ids for i in line])
            segments.append([len(line) for line in line_ids])
        return {"ids": ids, "segment": segments}


def _flat(dataset: Any, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(the values of a column of lists, one after the other; where each list begins, and the last one ends).

    A view of the file that `datasets` has mapped, where that is in one piece.
    """
    import pyarrow as pa

    column = dataset.data.column(name)
    values = [chunk.flatten() for chunk in column.chunks]
    sizes = [np.diff(chunk.offsets.to_numpy()) for chunk in column.chunks]
    ends = np.concatenate([[0], np.cumsum(np.concatenate(sizes), dtype=np.int64)]) if sizes else np.zeros(1, np.int64)
    if len(values) == 1:
        return values[0].to_numpy(zero_copy_only=True), ends
    joined = pa.concat_arrays(values) if values else pa.array([], pa.int32())
    return joined.to_numpy(zero_copy_only=False), ends
