"""Distillation as in DistilBERT (Sanh et al. 2019): a student of half the layers learns from its teacher's scores."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastbert import ops
from fastbert.errors import ConfigError
from fastbert.models.outputs import ModelOutput
from fastbert.packed_inputs import ModelInputs, PackedInputs, labels_of
from fastbert.training.pretraining.evaluation import masked_lm_metrics
from fastbert.training.pretraining.masked import MaskedLM, save_model
from fastbert.training.task import Totals

# The weights of soft targets, masked tokens and directions, and the temperature: those that DistilBERT was made with.
SOFT, MASKED, COSINE = 5.0, 2.0, 1.0
TEMPERATURE = 2.0


class Student(nn.Module):
    """A student beside what its teacher made of the same batch. `teacher_hidden` (total_tokens, hidden_size),
    `teacher_scores` (labelled tokens, vocab_size).

    Soft targets are those of masked tokens, so no scores of others are made (`restrict_ce_to_mask` in DistilBERT's own
    program); directions are compared for all tokens.
    """

    def __init__(self, student: Any):
        super().__init__()
        self.student = student

    def activation_checkpointing_enable(self) -> None:
        self.student.activation_checkpointing_enable()

    def forward(
        self,
        packed: PackedInputs,
        teacher_hidden: torch.Tensor,
        teacher_scores: torch.Tensor,
        num_items_in_batch: Mapping[str, torch.Tensor | float] | None = None,
    ) -> ModelOutput:
        hidden, scores, targets = hidden_and_scores(self.student, packed)
        is_labelled, is_real = targets != -100, packed["batch"].has_sequence()  # the others are padding
        counted = {"labels": is_labelled.sum().clamp(min=1), "tokens": is_real.sum().clamp(min=1)}
        items = counted if num_items_in_batch is None else num_items_in_batch
        soft, scores = soft_losses(scores, teacher_scores).where(is_labelled, 0.0).sum(), ops.at_least_fp32(scores)
        masked = F.cross_entropy(scores, targets, reduction="sum")
        away = 1.0 - F.cosine_similarity(ops.at_least_fp32(hidden), ops.at_least_fp32(teacher_hidden), dim=-1)
        away = away.where(is_real, 0.0).sum()
        loss = (SOFT * soft + MASKED * masked) / items["labels"] + COSINE * away / items["tokens"]
        return ModelOutput(loss=loss)


def soft_losses(scores: torch.Tensor, teacher_scores: torch.Tensor) -> torch.Tensor:
    """Of each token, the divergence from the teacher's softened scores, times T^2 (Hinton et al. 2015, section 2)."""
    log_p = F.log_softmax(ops.at_least_fp32(scores) / TEMPERATURE, dim=-1)
    log_q = F.log_softmax(ops.at_least_fp32(teacher_scores) / TEMPERATURE, dim=-1)
    return F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1) * TEMPERATURE**2


def hidden_and_scores(model: Any, packed: PackedInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(hidden states of all tokens, scores of the labelled ones, their labels)."""
    inputs = model.base_model.prepare(ModelInputs(packed))
    labels = model.check_options(labels_of(packed, {}), inputs.batch)["labels"]
    encoded, _ = model.run_base(inputs, ModelInputs(packed))
    kept = packed["batch"].labelled
    scores = model.masked_lm_scores(encoded.packed.index_select(0, kept))
    return encoded.packed, scores, labels.index_select(0, kept)


class Distillation(MaskedLM):
    """Masked language modelling, the teacher's scores, and its hidden states' directions."""

    model: Student

    def __init__(self, model: Student, *arguments: Any, teacher: Any, **options: Any):
        super().__init__(model, *arguments, **options)
        self.teacher = teacher.eval().requires_grad_(False)

    @property
    def hidden_size(self) -> int:
        return self.model.student.config.hidden_size

    @staticmethod
    def counts(batch: PackedInputs) -> list[int]:
        return [*MaskedLM.counts(batch), int(batch["batch"].cu_seqlens[-1])]

    def loss(self, model: nn.Module, batch: PackedInputs, totals: Totals) -> torch.Tensor:
        self.teacher.to(batch["input_ids"].device)
        with torch.no_grad():
            hidden, scores, _ = hidden_and_scores(self.teacher, batch)
        return model(batch, hidden, scores, {"labels": totals[0], "tokens": totals[1]}).loss

    def evaluate(self, model: Any) -> dict[str, float]:
        return masked_lm_metrics(model.student, self.held_out_batches())

    def save(self, model: Any, folder: Path) -> None:
        save_model(model.student, self.vocabulary, folder)


def student_of(teacher: Any) -> Any:
    """A model of half the teacher's layers, which begins with every other one of them, and with all that is outside of
    layers (section 3). Raises ConfigError: a teacher of one layer, or one whose layers share their weights.
    """
    config, layers = teacher.config, teacher.config.num_hidden_layers
    if layers < 2 or config.num_unique_layers != layers:
        raise ConfigError(
            f"a teacher needs two layers or more, each with its own weights; it has {config.num_unique_layers}"
        )
    student = type(teacher)(config.replace(num_hidden_layers=layers // 2))
    weights, prefix = teacher.state_dict(), f"{teacher.family.prefix}."
    theirs = {
        prefix + path: prefix + teacher.config.layer_paths[2 * i] for i, path in enumerate(student.config.layer_paths)
    }
    for name, tensor in student.state_dict().items():
        layer = next((path for path in theirs if name.startswith(f"{path}.")), None)
        tensor.copy_(weights[name if layer is None else theirs[layer] + name.removeprefix(layer)])
    return student
