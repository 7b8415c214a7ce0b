"""QuestionAnswerer finds the answers of questions in texts (Devlin et al. 2018, section 4.2)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from fastbert.data.chunks import TokenChunks, Windows
from fastbert.data.chunks.answers import AnswerAggregate, Answers, answers_job
from fastbert.data.chunks.job import ChunkJob
from fastbert.data.tokenized import CHUNK_INPUTS
from fastbert.data.usage import Usage
from fastbert.errors import ConfigError, InputError
from fastbert.models.auto import AutoModelForQuestionAnswering
from fastbert.models.base import PreTrainedModel
from fastbert.models.classifiers import ForQuestionAnswering
from fastbert.sentences.batches import in_chunks, progress_bar
from fastbert.sentences.loading import LoadArguments
from fastbert.sentences.scorer import check_pairs
from fastbert.sentences.spans.model import SpanModel
from fastbert.sentences.text_model import InferenceOptions, position_limit

if TYPE_CHECKING:
    from typing_extensions import Unpack

MAX_LENGTH = 384  # of chunks, as in BERT's own evaluation


class QuestionAnswerer(SpanModel):
    """What transformers' pipeline for question answering is for, over texts of any length, on packed batches."""

    model: ForQuestionAnswering
    task, what = "qa", "question answerer"
    is_pair = True

    def __init__(self, model_name_or_path: str | os.PathLike[str], **options: Unpack[LoadArguments]):
        """From the folder or hub id of a model for question answering; the rest as for a Reranker.

        A folder that `fastbert finetune` made has the length of its training's chunks, their overlap, and whether
        there were questions without an answer. Others have chunks of 384 tokens, and always an answer.
        """
        self._load(AutoModelForQuestionAnswering, model_name_or_path, options)

    def own_windows(self) -> Windows:
        if not self.tokenizer.encode("a").special_tokens_mask[0]:
            raise ConfigError(
                "this model's tokenizer puts no special token first, as [CLS]; question answering needs one, to which a"
                " question without an answer points"
            )
        if self.usage.stride is not None:
            return super().own_windows()
        return Windows(overlap=min(self.max_seq_length // 4, max(0, self.room_of(self.max_seq_length) - 1)))

    @staticmethod
    def length_of(model: PreTrainedModel, usage: Usage) -> int:
        return usage.max_length or min(MAX_LENGTH, position_limit(model))

    def room_of(self, length: int) -> int:
        """Tokens of a chunk that are for the text whatever the question: half of them. The end of a longer question is
        left out.
        """
        return (length - self.tokenizer.num_special_tokens_to_add(True)) // 2

    def predict(
        self,
        inputs: Sequence[str] | Iterable[Sequence[str]],
        show_progress_bar: bool | None = None,
        *,
        batch_tokens: int | None = None,
        windows: Windows | None = None,
        aggregate: AnswerAggregate = "logits",
        no_answer: bool | None = None,
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """The answer of a question in a text, or of each of a list of such pairs: dicts with answer, score, start and
        end (characters of the text). No answer: "", at 0.

        Args:
            inputs: a pair of a question and a text, or many. A question has at most half of a chunk.
            show_progress_bar, batch_tokens: as of a Reranker.
            windows: how texts are cut that are longer than the model takes beside the question. None: `self.windows`.
                A text of which only the begin is to be read has Chunks(pool="first").
            aggregate: by what the answers of a text's chunks are compared: "logits", the sum of those of its ends, as
                in BERT's own evaluation: a chunk in which the answer is not has lower ones; or "probabilities", as
                in transformers' pipeline, of which every chunk has the same sum (Clark & Gardner 2018, section 3).
            no_answer: whether there may be none: where each chunk says so with more than the best answer has. None:
                as the folder was trained.

        Raises:
            TypeError: an input is no pair of texts. InputError: a text is not valid Unicode, or an option is out of
            bounds.
        """
        pairs, one = check_pairs(inputs)
        budget = InferenceOptions(batch_tokens=batch_tokens).batch_tokens
        answers: list[dict[str, Any]] = []
        with progress_bar(None, show_progress_bar, unit=" tokens", unit_scale=True, desc="answering") as bar:
            for chunk in in_chunks(pairs, CHUNK_INPUTS):
                job = self.answers_job(chunk, windows, aggregate, no_answer)
                columns = job.run(self.device, budget, on_tokens=bar.update)
                answers += [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        return answers[0] if one else answers

    def answers_job(
        self,
        pairs: Sequence[tuple[str, str]],
        windows: Windows | None = None,
        aggregate: AnswerAggregate = "logits",
        no_answer: bool | None = None,
    ) -> ChunkJob[Answers]:
        """What gives the answers of checked pairs, in columns. Raises InputError."""
        if aggregate not in get_args(AnswerAggregate):
            raise InputError(f"unknown aggregate {aggregate!r}; there are {', '.join(get_args(AnswerAggregate))}")
        may_be_none = self.usage.no_answer if no_answer is None else no_answer
        contexts = [context for _, context in pairs]
        return answers_job(self.model, self.cut(pairs, windows), contexts, no_answer=may_be_none, aggregate=aggregate)

    def cut(self, pairs: Sequence[tuple[str, str]], windows: Windows | None = None) -> TokenChunks:
        """The chunks of texts, each with its question before it. Raises InputError."""
        cutter = self.cutter(windows)
        limit = cutter.length - self.tokenizer.num_special_tokens_to_add(True) - self.room_of(cutter.length)
        questions = list(dict.fromkeys(question for question, _ in pairs))
        ids_of = dict(zip(questions, (ids[:limit] for ids, _ in cutter.read(questions)), strict=True))
        before: list[np.ndarray | None] = [ids_of[question] for question, _ in pairs]
        return cutter.cut([context for _, context in pairs], before)
