"""What transformers' classes do otherwise than the others do, mended for comparisons."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

# What the multiple-choice heads forget to flatten, each family another.
FORGOTTEN = {"distilbert": "position_ids", "ernie": "task_type_ids"}


def by_choice(model_type: str, inputs: dict[str, torch.Tensor], choices: int) -> dict[str, torch.Tensor]:
    """Inputs (batch * choices, seqlen) as a multiple-choice head of transformers takes them."""
    flat = FORGOTTEN.get(model_type)
    return {name: t if name == flat else t.view(-1, choices, t.shape[-1]) for name, t in inputs.items()}


def mend(model: nn.Module) -> None:
    for encoder in [m for m in model.modules() if hasattr(m, "embed_positions")]:
        take_positions(model.base_model, encoder.embed_positions)
    for embeddings in [m for m in model.modules() if vars(m).get("token_dropout")]:
        spare_empty_rows(embeddings)


class _Rows(NamedTuple):
    """A table's rows by sequence, where transformers' RoFormer adds the dimensions of one row for the whole batch."""

    rows: torch.Tensor

    def __getitem__(self, index):
        return self.rows[:, None]


def spare_empty_rows(embeddings: nn.Module) -> None:
    """transformers' ESM counts the mask tokens of a sequence without tokens in shares of 0: NaN, in gradients too."""

    def before(module, args, kwargs):
        mask = kwargs.get("attention_mask")
        if mask is not None:
            kwargs["attention_mask"] = mask.where(mask.any(1, keepdim=True), torch.ones_like(mask))
        return args, kwargs

    embeddings.register_forward_pre_hook(before, with_kwargs=True)


def take_positions(base: nn.Module, table: nn.Embedding) -> None:
    """transformers' RoFormer takes no position_ids, and goes by columns; ours does, and so do packed batches."""
    given = []

    def before(module, args, kwargs):
        given[:] = [kwargs.pop("position_ids", None)]
        return args, kwargs

    def after(module, args, rows):
        return rows if given[0] is None else _Rows(module.weight.detach()[given[0].flatten(0, -2)])

    base.register_forward_pre_hook(before, with_kwargs=True)
    table.register_forward_hook(after)
