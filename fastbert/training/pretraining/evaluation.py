"""Numbers of held-out text: how well masked tokens, pairs and replaced tokens are told."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from fastbert import ops
from fastbert.data.batches import KeyedDataset, Steps
from fastbert.packed_inputs import ModelInputs, PackedInputs, labels_of

STEP_TOKENS = 8192  # of a batch of held-out text


def held_out_batches(
    examples: Any, lengths: np.ndarray, collate: Callable[[list[Any]], PackedInputs], seed: int
) -> list[PackedInputs]:
    """All examples in order, whose masks follow from `seed` alone."""
    keyed = KeyedDataset(examples, seed, 0)
    steps = Steps(lengths, max(STEP_TOKENS, int(lengths.max())), seed=None)
    return [collate(keyed.__getitems__(indices.tolist())) for indices in steps.of_epoch(0)]


class Sums:
    """What adds up over batches, by name."""

    def __init__(self) -> None:
        self.of: dict[str, float] = {}

    def add(self, **values: float | torch.Tensor) -> None:
        for name, value in values.items():
            self.of[name] = self.of.get(name, 0.0) + float(value)


def masked_lm_metrics(
    model: Any, batches: Iterable[PackedInputs], pair_label: str | None = None, pairs: str = ""
) -> dict[str, float]:
    """loss, perplexity and masked_accuracy; with a `pair_label` also the pairs' loss and accuracy, and `loss` is the
    sum of both losses.
    """
    sums = Sums()
    for batch in batches:
        _add_masked(model, batch.to(model.device), pair_label, sums)
    total, tokens = sums.of, sums.of["tokens"]
    loss = total["loss"] / tokens
    metrics = {"loss": loss, "perplexity": _exp(loss), "masked_accuracy": total["right"] / tokens}
    if pair_label is None:
        return metrics
    pair_loss, ones = total["pair_loss"] / total["pairs"], total["pair_ones"] / total["pairs"]
    metrics |= {"loss": loss + pair_loss, "mlm_loss": loss, f"{pairs}_loss": pair_loss}
    return metrics | {
        f"{pairs}_accuracy": total["pairs_right"] / total["pairs"],
        f"{pairs}_majority": max(ones, 1 - ones),
    }


def _add_masked(model: Any, batch: PackedInputs, pair_label: str | None, sums: Sums) -> None:
    """The head runs for labelled tokens only, as in a training step."""
    inputs = model.base_model.prepare(ModelInputs(batch))
    checked_labels = model.check_options(labels_of(batch, {}), inputs.batch)
    encoded, _ = model.run_base(inputs, ModelInputs(batch))
    kept = batch["batch"].labelled
    targets = checked_labels["labels"].index_select(0, kept)
    scores = model.masked_lm_scores(encoded.packed.index_select(0, kept))
    loss = ops.logits_cross_entropy(scores, targets) * len(targets)
    sums.add(loss=loss, right=(scores.argmax(-1) == targets).sum(), tokens=len(targets))
    if pair_label is not None:
        labels, logits = checked_labels[pair_label], model.pair(encoded.pooled())
        sums.add(
            pair_loss=ops.logits_cross_entropy(logits, labels) * len(labels),
            pairs_right=(logits.argmax(-1) == labels).sum(),
            pair_ones=(labels == 1).sum(),
            pairs=len(labels),
        )


def replaced_metrics(joint: Any, batches: Iterable[PackedInputs], seed: int) -> dict[str, float]:
    """loss of both models, generator_loss, and how well replaced tokens are told: accuracy beside that of the answer
    "never", and F1. The generator draws the same numbers in every evaluation.
    """
    sums, device = Sums(), joint.discriminator.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for batch in batches:
            out = joint(batch.to(device))
            masked, tokens = batch["batch"].labelled.numel(), batch["batch"].total_tokens
            said, is_replaced = out.logits > 0, out.replaced == 1
            sums.add(
                generator_loss=out.generator_loss * masked,
                discriminator_loss=out.discriminator_loss * tokens,
                right=(said == is_replaced).sum(),
                hits=(said & is_replaced).sum(),
                said=said.sum(),
                replaced=is_replaced.sum(),
                masked=masked,
                tokens=tokens,
            )
    total = sums.of
    generator, discriminator = total["generator_loss"] / total["masked"], total["discriminator_loss"] / total["tokens"]
    return {
        "loss": generator + joint.discriminator_weight * discriminator,
        "generator_loss": generator,
        "discriminator_loss": discriminator,
        "rtd_accuracy": total["right"] / total["tokens"],
        "rtd_majority": 1.0 - total["replaced"] / total["tokens"],
        "rtd_f1": 2 * total["hits"] / max(1.0, total["said"] + total["replaced"]),
    }


def _exp(loss: float) -> float:
    return math.exp(min(loss, 700.0))
