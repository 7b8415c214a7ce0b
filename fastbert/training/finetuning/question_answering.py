"""Extractive question answering: where in a text the answer begins and ends (Devlin et al. 2018, section 4.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from fastbert.data.sentence_folder import FolderSettings
from fastbert.data.sources import delimiter_for
from fastbert.data.tokenized import CHUNK_INPUTS
from fastbert.data.usage import Usage
from fastbert.data.windows import TokenWindows
from fastbert.data.windows.answers import answers_job
from fastbert.errors import ConfigError, InputError
from fastbert.models.auto import AutoModelForQuestionAnswering
from fastbert.packed_inputs import PackedInputs
from fastbert.sentences.spans.question_answerer import QuestionAnswerer
from fastbert.training.finetuning.adapters import add_adapters
from fastbert.training.finetuning.base_models import find_base, load_base, say_notes, settings_of
from fastbert.training.finetuning.head_task import HeadTask, LabelledSequences, note_of_windows
from fastbert.training.finetuning.inputs.squad import Questions, load_questions, squad_metrics
from fastbert.training.options import FinetuneOptions
from fastbert.training.task import Totals


def make_task(options: FinetuneOptions) -> QuestionAnswering:
    """Raises ConfigError, InputError, CheckpointError."""
    folder = find_base(options)
    if not options.train:
        raise InputError("train is missing: the file to learn from")
    train = _with_places(_load(options.train, options, "train"))
    held_out = _load(options.eval, options, "validation") if options.eval else None
    model, tokenizer = load_base(folder, AutoModelForQuestionAnswering, options, {"num_labels": 2})
    no_answer = not all(train.answers)
    usage = Usage("qa", ("question", "context"), options.max_length, options.doc_stride or None, no_answer)
    finder = finder_of(model, tokenizer, usage, settings_of(folder))
    made = finder.cut(list(zip(train.questions, train.contexts, strict=True)))
    return QuestionAnswering(
        model,
        tokenizer,
        examples_of(made, train),
        usage,
        add_adapters(model, options),
        finder=finder,
        held_out=held_out,
    )


def _load(names: Sequence[str], options: FinetuneOptions, split: str) -> Questions:
    sign = delimiter_for(names, (*options.train, *options.eval), options.delimiter)
    return load_questions(names, split, delimiter=sign)


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

    def __init__(self, *parts: Any, finder: QuestionAnswerer, held_out: Questions | None):
        super().__init__(*parts)
        self.finder, self.held_out = finder, held_out
        self.metric = None if held_out is None else "f1"
        self._eval = None
        if held_out is not None:
            self._eval = finder.cut(list(zip(held_out.questions, held_out.contexts, strict=True)))

    @staticmethod
    def counts(batch: PackedInputs) -> list[int]:
        return [int(batch["batch"].has_tokens().sum())]

    def loss(self, model: Any, batch: PackedInputs, totals: Totals) -> torch.Tensor:
        return model(**batch).loss * (batch["batch"].has_tokens().sum() / totals[0])

    def evaluate(self, model: Any) -> dict[str, float]:
        assert self.held_out is not None and self._eval is not None
        judged = self.whole(model)
        job = answers_job(judged, self._eval, self.held_out.contexts, no_answer=self.usage.no_answer)
        found = job.run(judged.device, share=CHUNK_INPUTS)
        return squad_metrics(found["answer"], [[text for text, _ in texts] for texts in self.held_out.answers])

    def show(self, batch: PackedInputs) -> list[str]:
        ids, ends = batch["input_ids"].tolist(), batch["batch"].cu_seqlens.tolist()
        starts, stops = batch["start_positions"].tolist(), batch["end_positions"].tolist()
        answers = [
            self.tokenizer.decode(ids[begin + a : begin + b + 1]) if b else "no answer in this window"
            for begin, a, b in zip(ends, starts, stops, strict=False)
        ]
        return [f"{text} -> {answer}" for text, answer in zip(self.decoded(batch), answers, strict=True)]


def finder_of(model: Any, tokenizer: Tokenizer, usage: Usage, settings: FolderSettings) -> QuestionAnswerer:
    """Raises ConfigError: windows would overlap by more than they have room for, whatever the question."""
    finder = QuestionAnswerer.of_parts(model, tokenizer, QuestionAnswerer.length_of(model, usage), settings, usage)
    assert finder.windows is not None
    length, overlap = finder.windows.tokens(finder.max_seq_length)
    room = finder.room_of(length)
    if not 0 <= overlap < room:
        raise ConfigError(
            f"doc_stride is {overlap}; chunks of {length} tokens, of which a question may take half, may overlap"
            f" by 0 to {room - 1}"
        )
    return finder


def examples_of(made: TokenWindows, data: Questions) -> LabelledSequences:
    """Windows with the places of the first answer, or of their first token, if not all of the answer is in them. Its
    tokens are those that have any of its characters.
    """
    places = [answers[0] if answers else ("", -1) for answers in data.answers]
    begin = np.array([at for _, at in places], np.int64)[made.source]
    end = np.array([at + len(text) for text, at in places], np.int64)[made.source]
    spans, of_token = made.spans, made.of_token
    tokens = np.flatnonzero((spans[:, 0] >= 0) & (spans[:, 0] < end[of_token]) & (spans[:, 1] > begin[of_token]))
    window, place = of_token[tokens], made.positions[tokens]
    first = np.full(len(data.ids), len(spans))
    last = np.full(len(data.ids), -1)
    np.minimum.at(first, made.source[window], place)
    np.maximum.at(last, made.source[window], place)
    found = np.full((2, len(made)), -1)
    for row, ends in zip(found, (first, last), strict=True):
        is_end = place == ends[made.source[window]]
        row[window[is_end]] = tokens[is_end] - made.offsets[window[is_end]]
    starts, stops = np.where((found >= 0).all(0), found, 0)
    say_notes(note_of_windows(len(made) - len(data.ids), data.name))
    return LabelledSequences(made, start_positions=starts, end_positions=stops)
