"""What the tasks of fine-tuning share: a head over packed inputs, its examples, and the folder that comes out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from fastbert.data.collator import PackingCollator
from fastbert.packed_inputs import PackedInputs
from fastbert.training.finetuning.sequences import Sequences
from fastbert.training.task import Phase, Task


class LabelledSequences:
    """The examples of an epoch: tokens, and the labels that go with each input under the names of a model's forward."""

    def __init__(self, sequences: Sequences, **labels: np.ndarray):
        self.sequences, self.labels = sequences, labels

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self.sequences[i] | {name: values[i] for name, values in self.labels.items()}


class HeadTask(Task):
    """A model with a head, and examples that are the same in every epoch."""

    def __init__(self, model: Any, tokenizer: Tokenizer, examples: LabelledSequences):
        self.model, self.tokenizer, self.train = model, tokenizer, examples
        self.notes: list[str] = []  # what a user should know before the first step

    def collate(self, phase: Phase) -> Callable[[list[Any]], PackedInputs]:
        return PackingCollator(padded_outputs=False)

    def examples(self, epoch: int, phase: Phase) -> tuple[Any, Any]:
        return self.train, self.train.sequences.lengths

    def save(self, model: Any, folder: Path) -> None:
        model.save_pretrained(folder)
