"""What a run trains: its examples, its loss, and how good it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastbert.packed_inputs import PackedInputs
from fastbert.training.distributed import gradients_stay_local

Totals = Sequence[float]  # what each of a loss's terms is divided by


@dataclass(frozen=True)
class Phase:
    """A part of a run. Its examples are cut and masked alike.

    until: the step behind its last one. step_tokens: of a step over all ranks, an upper bound. max_examples: of a step,
    too; None: as many as the tokens allow. max_length: of an example, special tokens included. masking: the share of
    tokens that a masked language model has to guess.
    """

    until: int
    step_tokens: int
    max_examples: int | None = None
    max_length: int = 128
    masking: float = 0.15


def labels_in(batch: PackedInputs) -> int:
    """How many tokens of a batch on the host have a label."""
    return int((batch["labels"] != -100).sum())


class Task:
    """The base of all tasks. What raises NotImplementedError is the task's own.

    model: what is trained, on the CPU when the task is made. metric: which number of `evaluate` says which checkpoint
    is the best one, None where there is nothing to evaluate on; `more_is_better` of it.
    """

    model: Any
    metric: str | None = None
    more_is_better: bool = True
    library: str = "transformers"  # that loads what `save` writes, in the hub's words
    texts: int = 1  # sequences of an example, each as long as --max-length at most
    pipeline: str | None = None  # what it is for, in the hub's words: "text-classification"

    @property
    def hidden_size(self) -> int:
        """Of the model's layers: it says how dear a long sequence is."""
        return self.model.config.hidden_size

    def collate(self, phase: Phase) -> Callable[[list[Any]], PackedInputs]:
        """Makes a batch of examples, in a DataLoader's worker: it must be picklable."""
        raise NotImplementedError

    def examples(self, epoch: int, phase: Phase) -> tuple[Any, Any]:
        """(the examples of an epoch, the number of tokens of each)."""
        raise NotImplementedError

    @staticmethod
    def counts(batch: PackedInputs) -> list[int]:
        """What each of the loss's terms is the mean over, in this batch: a number of labels for each term, without
        those of padding rows. The batch is on the host, perhaps in a DataLoader's worker, which has no task.
        """
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: PackedInputs, totals: Totals) -> torch.Tensor:
        """The sum over this batch of each term, divided by that term's total, and added up. Padding adds nothing.

        `model` is this task's, perhaps wrapped; the batch is on its device.
        """
        raise NotImplementedError

    def backward(
        self, model: nn.Module, batches: list[PackedInputs], totals: Totals, autocast: AbstractContextManager
    ) -> torch.Tensor:
        """Forward and backward of all of a rank's batches of a step; returns their loss, detached.

        A task whose loss goes over examples of several batches has its own.
        """
        losses = []
        for i, batch in enumerate(batches):
            with gradients_stay_local(model, i < len(batches) - 1):
                with autocast:
                    part = self.loss(model, batch, totals)
                part.backward()
            losses.append(part.detach())
        return torch.stack(losses).sum()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Numbers by name, of the evaluation data. `model` is in eval mode, has all weights, and is not wrapped; the
        caller has set autocast. Called on rank 0 alone.
        """
        raise NotImplementedError

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write what a user loads, the tokenizer with it. `model` is as in `evaluate`."""
        raise NotImplementedError

    def show(self, batch: PackedInputs) -> list[str]:
        """A text a sequence: what the model is shown and what it has to say, for `--dry-run`."""
        raise NotImplementedError
