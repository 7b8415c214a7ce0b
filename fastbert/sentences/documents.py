"""Vectors of parts of texts: of the windows of one that is longer than the model, of its chunks, of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastbert.data.chunks import CORE, OUTSIDE, OVERLAP, Cutter, TokenChunks, Windows
from fastbert.data.chunks.job import ChunkJob, Rows, chosen, on_host, tokens_at
from fastbert.data.tokenized import CHUNK_TEXTS, Text, run_batches
from fastbert.errors import InputError
from fastbert.packed_inputs import PackedInputs
from fastbert.sentences.batches import check_listed, check_texts, in_chunks, longest_first
from fastbert.sentences.pooling import pool

if TYPE_CHECKING:
    from fastbert.sentences.encoder import SentenceEncoder
    from fastbert.sentences.text_model import InferenceOptions, TextModel

CHUNKS = Windows(overlap=0, at="sentences")  # as which texts are cut into chunks
SECTION = 1024  # chunks that share batches


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

    @classmethod
    def none(cls, rows: torch.Tensor) -> Chunks:
        """No chunk; of vectors as `rows`, (0, dim)."""
        return cls(rows.cpu().numpy(), *np.empty((3, 0), np.int64))

    @classmethod
    def joined(cls, parts: Sequence[Chunks]) -> Chunks:
        """All of one or more in one."""
        return cls(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls)))


def cutter_of(model: TextModel, windows: Windows, task: str | None = None) -> Cutter:
    """Raises InputError: windows are longer than the model takes, have no room, or overlap by too much."""
    tokenizer = model.tokenizer_of(task)
    longest = (tokenizer.truncation or {}).get("max_length", model.max_seq_length)  # the caller may have turned it off
    length, overlap = windows.tokens(longest)
    is_first = windows.pool == "first"
    limit = 1 if is_first else windows.limit
    return Cutter(tokenizer, length, overlap, with_types=model.has_types, limit=limit, quietly=is_first, at=windows.at)


def cut_inputs(model: TextModel, inputs: Sequence[Text], windows: Windows, prompt: str = "") -> TokenChunks:
    """The windows of texts, and of pairs of texts, the second of which is cut: the first is whole in each window."""
    cutter = cutter_of(model, windows)
    firsts = list(dict.fromkeys(prompt + one[0] for one in inputs if not isinstance(one, str)))
    ids_of = dict(zip(firsts, (ids for ids, _ in cutter.read(firsts)), strict=True))
    before = [None if isinstance(one, str) else ids_of[prompt + one[0]] for one in inputs]
    return cutter.cut([one if isinstance(one, str) else one[1] for one in inputs], before, prompt)


def vectors_job(encoder: SentenceEncoder, texts: Sequence[str], options: InferenceOptions) -> ChunkJob[torch.Tensor]:
    """The vectors of texts, of those of their windows, in which the overlap does not count: float32 (texts, dim)."""
    windows = options.windows
    assert windows is not None
    if windows.pool == "top3":
        raise InputError("pool of windows is 'top3', which is for scores; of vectors there are mean, max, first")
    chunks = cutter_of(encoder, windows, options.task).cut(texts, prompt=options.prompt)

    def finish(rows: Rows) -> torch.Tensor:
        pooled = windows.combined(np.asarray(rows), chunks).astype(np.float32)
        return encoder.finish(torch.from_numpy(pooled).to(encoder.device), options)

    return _pooling_job(encoder, chunks, chunks.parts != OVERLAP, options, finish)


def _pooling_job(
    encoder: SentenceEncoder,
    chunks: TokenChunks,
    counts: np.ndarray,
    options: InferenceOptions,
    finish: Callable[[Rows], Any],
) -> ChunkJob[Any]:
    """What the model's pooling makes of the tokens of each window that `counts` says, (pooled_width,)."""
    sizes = np.bincount(chunks.of_token[counts], minlength=len(chunks))

    def reduce(hidden: torch.Tensor, places: np.ndarray) -> np.ndarray:
        offsets = torch.from_numpy(np.append(0, np.cumsum(sizes[places])).astype(np.int32)).to(hidden.device)
        return on_host(encoder.pooled(chosen(hidden, counts[tokens_at(chunks, places)]), offsets, options))

    return ChunkJob(chunks, encoder.model.last_hidden_state, reduce, finish)


