"""A training step on buffers that stay where they are: what changes from step to step is in them, and nothing else."""

from __future__ import annotations

import torch
from family_configs import config_for

from fastbert import ops
from fastbert.backend import use_backend
from fastbert.models.classes import CLASSES
from fastbert.packed_inputs import PackedInputs
from fastbert.packing import PackedBatch

SMALL = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "intermediate_size": 16}
DROPS = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
BETAS, EPS, MAX_NORM = (0.9, 0.99), 1e-8, 1.0
WORDS = 40


class Buffers:
    """A bucket's: tokens with slack behind them, sequences of which the last are empty, tokens that have a label."""

    def __init__(self, tokens: int, sequences: int, labelled: int, longest: int):
        self.longest = longest
        self.ids, self.labels = torch.zeros(tokens, dtype=torch.int64), torch.full((tokens,), -100)
        self.cu_seqlens = torch.zeros(sequences + 1, dtype=torch.int32)
        self.kept = torch.zeros(labelled, dtype=torch.int64)

    def fill(self, seed: int) -> int:
        """Another batch, with other lengths and labels; returns how many labels it has."""
        draw = torch.Generator().manual_seed(seed)

        def number(low: int, high: int) -> int:
            return int(torch.randint(low, high + 1, (1,), generator=draw))

        tokens, sequences = len(self.ids) - 1, len(self.cu_seqlens) - 1  # the last token is always slack
        count = number(1, sequences)
        lengths = [number(1, min(self.longest, tokens // count)) for _ in range(count)]
        total = sum(lengths)
        self.ids[:total] = torch.randint(1, WORDS, (total,), generator=draw)
        self.cu_seqlens[: count + 1] = torch.tensor([0, *lengths]).cumsum(0)
        self.cu_seqlens[count + 1 :] = total
        labelled = torch.randperm(total, generator=draw)[: number(1, min(total, len(self.kept)))].sort().values
        self.labels.fill_(-100)
        self.labels[labelled] = self.ids[labelled]
        self.kept.fill_(tokens)
        self.kept[: len(labelled)] = labelled
        return len(labelled)

    def packed(self) -> PackedInputs:
        bounds = {"input_ids": (0, WORDS), "labels": (0, WORDS)}
        batch = PackedBatch(
            None, self.cu_seqlens, self.longest, len(self.cu_seqlens) - 1, None, len(self.ids), self.kept, bounds
        )
        return PackedInputs({"input_ids": self.ids, "labels": self.labels, "batch": batch})


class Trained:
    """A model with all that its steps write, and the numbers that they read."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = CLASSES["bert", "MaskedLM"](config_for("bert", "MaskedLM", 0, **SMALL, **DROPS)).train()
        self.parameters = list(self.model.parameters())
        self.state = ops.FlatState([p.detach() for p in self.parameters], [int(p.dim() > 1) for p in self.parameters])
        for parameter, gradient in zip(self.parameters, self.state.views(self.state.gradients), strict=True):
            parameter.grad = gradient
        self.seeds, self.numbers = ops.StepSeeds("cpu"), torch.zeros(2 + 2 * self.state.num_groups)
        self.total, self.at = torch.zeros(()), torch.zeros(1, dtype=torch.int64)
        self.losses = torch.zeros(64)

    def fill(self, step: int, buffers: list[Buffers]) -> None:
        """What step number `step`, counted from 0, goes by."""
        self.total.fill_(sum(each.fill(100 * step + i) for i, each in enumerate(buffers)))
        self.seeds.begin(step)
        rates = [1e-2 / (step + 1), 2e-2 * (step % 3)]
        self.numbers.copy_(torch.tensor(ops.step_numbers(step + 1, rates, [0.0, 0.1], *BETAS)))
        self.at.fill_(step)

    def run(self, buffers: list[Buffers]) -> None:
        """Forward and backward of all buffers' batches, the optimizer, and the loss in its place."""
        with use_backend("triton"), ops.seeds_from(self.seeds):
            losses = [self.backward(each) for each in buffers]
        self.optimize()
        self.log(torch.stack(losses).sum())

    def backward(self, buffers: Buffers) -> torch.Tensor:
        loss = self.model(buffers.packed(), num_items_in_batch=self.total).loss
        loss.backward()
        return loss.detach()

    def optimize(self) -> None:
        options = {"beta1": BETAS[0], "beta2": BETAS[1], "eps": EPS, "max_norm": MAX_NORM}
        ops.adamw_flat(self.state, self.numbers, backend="triton", **options)

    def log(self, loss: torch.Tensor) -> None:
        self.losses.index_copy_(0, self.at, loss[None])

    def kept(self) -> list[torch.Tensor]:
        """All that a step leaves behind."""
        return [*[p.detach() for p in self.parameters], self.state.means, self.state.squares, self.losses]
