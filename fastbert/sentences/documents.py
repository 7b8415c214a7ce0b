"""Vectors of parts of texts: of the windows of one that is longer than the model, of its chunks, of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastbert.data.tokenized import run_batches
from fastbert.data.windows import CORE, OUTSIDE, OVERLAP, Cutter, TokenWindows, Windows
from fastbert.errors import InputError
from fastbert.packed_inputs import PackedInputs
from fastbert.sentences.batches import longest_first
from fastbert.sentences.pooling import pool

if TYPE_CHECKING:
    from fastbert.sentences.encoder import SentenceEncoder
    from fastbert.sentences.text_model import InferenceOptions

CHUNKS = Windows(overlap=0, at="sentences")  # as which texts are cut into chunks
OnTokens = Callable[[int], Any]


@dataclass(frozen=True)
class Chunks:
    """Parts of texts, in order, and their vectors.

    vectors: float32 (chunks, dim). documents: int64 (chunks,), which text each is of. starts, ends: int64 (chunks,),
    its characters there.
    """

    vectors: np.ndarray = field(repr=False)
    documents: np.ndarray = field(repr=False)
    starts: np.ndarray = field(repr=False)
    ends: np.ndarray = field(repr=False)

    def __len__(self) -> int:
        return len(self.documents)


def cutter_of(encoder: SentenceEncoder, windows: Windows, task: str | None = None) -> Cutter:
    """Raises InputError: windows are longer than the model takes, have no room, or overlap by too much."""
    tokenizer = encoder.tokenizer_of(task)
    assert tokenizer.truncation is not None
    length, overlap = windows.tokens(tokenizer.truncation["max_length"])
    is_first = windows.pool == "first"
    limit = 1 if is_first else windows.limit
    return Cutter(tokenizer, length, overlap, limit=limit, quietly=is_first, at=windows.at)


@torch.inference_mode()
def document_rows(
    encoder: SentenceEncoder, texts: Sequence[str], options: InferenceOptions, on_tokens: OnTokens
) -> torch.Tensor:
    """The vectors of texts, of their windows: float32 (texts, dim) on the model's device."""
    assert options.windows is not None
    made = cutter_of(encoder, options.windows, options.task).cut(texts, prompt=options.prompt)
    rows = _window_rows(encoder, made, options, on_tokens)
    return encoder.finish(torch.from_numpy(options.windows.combined(rows, made)).to(encoder.device), options)


def _window_rows(
    encoder: SentenceEncoder, made: TokenWindows, options: InferenceOptions, on_tokens: OnTokens
) -> np.ndarray:
    """What the model's pooling makes of each window, without its overlap: float32 (windows, width)."""
    counts = np.bincount(made.of_token[made.parts != OVERLAP], minlength=len(made))
    rows = np.empty((len(made), encoder.pooled_width), np.float32)
    for places, hidden, parts in _batches(encoder, made, options, on_tokens):
        offsets = torch.from_numpy(np.append(0, np.cumsum(counts[places])).astype(np.int32)).to(hidden.device)
        kept = _chosen(hidden, parts != OVERLAP)
        rows[places] = encoder.pooled(kept, offsets, options).float().cpu().numpy()
    return rows


def _batches(
    encoder: SentenceEncoder, made: TokenWindows, options: InferenceOptions, on_tokens: OnTokens
) -> Iterator[tuple[np.ndarray, torch.Tensor, np.ndarray]]:
    """(the places of a batch's windows, their hidden states (tokens, hidden_size), the parts of these)."""
    run = encoder.model.last_hidden_state
    for places, hidden in run_batches(run, made, encoder.device, options.batch_tokens, options.batch_size):
        yield places, hidden, made.parts[_tokens_of(made, places)]
        on_tokens(len(hidden))


def _tokens_of(made: TokenWindows, places: np.ndarray) -> np.ndarray:
    return np.concatenate([np.arange(made.offsets[i], made.offsets[i + 1]) for i in places])


def _chosen(hidden: torch.Tensor, which: np.ndarray) -> torch.Tensor:
    return hidden if which.all() else hidden[torch.from_numpy(np.flatnonzero(which)).to(hidden.device)]


@torch.inference_mode()
def encode_chunks(
    encoder: SentenceEncoder, texts: Sequence[str], options: InferenceOptions, on_tokens: OnTokens, late: bool
) -> Chunks:
    """The chunks of texts, `options.windows`, and their vectors. A text without a token has none."""
    assert options.windows is not None
    cutter = cutter_of(encoder, options.windows, options.task)
    made = cutter.cut(texts, prompt=options.prompt)
    spans, parts = made.spans, made.parts
    of_chunk = np.flatnonzero(spans[:, 0] >= 0)
    chunk = made.of_token[of_chunk]
    first, last = of_chunk[np.diff(chunk, prepend=-1) > 0], of_chunk[np.diff(chunk, append=len(made)) > 0]
    there = np.unique(chunk)
    if late and len(there):
        rows = _late_rows(encoder, made, texts, options, on_tokens)
    else:
        whole = replace(made, parts=np.where(parts == OVERLAP, CORE, parts))
        rows = _window_rows(encoder, whole, options, on_tokens)
    vectors = encoder.finish(torch.from_numpy(rows[there]).to(encoder.device), options).cpu().numpy()
    return Chunks(vectors, made.source[there], spans[first, 0].astype(np.int64), spans[last, 1].astype(np.int64))


