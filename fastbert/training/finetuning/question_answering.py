"""Extractive question answering: where in a text the answer begins and ends (Devlin et al. 2018, section 4.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from fastbert.data.chunks import TokenChunks
from fastbert.data.chunks.answers import answers_job
from fastbert.data.sentence_folder import FolderSettings
from fastbert.data.sources import delimiter_for
from fastbert.data.tokenized import CHUNK_INPUTS
from fastbert.data.usage import Usage
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
    chunks = finder.cut(list(zip(train.questions, train.contexts, strict=True)))
    return QuestionAnswering(
        model,
        tokenizer,
        examples_of(chunks, train),
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
    """The first and the last token of the answer; the first token of the chunk where it has none."""

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
        predicted = job.run(judged.device, share=CHUNK_INPUTS)
        return squad_metrics(predicted["answer"], [[text for text, _ in texts] for texts in self.held_out.answers])

    def show(self, batch: PackedInputs) -> list[str]:
        ids, ends = batch["input_ids"].tolist(), batch["batch"].cu_seqlens.tolist()
        starts, stops = batch["start_positions"].tolist(), batch["end_positions"].tolist()
        answers = [
            self.tokenizer.decode(ids[begin + a : begin + b + 1]) if b else "no answer in this window"
            for begin, a, b in zip(ends, starts, stops, strict=False)
        ]
        return [f"{text} -> {answer}" for text, answer in zip(self.decoded(batch), answers, strict=True)]


def finder_of(model: Any, tokenizer: Tokenizer, usage: Usage, settings: FolderSettings) -> QuestionAnswerer:
    """Raises ConfigError: chunks would overlap by more than they have room for, whatever the question."""
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


def examples_of(chunks: TokenChunks, data: Questions) -> LabelledSequences:
    """Chunks with the places of the first answer, or of their first token, if not all of the answer is in them. Its
    tokens are those that have any of its characters.
    """
    first_answers = [answers[0] if answers else ("", -1) for answers in data.answers]
    begin = np.array([at for _, at in first_answers], np.int64)[chunks.source]
    end = np.array([at + len(text) for text, at in first_answers], np.int64)[chunks.source]
    spans, of_token = chunks.spans, chunks.of_token
    tokens = np.flatnonzero((spans[:, 0] >= 0) & (spans[:, 0] < end[of_token]) & (spans[:, 1] > begin[of_token]))
    chunk, position = of_token[tokens], chunks.positions[tokens]
    first = np.full(len(data.ids), len(spans))
    last = np.full(len(data.ids), -1)
    np.minimum.at(first, chunks.source[chunk], position)
    np.maximum.at(last, chunks.source[chunk], position)
    bounds = np.full((2, len(chunks)), -1)
    for row, ends in zip(bounds, (first, last), strict=True):
        is_end = position == ends[chunks.source[chunk]]
        row[chunk[is_end]] = tokens[is_end] - chunks.offsets[chunk[is_end]]
    starts, stops = np.where((bounds >= 0).all(0), bounds, 0)
    say_notes(note_of_windows(len(chunks) - len(data.ids), data.name))
    return LabelledSequences(chunks, start_positions=starts, end_positions=stops)
