"""The messages of `fastbert bench`: a contestant's task, and its answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

PRECISIONS = ("float32", "bfloat16", "int8")
Call = Callable[[], torch.Tensor]  # last_hidden_state of the job's batch, (batch, longest, hidden_size)


@dataclass(frozen=True)
class BenchJob:
    """One contestant's task: the same checkpoint, batch and number of threads as everyone else's.

    Precision "int8" means: weights, and the activations that are multiplied with them, in 8 bits.
    """

    checkpoint: Path  # a folder that from_pretrained reads
    prepared: Path  # a folder for models exported, optimised or quantised once a run
    precision: str
    masked: bool  # the batch has padding; where it has none, everyone may take the path without a mask
    threads: int
    calibration: Path | None = None  # JSON: the token ids of texts like those that are timed; None: random tokens
    alone: bool = True  # no other process of this contestant runs at the same time

    @property
    def dtype(self) -> torch.dtype:
        """What is not in 8 bits."""
        return torch.float32 if self.precision == "float32" else torch.bfloat16


def fields_without_type(fields: dict[str, Any]) -> dict[str, Any]:
    """The config fields of one of testing.cases.MODELS."""
    return {name: value for name, value in fields.items() if name != "model_type"}


def load_peer(checkpoint: Path, dtype: torch.dtype, attention: str) -> Any:
    """transformers' encoder of a folder, without a pooler, in eval mode; `attention` is "eager", or "sdpa" where
    transformers has that of the model.
    """
    from transformers import AutoConfig, AutoModel

    model_class: Any = AutoModel._model_mapping[type(AutoConfig.from_pretrained(checkpoint))]
    attention = attention if model_class._supports_sdpa else "eager"
    model = AutoModel.from_pretrained(checkpoint, dtype=dtype, attn_implementation=attention).eval()
    model.config.use_cache = False  # of decoders, which would keep keys and values
    if getattr(model, "pooler", None) is not None:
        model.pooler = None
    return model
