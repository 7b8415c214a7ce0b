"""Small models whose training step is captured on tapes, and batches for them."""

from __future__ import annotations

from typing import Any

import torch
from family_configs import config_for
from tape import TapeGraphs

import fastbert
from fastbert.models.classes import CLASSES
from fastbert.packed_inputs import PackedInputs
from fastbert.training.graphed import GraphedStep
from fastbert.training.optimizers import make_optimizer, parameter_groups

SMALL = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "intermediate_size": 16}
DROPS = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
WORDS = 40


class NoGraphs(TapeGraphs):
    """Runs what would be captured, each time: what a replay has to give."""

    def capture(self, run):
        run()
        return run


def mean_loss(model: Any, batch: PackedInputs, total: torch.Tensor) -> torch.Tensor:
    return model(**batch, num_items_in_batch=total).loss


def make_step(graphs: Any, kind: type[GraphedStep] = GraphedStep, loss: Any = mean_loss, **changes: Any) -> GraphedStep:
    """Of a masked language model with dropout, AdamW with two groups, and clipping."""
    torch.manual_seed(0)
    model = CLASSES["bert", "MaskedLM"](config_for("bert", "MaskedLM", 0, **SMALL, **DROPS, **changes)).train()
    optimizer = make_optimizer("adamw", parameter_groups(model, 1e-2), (0.9, 0.99), 1e-8)
    return kind(model, optimizer, loss, max_norm=1.0, bf16=False, graphs=graphs)


def batch(seed: int, longest: int = 6, most: int = 3) -> PackedInputs:
    """Its lengths, ids and number of labels follow from the seed."""
    draw = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=draw))

    rows = [torch.randint(1, WORDS, (number(1, longest),), generator=draw) for _ in range(number(1, most))]
    labels = [torch.where(torch.rand(len(row), generator=draw) < 0.3, row, -100) for row in rows]
    labels[0][0] = rows[0][0]
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
