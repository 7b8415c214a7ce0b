"""Small models whose training step is captured on tapes, and batches for them."""

from __future__ import annotations

from typing import Any

import torch
from family_configs import config_for

import fastbert
from fastbert.cuda_graphs.buckets import Sizes
from fastbert.models.classes import CLASSES
from fastbert.packed_inputs import PackedInputs
from fastbert.training.graphed import GraphedStep
from fastbert.training.optimizers import make_optimizer, parameter_groups

SMALL = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "intermediate_size": 16}
DROPS = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
WORDS = 40
LARGEST = Sizes(22, 4, 6, 3)  # of the batches here


def mean_loss(model: Any, batch: PackedInputs, total: torch.Tensor) -> torch.Tensor:
    return model(**batch, num_items_in_batch=total).loss


def make_step(
    graphs: Any, kind: type[GraphedStep] = GraphedStep, loss: Any = mean_loss, bf16: bool = False, **changes: Any
) -> GraphedStep:
    """Of a masked language model with dropout, AdamW with two groups, and clipping."""
    torch.manual_seed(0)
    model = CLASSES["bert", "MaskedLM"](config_for("bert", "MaskedLM", 0, **{**SMALL, **DROPS, **changes})).train()
    optimizer = make_optimizer("adamw", parameter_groups(model, 1e-2), (0.9, 0.99), 1e-8)
    step = kind(model, optimizer, loss, max_norm=1.0, bf16=bf16, graphs=graphs)
    step.buckets.plan([LARGEST, Sizes(9, 2, 6, 3)])
    return step


def batch(number: int, is_wide: bool = False, largest: int = WORDS - 1) -> PackedInputs:
    """Lengths, ids and how many labels there are differ from number to number. The largest id and label do not: larger
    ones than a graph's first batch had are compared with the model's tables, op by op.
    """
    draw = torch.Generator().manual_seed(number)
    lengths = [3 + number % 4, *([5] if number % 2 else []), *([6, 5] if is_wide else [])]
    rows = torch.randint(1, largest, (sum(lengths),), generator=draw).split(lengths)
    rows[0][0] = largest
    labels = [torch.full_like(row, -100) for row in rows]
    labels[0][: 1 + number % 3] = rows[0][: 1 + number % 3]
    return fastbert.pack_inputs([row.tolist() for row in rows], labels=[row.tolist() for row in labels])


def run_step(step: GraphedStep, number: int, batches: list[PackedInputs]) -> None:
    """Step `number`, counted from 0, with rates and a total that no other step has."""
    for i, group in enumerate(step.optimizer.param_groups):
        group["lr"] = 1e-2 / (number + 1) if i == 0 else 2e-2 * (number % 3)
    step(batches, [float(sum(b["batch"].labelled.numel() for b in batches))], seed=number)


def kept(step: GraphedStep) -> list[torch.Tensor]:
    """All that steps leave behind: weights, and what the optimizer's own state says."""
    states = [step.optimizer.state[p] for p in step.model.parameters()]
    moments = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq", "step")]
    return [*[p.detach() for p in step.model.parameters()], *moments]
