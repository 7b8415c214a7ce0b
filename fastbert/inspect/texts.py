"""Packed texts that a model reads many times, each with some change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from fastbert.errors import InputError
from fastbert.models.base import PreTrainedModel
from fastbert.packed_inputs import ModelInputs, PackedInputs


@dataclass(frozen=True)
class PackedTexts:
    """ids: int64 (total_tokens,). ends: the offsets of the texts, (texts + 1,). others: what else the model is told of
    each token, by the names of its arguments, (total_tokens,) each.
    """

    ids: torch.Tensor
    ends: list[int]
    others: dict[str, torch.Tensor]

    @classmethod
    def of(cls, model: PreTrainedModel, batch: PackedInputs) -> PackedTexts:
        """Raises InputError: the model is in training mode; a text has padding between its tokens."""
        if model.training:
            raise InputError("the model is in training mode: call model.eval()")
        inputs = model.base_model.prepare(ModelInputs(batch))
        if inputs.window_positions is not None:
            raise InputError("a text has padding between its tokens: pack its tokens alone")
        ids = inputs.ids
        assert ids.input_ids is not None  # a PackedInputs has them
        named = (
            ("position_ids", ids.position_ids),
            ("token_type_ids", ids.token_type_ids),
            ("task_type_ids", ids.task_type_ids),
        )
        others = {name: t for name, t in named if t is not None}
        return cls(ids.input_ids, inputs.batch.cu_seqlens.tolist(), others)

    @property
    def lengths(self) -> list[int]:
        return [end - start for start, end in pairwise(self.ends)]

    def places(self, texts: Sequence[int]) -> torch.Tensor:
        """Where the tokens of these texts are, one text after the other; a text may come again."""
        device = self.ids.device
        return torch.cat([torch.arange(self.ends[i], self.ends[i + 1], device=device) for i in texts])

    def offsets(self, texts: Sequence[int]) -> torch.Tensor:
        """Where each of these texts begins, one after the other, and the end: int64 (texts + 1,), on the CPU."""
        lengths = torch.tensor([0, *(self.ends[i + 1] - self.ends[i] for i in texts)])
        return lengths.cumsum(0)

    def arguments(self, texts: Sequence[int], places: torch.Tensor) -> dict[str, Any]:
        """What a model is told of these texts beside their words; `places` are theirs."""
        offsets = self.offsets(texts)
        return {
            "cu_seqlens": offsets.int().to(self.ids.device),
            "max_seqlen": int(offsets.diff().max()),
            **{name: t[places] for name, t in self.others.items()},
        }


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Gradients of inputs alone: those of weights would take two thirds of backward."""
    trained = [p for p in model.parameters() if p.requires_grad]
    try:
        for p in trained:
            p.requires_grad_(False)
        with torch.enable_grad():
            yield
    finally:
        for p in trained:
            p.requires_grad_(True)
