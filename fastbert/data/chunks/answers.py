"""Answers in texts, from chunks of their tokens: the best span of all chunks, or none (Devlin et al. 2018, 4.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch

from fastbert.data.chunks import TokenChunks
from fastbert.data.chunks.job import ChunkJob, Rows, on_host, tokens_at
from fastbert.packed_inputs import PackedInputs

MAX_ANSWER = 30  # tokens, as in BERT's own evaluation
# By what the spans of different chunks are compared: the sum of the logits of their ends, or their probability, which
# is of their own chunk alone.
AnswerAggregate = Literal["logits", "probabilities"]
Answers = dict[str, Any]  # columns


def answers_job(
    model: Any, chunks: TokenChunks, contexts: Sequence[str], *, no_answer: bool, aggregate: str = "logits"
) -> ChunkJob[Answers]:
    """Columns: the `answer` of each question, from all chunks of its text; its `score`, the probability of its begin
    times that of its end, in its chunk; and where it stands in the text: `start`, `end`. No answer: "", 0, 0.

    no_answer: there may be none. The first token of a chunk says so, and the answer is none if in each chunk that is
    likelier than the best span of all; with "logits" as in SQuAD 2.0 (BERT's own evaluation), with "probabilities" as
    transformers' pipeline has it.
    """

    def forward(batch: PackedInputs) -> torch.Tensor:
        output = model(batch)
        return torch.stack((output.start_logits, output.end_logits), -1)

    def reduce(packed: torch.Tensor, places: np.ndarray) -> np.ndarray:
        logits, spans = on_host(packed), chunks.spans[tokens_at(chunks, places)]
        cuts = np.cumsum(chunks.lengths[places])[:-1]
        pairs = zip(np.split(logits, cuts), np.split(spans, cuts), strict=True)
        return np.array([best_of_chunk(*pair) for pair in pairs])

    def finish(rows: Rows) -> Answers:
        table = np.asarray(rows)
        by, nothing_by = (SUM, NOTHING_SUM) if aggregate == "logits" else (LOG_PROB, NOTHING_LOG_PROB)
        best = np.array([of_text[table[of_text, by].argmax()] for of_text in chunks.of_texts])
        nothing = np.array([of_text[table[of_text, nothing_by].argmin()] for of_text in chunks.of_texts])
        there = table[best, by]
        is_silent = (table[nothing, nothing_by] > there) if no_answer else ~np.isfinite(there)
        scores = np.exp(np.where(is_silent, table[nothing, NOTHING_LOG_PROB], table[best, LOG_PROB]))
        spans = np.where(is_silent[:, None], 0, table[best, BEGIN : END + 1]).astype(np.int64)
        starts, ends = spans.T.tolist()
        answers = [text[a:b] for text, a, b in zip(contexts, starts, ends, strict=True)]
        return {"answer": answers, "score": scores.tolist(), "start": starts, "end": ends}

    return ChunkJob(chunks, forward, reduce, finish)


# Of a window: its best span's sum of logits, and logarithm of probability; its characters; the same two of no answer.
SUM, LOG_PROB, BEGIN, END, NOTHING_SUM, NOTHING_LOG_PROB = range(6)


def best_of_chunk(logits: np.ndarray, spans: np.ndarray) -> np.ndarray:
    """Of the logits of a chunk's tokens to begin and to end the answer, float32 (tokens, 2): the six numbers above."""
    start, stop = logits[:, 0], logits[:, 1]
    a, b, total = best_span(start, stop, spans[:, 0] >= 0)
    of_all = float(torch.from_numpy(logits).logsumexp(0).sum())
    nothing = float(start[0] + stop[0])
    return np.array([total, total - of_all, spans[a, 0], spans[b, 1], nothing, nothing - of_all])


def best_span(start: np.ndarray, stop: np.ndarray, in_text: np.ndarray) -> tuple[int, int, float]:
    """(first token, last token, the sum of their logits) of the best answer of at most MAX_ANSWER tokens."""
    a = np.where(in_text, start, -np.inf)
    padded = np.concatenate([np.where(in_text, stop, -np.inf), np.full(MAX_ANSWER - 1, -np.inf)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, MAX_ANSWER)  # (tokens, the ends that each may have)
    totals = a + windows.max(1)
    first = int(totals.argmax())
    return first, first + int(windows[first].argmax()), float(totals[first])
