"""ELECTRA: a small generator fills masks, and the discriminator says which tokens were replaced (Clark et al. 2020)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastbert.config import EncoderConfig
from fastbert.models.joint_electra import ElectraForJointPreTraining
from fastbert.packed_inputs import PackedInputs
from fastbert.training.pretraining.evaluation import replaced_metrics
from fastbert.training.pretraining.masked import EVALUATION_SEED, MaskedLM, save_model
from fastbert.training.task import Totals

GENERATOR = "generator"  # its folder, below the discriminator's


class ReplacedTokens(MaskedLM):
    """Two terms: the generator's loss over masked tokens, and 50 times the discriminator's over all tokens."""

    model: ElectraForJointPreTraining
    pipeline: str | None = None

    @property
    def hidden_size(self) -> int:
        return self.model.discriminator.config.hidden_size

    @staticmethod
    def counts(batch: PackedInputs) -> list[int]:
        return [*MaskedLM.counts(batch), int(batch["batch"].cu_seqlens[-1])]

    def loss(self, model: nn.Module, batch: PackedInputs, totals: Totals) -> torch.Tensor:
        return model(batch, num_items_in_batch={"labels": totals[0], "tokens": totals[1]}).loss

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return replaced_metrics(model, self.held_out_batches(), EVALUATION_SEED)

    def save(self, model: Any, folder: Path) -> None:
        save_model(model.discriminator, self.vocabulary, folder)
        save_model(model.generator, self.vocabulary, folder / GENERATOR)


def generator_config(config: EncoderConfig) -> EncoderConfig:
    """A third as wide as the discriminator, or a quarter where its heads are no multiple of three: so 256 for base and
    large (section 3.2 and table 6). The embeddings are the discriminator's.
    """
    heads = config.num_attention_heads
    share = 3 if heads % 3 == 0 else 4
    fewer = max(1, heads // share)
    width = max(1, config.hidden_size // share // fewer) * fewer
    return config.replace(
        hidden_size=width,
        num_attention_heads=fewer,
        intermediate_size=max(1, config.intermediate_size // share),
        embedding_size=config.embedding_width,
    )