def chunks_job(
    encoder: SentenceEncoder, texts: Sequence[str], options: InferenceOptions, late: bool
) -> ChunkJob[Chunks]:
    """The chunks of texts, `options.windows`, and their vectors. A text without a token has none.

    Raises InputError: windows have a pool; `late`, of a model that does not pool by the mean.
    """
    chunks = _cut_chunks(encoder, texts, options, late)
    return _late_job(encoder, chunks, texts, options) if late else _plain_job(encoder, chunks, options)


def chunk_stream(
    encoder: SentenceEncoder,
    texts: Iterable[str],
    options: InferenceOptions,
    late: bool,
    on_tokens: Callable[[int], Any] = lambda tokens: None,
) -> Iterator[Chunks]:
    """The chunks of texts, some at a time, as soon as they are there: of a long text SECTION, late ones all at once."""
    check_listed("texts", texts, "a list of strings, or what gives them one by one")
    before = 0
    for group in in_chunks(texts, CHUNK_TEXTS):
        chunks = _cut_chunks(encoder, check_texts(group), options, late)
        if late:
            jobs = iter([_late_job(encoder, chunks, group, options)])
        else:
            parts = (chunks.part(i, min(i + SECTION, len(chunks))) for i in range(0, len(chunks), SECTION))
            jobs = (_plain_job(encoder, part, options) for part in parts)
        for job in jobs:
            result = job.run(encoder.device, options.batch_tokens, on_tokens=on_tokens)
            yield replace(result, documents=result.documents + before)
        before += len(group)


def _cut_chunks(encoder: SentenceEncoder, texts: Sequence[str], options: InferenceOptions, late: bool) -> TokenChunks:
    assert options.windows is not None
    if options.windows.pool is not None:
        raise InputError(f"pool of windows is {options.windows.pool!r}, and chunks have a vector each: leave it out")
    if late and encoder.recipe.pooling != ("mean",):
        modes = "+".join(encoder.recipe.pooling)
        raise InputError(f"late chunking takes the mean of a chunk's tokens, and this model pools by {modes}")
    return cutter_of(encoder, options.windows, options.task).cut(texts, prompt=options.prompt)


def _finished(encoder: SentenceEncoder, chunks: TokenChunks, rows: np.ndarray, options: InferenceOptions) -> Chunks:
    """Of what is pooled of each window, float32 (windows, pooled_width), the chunks of those that have a token."""
    places = chunks.characters
    there = np.flatnonzero(places[:, 0] >= 0)
    vectors = encoder.finish(torch.from_numpy(rows[there]).to(encoder.device), options).cpu().numpy()
    return Chunks(vectors, chunks.source[there], *places[there].T)


def _plain_job(encoder: SentenceEncoder, chunks: TokenChunks, options: InferenceOptions) -> ChunkJob[Chunks]:
    everything = np.ones(len(chunks.ids), bool)
    return _pooling_job(
        encoder, chunks, everything, options, lambda rows: _finished(encoder, chunks, np.asarray(rows), options)
    )


