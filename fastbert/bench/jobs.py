"""The messages of `fastbert bench`: a contestant's task, and its answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

PRECISIONS = ("float32", "bfloat16", "int8")
Call = Callable[[], torch.Tensor]  # last_hidden_state of the job's batch, (batch, longest, hidden_size)


@dataclass(frozen=True)
class Job:
    """One contestant's task: the same checkpoint, batch and number of threads as everyone else's.

    Precision "int8" means: weights, and the activations that are multiplied with them, in 8 bits.
    """

    checkpoint: Path  # a folder that from_pretrained reads
    prepared: Path  # a folder for models exported, optimised or quantised once a run
    precision: str
    masked: bool  # the batch has padding; where it has none, everyone may take the path without a mask
    threads: int

    @property
    def dtype(self) -> torch.dtype:
        """What is not in 8 bits."""
        return torch.float32 if self.precision == "float32" else torch.bfloat16
