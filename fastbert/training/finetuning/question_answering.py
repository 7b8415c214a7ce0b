"""Extractive question answering: where in a text the answer begins and ends (Devlin et al. 2018, section 4.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from scipy.special import logsumexp
from tokenizers import Tokenizer

from fastbert.data.tokenized import CHUNK_INPUTS, run_batches
from fastbert.data.windows import Cutter, TokenWindows
from fastbert.errors import ConfigError, InputError
from fastbert.models.auto import AutoModelForQuestionAnswering
from fastbert.packed_inputs import PackedInputs
from fastbert.training.finetuning.adapters import add_adapters
from fastbert.training.finetuning.base_models import find_base, load_base, longest_of, say_notes
from fastbert.training.finetuning.head_task import HeadTask, LabelledSequences
from fastbert.training.finetuning.inputs.squad import Questions, load_questions, squad_metrics
from fastbert.training.finetuning.usage import Usage
from fastbert.training.options import FinetuneOptions

MAX_ANSWER = 30  # tokens, as in BERT's own evaluation


def make_task(options: FinetuneOptions) -> QuestionAnswering:
    """Raises ConfigError, InputError, CheckpointError."""
    folder = find_base(options)
    if not options.train:
        raise InputError("train is missing: the file to learn from")
    train = _with_places(load_questions(options.train, "train"))
    held_out = load_questions(options.eval, "validation") if options.eval else None
    model, tokenizer = load_base(folder, AutoModelForQuestionAnswering, options, {"num_labels": 2})
    no_answer = not all(train.answers)
    usage = Usage("qa", ("question", "context"), options.max_length, options.doc_stride or None, no_answer)
    finder = Finder(model, tokenizer, usage)
    examples = finder.examples(train)
    return QuestionAnswering(
        model, tokenizer, examples, usage, add_adapters(model, options), finder=finder, held_out=held_out
    )


def _with_places(data: Questions) -> Questions:
    """Without the answers that are not where their data say, and without questions of which no answer is left."""
    kept = Questions([], [], [], [], data.name)
    for key, question, context, answers in zip(data.ids, data.questions, data.contexts, data.answers, strict=True):
        right = [(text, at) for text, at in answers if text and at >= 0 and context[at : at + len(text)] == text]
        if right or not answers:
            kept.ids.append(key)
            kept.questions.append(question)
            kept.contexts.append(context)
            kept.answers.append(right)
    if left_out := len(data.ids) - len(kept.ids):
        if not kept.ids:
            raise InputError(f"{data.name}: no answer stands where its answer_start says, for example {data.ids[0]}'s")
        say_notes(
            f"{left_out:,} of {len(data.ids):,} questions of {data.name} are left out: their answers do not stand where"
            " answer_start says"
        )
    return kept


class QuestionAnswering(HeadTask):
    """The first and the last token of the answer; the first token of the window where it has none."""

    pipeline = "question-answering"

    def __init__(self, *parts: Any, finder: Finder, held_out: Questions | None):
        super().__init__(*parts)
        self.finder, self.held_out = finder, held_out
        self.metric = None if held_out is None else "f1"
        self._eval = None if held_out is None else finder.tokenize(held_out.questions, held_out.contexts)

    def counts(self, batch: PackedInputs) -> list[int]:
        return [batch["batch"].batch_size]

    def loss(self, model: Any, batch: PackedInputs, totals: list[float]) -> torch.Tensor:
        return model(**batch).loss * (batch["batch"].batch_size / totals[0])

    def evaluate(self, model: Any) -> dict[str, float]:
        assert self.held_out is not None and self._eval is not None
        found = self.finder.best(self.whole(model), self._eval, self.held_out.contexts)
        return squad_metrics(found["answer"], [[text for text, _ in texts] for texts in self.held_out.answers])

    def show(self, batch: PackedInputs) -> list[str]:
        ids, ends = batch["input_ids"].tolist(), batch["batch"].cu_seqlens.tolist()
        starts, stops = batch["start_positions"].tolist(), batch["end_positions"].tolist()
        answers = [
            self.tokenizer.decode(ids[begin + a : begin + b + 1]) if b else "no answer in this window"
            for begin, a, b in zip(ends, starts, stops, strict=False)
        ]
        return [f"{text} -> {answer}" for text, answer in zip(self.decoded(batch), answers, strict=True)]


class Finder:
    """From questions and texts to answers. A text that is too long is cut into windows, which overlap."""

    is_pair = True

    def __init__(self, model: Any, tokenizer: Tokenizer, usage: Usage):
        self.no_answer = usage.no_answer
        length = usage.max_length or min(384, longest_of(model))
        both = length - tokenizer.num_special_tokens_to_add(True)  # for the question and the text
        room = both // 2  # for the text, whatever the question
        self.question_limit = both - room
        overlap = min(length // 4, room - 1) if usage.stride is None else usage.stride
        if not 0 <= overlap < room:
            raise ConfigError(
                f"doc_stride is {overlap}; windows of {length} tokens, of which a question may take half, may overlap"
                f" by 0 to {room - 1}"
            )
        with_types = model.base_model.table_sizes().has_types
        self.cutter = Cutter(tokenizer, length, overlap, is_pair=True, with_types=with_types)
        if not tokenizer.encode("a").special_tokens_mask[0]:
            raise ConfigError("this model's tokenizer puts no token in front, which would say that there is no answer")

    def tokenize(self, questions: Sequence[str], contexts: Sequence[str]) -> TokenWindows:
        before = [ids[: self.question_limit] for ids, _ in self.cutter.read(questions)]
        return self.cutter.cut(contexts, before)

    def examples(self, data: Questions) -> LabelledSequences:
        """Windows with the places of the first answer, or of their first token, if the answer is not in them."""
        made = self.tokenize(data.questions, data.contexts)
        places = [answers[0] if answers else ("", -1) for answers in data.answers]
        begin = np.array([at for _, at in places], np.int64)[made.source]
        end = np.array([at + len(text) for text, at in places], np.int64)[made.source]
        spans, of_token = made.spans, made.of_token
        in_text = spans[:, 0] >= 0
        number = np.arange(len(spans)) - made.offsets[of_token]
        first = np.full(len(made), -1, np.int64)  # the last token that begins at the answer's begin, or before
        np.maximum.at(first, of_token, np.where(in_text & (spans[:, 0] <= begin[of_token]), number, -1))
        far = len(spans)
        last = np.full(len(made), far, np.int64)  # the first token that ends at its end, or behind
        np.minimum.at(last, of_token, np.where(in_text & (spans[:, 1] >= end[of_token]), number, far))
        found = (begin >= 0) & (first >= 0) & (last < far) & (first <= last)
        windows = len(made) - len(data.ids)
        if windows:
            say_notes(f"texts of {data.name} that are too long go on in {windows:,} more windows")
        return LabelledSequences(
            made, start_positions=np.where(found, first, 0), end_positions=np.where(found, last, 0)
        )

    def best(
        self,
        model: Any,
        made: TokenWindows,
        contexts: Sequence[str],
        batch_tokens: int | None = None,
        on_batch: Callable[[int], Any] = lambda n: None,
    ) -> dict[str, Any]:
        """Columns: the `answer` of each question, from all its windows, its `score` (the probability of its begin times
        that of its end, in its window), and where it stands in the text: `start`, `end`. No answer: "", 0, 0.
        """
        count, offsets, spans = len(contexts), made.offsets, made.spans
        best = np.full(count, -np.inf)
        score, place = np.zeros(count), np.zeros((count, 2), np.int64)
        nothing, nothing_score = np.full(count, np.inf), np.zeros(count)
        batches = run_batches(model, made, model.device, batch_tokens, share=CHUNK_INPUTS, on_batch=on_batch)
        for indices, output in batches:
            starts, stops = (output[name].float().cpu().numpy() for name in ("start_logits", "end_logits"))
            sizes = offsets[indices + 1] - offsets[indices]
            at = np.cumsum(sizes) - sizes
            for i, begin, size in zip(indices.tolist(), at.tolist(), sizes.tolist(), strict=True):
                start, stop = starts[begin : begin + size], stops[begin : begin + size]
                span, question = spans[offsets[i] : offsets[i] + size], made.source[i]
                total = logsumexp(start) + logsumexp(stop)
                a, b, sum_of_both = best_span(start, stop, span[:, 0] >= 0)
                if sum_of_both > best[question]:
                    best[question], score[question] = sum_of_both, np.exp(sum_of_both - total)
                    place[question] = span[a, 0], span[b, 1]
                if start[0] + stop[0] < nothing[question]:
                    nothing[question] = start[0] + stop[0]
                    nothing_score[question] = np.exp(nothing[question] - total)
        is_silent = (nothing > best) if self.no_answer else ~np.isfinite(best)
        place[is_silent], score[is_silent] = 0, nothing_score[is_silent]
        answers = [text[a:b] for text, (a, b) in zip(contexts, place.tolist(), strict=True)]
        return {"answer": answers, "score": score, "start": place[:, 0].tolist(), "end": place[:, 1].tolist()}

    def answers(self, model: Any, texts: Mapping[str, Sequence[str]], **run: Any) -> dict[str, Any]:
        questions, contexts = texts.values()
        made = self.tokenize(questions, contexts)
        return {"question": questions, **self.best(model, made, contexts, **run)}


def best_span(start: np.ndarray, stop: np.ndarray, in_text: np.ndarray) -> tuple[int, int, float]:
    """(first token, last token, the sum of their logits) of the best answer of at most MAX_ANSWER tokens."""
    a = np.where(in_text, start, -np.inf)
    padded = np.concatenate([np.where(in_text, stop, -np.inf), np.full(MAX_ANSWER - 1, -np.inf)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, MAX_ANSWER)  # (tokens, the ends that each may have)
    totals = a + windows.max(1)
    first = int(totals.argmax())
    return first, first + int(windows[first].argmax()), float(totals[first])
