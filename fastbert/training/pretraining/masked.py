"""Masked language modelling, alone or with pairs of windows: next sentence (BERT) or sentence order (ALBERT)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn

from fastbert.data.collator import PackingCollator
from fastbert.data.masking import IGNORED, Masking
from fastbert.data.pretraining.chunks import CorpusChunks, CorpusPairs, Pairs
from fastbert.data.pretraining.corpus import Corpus
from fastbert.data.vocabulary import Vocabulary
from fastbert.packed_inputs import PackedInputs
from fastbert.training.pretraining.evaluation import held_out_batches, masked_lm_metrics
from fastbert.training.task import Phase, Task, Totals, labels_in

EVALUATION_SEED = 0  # of the masks and cuts of held-out text: the same in every evaluation of every run
EVALUATION_SHARE = 0.15


class MaskedLM(Task):
    """Masked language modelling of whole chunks, as RoBERTa does it (Liu et al. 2019): other masks in every epoch.

    corpus: what is learnt from; held_out: what is evaluated on, in chunks of `held_out_length` tokens. unit: what is
    masked as a whole. with_types: whether examples have token types.
    """

    pipeline: str | None = "fill-mask"

    def __init__(
        self,
        model: nn.Module,
        corpus: Corpus,
        tokenizer: Tokenizer,
        *,
        unit: Any,
        seed: int,
        with_types: bool = False,
        held_out: Corpus | None = None,
        held_out_length: int = 128,
        vocabulary: Vocabulary | None = None,
    ):
        self.model, self.corpus, self.tokenizer = model, corpus, tokenizer
        self.unit, self.seed, self.with_types = unit, seed, with_types
        self.held_out, self.held_out_length = held_out, held_out_length
        self.vocabulary = Vocabulary(tokenizer) if vocabulary is None else vocabulary
        self.metric = None if held_out is None else "loss"
        self.more_is_better = False
        self._held_out: list[PackedInputs] | None = None

    def collate(self, phase: Phase) -> Callable[[list[Any]], PackedInputs]:
        masking = Masking.of(self.tokenizer, unit=self.unit, share=phase.masking)
        return PackingCollator(masking, padded_outputs=False)

    def examples(self, epoch: int, phase: Phase) -> tuple[Any, Any]:
        windows = self.cut(self.corpus, phase.max_length, self.seed, epoch)
        return windows, windows.lengths

    def cut(self, corpus: Corpus, max_length: int, seed: int, epoch: int) -> Any:
        """The examples of a corpus."""
        return CorpusChunks(corpus, self.tokenizer, max_length, seed=seed, epoch=epoch, with_types=self.with_types)

    @staticmethod
    def counts(batch: PackedInputs) -> list[int]:
        return [labels_in(batch)]

    def loss(self, model: nn.Module, batch: PackedInputs, totals: Totals) -> torch.Tensor:
        return model(**batch, num_items_in_batch=totals[0]).loss

    def held_out_batches(self) -> list[PackedInputs]:
        """The evaluation data, masked alike in every evaluation."""
        if self._held_out is None:
            assert self.held_out is not None
            windows = self.cut(self.held_out, self.held_out_length, EVALUATION_SEED, 0)
            phase = Phase(1, 0, max_length=self.held_out_length, masking=EVALUATION_SHARE)
            self._held_out = held_out_batches(windows, windows.lengths, self.collate(phase), EVALUATION_SEED)
        return self._held_out

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return masked_lm_metrics(model, self.held_out_batches())

    def save(self, model: nn.Module, folder: Path) -> None:
        save_model(model, self.vocabulary, folder)

    def show(self, batch: PackedInputs) -> list[str]:
        decode, said = self.tokenizer.decode, []
        sizes = batch["batch"].cu_seqlens.diff().tolist()
        for ids, labels in zip(batch["input_ids"].split(sizes), batch["labels"].split(sizes), strict=True):
            wanted = [decode([i]).strip() for i in labels[labels != IGNORED].tolist()]
            said.append(f"{decode(ids.tolist(), skip_special_tokens=False)}\n    to guess: {', '.join(wanted)}")
        return said


class PairedLM(MaskedLM):
    """Masked language modelling, and whether the two halves of an example stand together in the text: two terms, each a
    mean over its own labels.
    """

    def __init__(self, *arguments: Any, pairs: Pairs, **options: Any):
        super().__init__(*arguments, **options)
        self.pairs, self.label = pairs, self.model.head_spec.pair_label

    def cut(self, corpus: Corpus, max_length: int, seed: int, epoch: int) -> CorpusPairs:
        # What uses the model later gives it token types where the tokenizer's files say so.
        told = self.vocabulary.gives_types
        return CorpusPairs(
            corpus, self.tokenizer, max_length, self.pairs, seed=seed, epoch=epoch, label=self.label, with_types=told
        )

    @staticmethod
    def counts(batch: PackedInputs) -> list[int]:
        return [*MaskedLM.counts(batch), int(batch["batch"].has_tokens().sum())]

    def loss(self, model: nn.Module, batch: PackedInputs, totals: Totals) -> torch.Tensor:
        return model(**batch, num_items_in_batch={"labels": totals[0], self.label: totals[1]}).loss

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return masked_lm_metrics(model, self.held_out_batches(), self.label, self.pairs)

    def show(self, batch: PackedInputs) -> list[str]:
        names = {"nsp": ("follows", "from another document"), "sop": ("in order", "swapped")}[self.pairs]
        labels = batch[self.label].tolist()
        return [f"{text}\n    pair: {names[label]}" for text, label in zip(super().show(batch), labels, strict=True)]


def save_model(model: Any, vocabulary: Vocabulary, folder: Path) -> None:
    """A checkpoint that transformers loads, the tokenizer beside it. Raises OSError."""
    vocabulary.save(folder)
    model.save_pretrained(folder)
