"""Answers in texts, from windows of their tokens: the best span of all windows, or none (Devlin et al. 2018, 4.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch

from fastbert.data.windows import TokenWindows
from fastbert.data.windows.job import Rows, WindowJob, on_host, tokens_at
from fastbert.packed_inputs import PackedInputs

MAX_ANSWER = 30  # tokens, as in BERT's own evaluation
# By what the spans of different windows are compared: the sum of the logits of their ends, or their probability, which
# is of their own window alone.
AnswerAggregate = Literal["logits", "probabilities"]
Answers = dict[str, Any]  # columns


def answers_job(
    model: Any, made: TokenWindows, contexts: Sequence[str], *, no_answer: bool, aggregate: str = "logits"
) -> WindowJob[Answers]:
    """Columns: the `answer` of each question, from all windows of its text; its `score`, the probability of its begin
    times that of its end, in its window; and where it stands in the text: `start`, `end`. No answer: "", 0, 0.

    no_answer: there may be none. The first token of a window says so, and the answer is none if in each window that is
    likelier than the best span of all; with "logits" as in SQuAD 2.0 (BERT's own evaluation), with "probabilities" as
    transformers' pipeline has it.
    """

    def forward(batch: PackedInputs) -> torch.Tensor:
        output = model(batch)
        return torch.stack((output.start_logits, output.end_logits), -1)

    def reduce(packed: torch.Tensor, places: np.ndarray) -> np.ndarray:
        logits, spans = on_host(packed), made.spans[tokens_at(made, places)]
        cuts = np.cumsum(made.lengths[places])[:-1]
        windows = zip(np.split(logits, cuts), np.split(spans, cuts), strict=True)
        return np.array([best_of_window(*window) for window in windows])

    def finish(rows: Rows) -> Answers:
        found = np.asarray(rows)
        by, nothing_by = (SUM, NOTHING_SUM) if aggregate == "logits" else (LOG_PROB, NOTHING_LOG_PROB)
        best = np.array([windows[found[windows, by].argmax()] for windows in made.of_texts])
        nothing = np.array([windows[found[windows, nothing_by].argmin()] for windows in made.of_texts])
        there = found[best, by]
        is_silent = (found[nothing, nothing_by] > there) if no_answer else ~np.isfinite(there)
        scores = np.exp(np.where(is_silent, found[nothing, NOTHING_LOG_PROB], found[best, LOG_PROB]))
        place = np.where(is_silent[:, None], 0, found[best, BEGIN : END + 1]).astype(np.int64)
        starts, ends = place.T.tolist()
        answers = [text[a:b] for text, a, b in zip(contexts, starts, ends, strict=True)]
        return {"answer": answers, "score": scores.tolist(), "start": starts, "end": ends}

    return WindowJob(made, forward, reduce, finish)


# Of a window: its best span's sum of logits, and logarithm of probability; its characters; the same two of no answer.
SUM, LOG_PROB, BEGIN, END, NOTHING_SUM, NOTHING_LOG_PROB = range(6)


def best_of_window(logits: np.ndarray, spans: np.ndarray) -> np.ndarray:
    """Of the logits of a window's tokens to begin and to end the answer, float32 (tokens, 2): the six numbers above."""
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