def _late_rows(
    encoder: SentenceEncoder, chunks: TokenWindows, texts: Sequence[str], options: InferenceOptions, on_tokens: OnTokens
) -> np.ndarray:
    """The mean of each chunk's tokens as the whole text makes them, as far as the model goes, and windows of that
    length beyond, in which each token is taken from the core (Guenther et al. 2024, "Late chunking"): float32
    (chunks, hidden_size). Raises InputError: the model does not pool by the mean.
    """
    if encoder.recipe.pooling != ("mean",):
        modes = "+".join(encoder.recipe.pooling)
        raise InputError(f"late chunking takes the mean of a chunk's tokens, and this model pools by {modes}")
    contexts = cutter_of(encoder, Windows(), options.task).cut(texts, prompt=options.prompt)
    begins, ends = _numbered(contexts, contexts.parts == CORE)
    first, last = _numbered(chunks, chunks.parts != OUTSIDE)
    sums = np.zeros((len(chunks), encoder.model.config.hidden_size))
    for places, hidden, parts in _batches(encoder, contexts, options, on_tokens):
        core = np.flatnonzero(parts == CORE)
        at, rows, sizes, found = 0, [], [0], []
        for i in places.tolist():
            begin, end = begins[i], ends[i]
            for c in range(int(np.searchsorted(last, begin, "right")), int(np.searchsorted(first, end))):
                inside = range(max(begin, first[c]) - begin, min(end, last[c]) - begin)
                rows.append(core[at + inside.start : at + inside.stop])
                sizes.append(len(inside))
                found.append(c)
            at += end - begin
        if not rows:  # texts without a token
            continue
        offsets = torch.from_numpy(np.cumsum(sizes).astype(np.int32)).to(hidden.device)
        chosen = hidden[torch.from_numpy(np.concatenate(rows)).to(hidden.device)]
        means = pool(chosen, offsets, encoder.recipe.pooling).float().cpu().numpy()
        np.add.at(sums, found, means * np.array(sizes[1:], np.float64)[:, None])
    return (sums / np.maximum(last - first, 1)[:, None]).astype(np.float32)


def _numbered(made: TokenWindows, which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each window the numbers, among the tokens of all texts, of the first and behind the last of its tokens that
    `which` chooses, which stand side by side.
    """
    in_text = made.parts != OUTSIDE
    of_token = made.of_token
    counts = np.bincount(of_token[in_text], minlength=len(made))
    size_of_text = np.zeros(int(made.source[-1]) + 2, np.int64)
    np.maximum.at(size_of_text, made.source + 1, made.begins + counts)
    before = np.cumsum(size_of_text)[made.source] + made.begins
    place = np.cumsum(in_text) - 1  # of a token among those of texts
    first_of_window = np.cumsum(counts) - counts
    chosen = np.flatnonzero(which)
    sizes = np.bincount(of_token[chosen], minlength=len(made))
    skipped = np.zeros(len(made), np.int64)
    heads = chosen[np.diff(of_token[chosen], prepend=-1) > 0]
    skipped[of_token[heads]] = place[heads] - first_of_window[of_token[heads]]
    return before + skipped, before + skipped + sizes


def token_rows(
    encoder: SentenceEncoder, texts: Sequence[str], options: InferenceOptions, on_texts: Callable[[int], Any]
) -> list[dict[str, torch.Tensor]]:
    """For each of the texts what `encode` gives for `output_value=None`."""
    found: list[dict[str, torch.Tensor]] = [{}] * len(texts)

    def compute(batch: PackedInputs) -> list[dict[str, torch.Tensor]]:
        hidden, offsets = encoder.model.last_hidden_state(batch), batch["batch"].cu_seqlens
        lengths = offsets.diff().tolist()
        vectors = encoder.finish(encoder.pooled(hidden, offsets, options), options)
        return [
            {
                "input_ids": ids,
                "attention_mask": torch.ones_like(ids),
                "token_embeddings": tokens,
                "sentence_embedding": vector,
            }
            for ids, tokens, vector in zip(
                batch["input_ids"].split(lengths), hidden.split(lengths), vectors, strict=True
            )
        ]

    budget, size = options.batch_tokens, options.batch_size
    for places, chunk in longest_first(texts):
        made = encoder.tokenize(chunk, options.prompt, options.task)
        for batch, rows in run_batches(compute, made, encoder.device, budget, size, on_batch=on_texts):
            for i, row in zip(batch.tolist(), rows, strict=True):
                found[places[i]] = row
    return found
