"""The objectives of pre-training as tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn

from fastbert.data.collator import PackingCollator
from fastbert.data.corpus import Corpus
from fastbert.data.masking import Masking
from fastbert.data.windows import Windows
from fastbert.packed_inputs import PackedInputs
from fastbert.training.task import Phase, Task


class MaskedLM(Task):
    """Masked language modelling of whole windows, as RoBERTa does it (Liu et al. 2019): other masks in every epoch."""

    def __init__(
        self, model: nn.Module, corpus: Corpus, tokenizer: Tokenizer, *, unit: Any, seed: int, with_types: bool
    ):
        self.model, self.corpus, self.tokenizer = model, corpus, tokenizer
        self.unit, self.seed, self.with_types = unit, seed, with_types

    def collate(self, phase: Phase) -> Callable[[list[Any]], PackedInputs]:
        return PackingCollator(Masking.of(self.tokenizer, unit=self.unit, share=phase.masking))

    def examples(self, epoch: int, phase: Phase) -> tuple[Any, Any]:
        windows = Windows(
            self.corpus, self.tokenizer, phase.max_length, seed=self.seed, epoch=epoch, with_types=self.with_types
        )
        return windows, windows.lengths

    def counts(self, batch: PackedInputs) -> list[int]:
        return [batch["batch"].labelled.numel()]

    def loss(self, model: nn.Module, batch: PackedInputs, totals: list[float]) -> torch.Tensor:
        return model(**batch, num_items_in_batch=totals[0]).loss