def _late_job(
    encoder: SentenceEncoder,
    chunks: TokenChunks,
    texts: Sequence[str],
    options: InferenceOptions,
) -> ChunkJob[Chunks]:
    """The mean of each chunk's tokens as the whole text makes them, as far as the model goes, and windows of that
    length beyond, in which each token is taken from the core (Guenther et al. 2024, "Late chunking"): float32
    (chunks, hidden_size).
    """
    contexts = cutter_of(encoder, Windows(), options.task).cut(texts, prompt=options.prompt)
    begins, ends = _numbered(contexts, contexts.parts == CORE)
    first, last = _numbered(chunks, chunks.parts != OUTSIDE)
    low, high = np.searchsorted(last, begins, "right"), np.searchsorted(first, ends)  # chunks that a core has a part of

    def inside(i: int) -> np.ndarray:
        """Where the parts of chunks begin and end in a window's core: int64 (parts, 2)."""
        here = slice(low[i], high[i])
        return np.stack([np.maximum(begins[i], first[here]), np.minimum(ends[i], last[here])], 1) - begins[i]

    def reduce(hidden: torch.Tensor, places: np.ndarray) -> list[np.ndarray]:
        core = np.flatnonzero(contexts.parts[tokens_at(contexts, places)] == CORE)
        at, rows, sizes, counts = 0, [], [0], []
        for i in places.tolist():
            parts = inside(i)
            rows += [core[at + a : at + b] for a, b in parts]
            sizes += (parts[:, 1] - parts[:, 0]).tolist()
            counts.append(len(parts))
            at += ends[i] - begins[i]
        if not sum(counts):  # texts without a token
            return [np.zeros((0, hidden.shape[1]), np.float32)] * len(places)
        offsets = torch.from_numpy(np.cumsum(sizes).astype(np.int32)).to(hidden.device)
        tokens = hidden[torch.from_numpy(np.concatenate(rows)).to(hidden.device)]
        means = on_host(pool(tokens, offsets, encoder.recipe.pooling))
        return np.split(means, np.cumsum(counts)[:-1])

    def joined(rows: Rows) -> Chunks:
        sums = np.zeros((len(chunks), encoder.model.config.hidden_size))
        for i, means in enumerate(rows):
            parts = inside(i)
            sums[low[i] : high[i]] += means * (parts[:, 1] - parts[:, 0]).astype(np.float64)[:, None]
        means = (sums / np.maximum(last - first, 1)[:, None]).astype(np.float32)
        return _finished(encoder, chunks, means, options)

    return ChunkJob(contexts, encoder.model.last_hidden_state, reduce, joined)


def _numbered(chunks: TokenChunks, which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each window the numbers, among the tokens of all texts, of the first and behind the last of its tokens that
    `which` chooses, which stand side by side.
    """
    in_text = chunks.parts != OUTSIDE
    of_token = chunks.of_token
    counts = np.bincount(of_token[in_text], minlength=len(chunks))
    size_of_text = np.zeros(int(chunks.source[-1]) + 2, np.int64)
    np.maximum.at(size_of_text, chunks.source + 1, chunks.begins + counts)
    before = np.cumsum(size_of_text)[chunks.source] + chunks.begins
    position = np.cumsum(in_text) - 1  # of a token among those of texts
    first_of_chunk = np.cumsum(counts) - counts
    chosen = np.flatnonzero(which)
    sizes = np.bincount(of_token[chosen], minlength=len(chunks))
    skipped = np.zeros(len(chunks), np.int64)
    heads = chosen[np.diff(of_token[chosen], prepend=-1) > 0]
    skipped[of_token[heads]] = position[heads] - first_of_chunk[of_token[heads]]
    return before + skipped, before + skipped + sizes


def token_rows(
    encoder: SentenceEncoder, texts: Sequence[str], options: InferenceOptions, on_texts: Callable[[int], Any]
) -> list[dict[str, torch.Tensor]]:
    """For each of the texts what `encode` gives for `output_value=None`."""
    results: list[dict[str, torch.Tensor]] = [{}] * len(texts)

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
        tokenized = encoder.tokenize(chunk, options.prompt, options.task)
        for batch, rows in run_batches(compute, tokenized, encoder.device, budget, size, on_batch=on_texts):
            for i, row in zip(batch.tolist(), rows, strict=True):
                results[places[i]] = row
    return results
