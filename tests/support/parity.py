"""The comparison of a model with transformers': outputs, loss and every gradient, on real tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from batches import Batch, token_level
from family_configs import CHOICES
from fused_delta import LONGEST_SQUARE, delta_of_the_output
from hf import Trio, gradients, leaf_gradients, make_trio, random_like
from theirs import by_choice
from torch import nn
from torch.nn.functional import cross_entropy

from fastbert.families.schema import ClassifierHead
from fastbert.testing import reference
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

POOLED = ("Model", "PreTraining", "NextSentencePrediction", "SequenceClassification", "MultipleChoice")
TOKEN_FIELDS = ("last_hidden_state", "prediction_logits", "start_logits", "end_logits")
SEQUENCE_FIELDS = ("pooler_output", "seq_relationship_logits", "sop_logits")


def call(model, head: str, batch: Batch, labels: dict[str, torch.Tensor]):
    inputs = dict(batch.inputs)
    if head == "MultipleChoice":
        if model.config.model_type == "modernbert":
            inputs.setdefault("attention_mask", batch.real.long())  # transformers takes its mean by it
        inputs = by_choice(model.config.model_type, inputs, CHOICES)
    return model(**inputs, **labels)


def span_loss(out, batch: Batch, labels: dict[str, torch.Tensor]) -> torch.Tensor:
    """The literal loss over each sequence's own tokens: transformers' softmax would include the padding."""
    losses = []
    for kind in ("start", "end"):
        targets = []
        for row, position in zip(batch.real, labels[f"{kind}_positions"].tolist(), strict=True):
            inside = position < len(row) and bool(row[position])
            targets.append(int(row[:position].sum()) if inside else -1)
        packed = out[f"{kind}_logits"][batch.real]
        losses.append(reference.sequence_cross_entropy(packed, batch.cu_seqlens, torch.tensor(targets)))
    return sum(losses) / 2


def run(model, head: str, batch: Batch, labels: dict[str, torch.Tensor], literal_loss: bool = False):
    """(compared outputs, loss, every gradient of a scalar made of both) of one of the three models."""
    model_type, dtype = model.config.model_type, next(model.parameters()).dtype
    labels = {name: t.to(dtype) if t.is_floating_point() else t for name, t in labels.items()}  # for torch before 2.13
    out = call(model, head, batch, labels)
    rows = batch.real.any(1)
    rows = rows.view(-1, CHOICES) if head == "MultipleChoice" else rows
    chosen = {name: out[name][batch.real] for name in TOKEN_FIELDS if out.get(name) is not None}
    chosen |= {name: out[name][rows] for name in SEQUENCE_FIELDS if out.get(name) is not None}
    if out.get("logits") is not None:
        chosen["logits"] = out["logits"][batch.real if token_level(model_type, head) else rows]
    loss = span_loss(out, batch, labels) if literal_loss else out.get("loss")
    scalar = sum((t * random_like(t.shape, seed).to(t.dtype)).sum() for seed, t in enumerate(chosen.values()))
    (scalar if loss is None else scalar + loss).backward()
    return out, chosen, loss, gradients(model)


def _the_one_that_errs_more(a: torch.Tensor, b: torch.Tensor, oracle: torch.Tensor) -> torch.Tensor:
    return max((a, b), key=lambda t: float((t.double() - oracle).abs().max()) if t.numel() else 0.0)


def check(
    config,
    head: str,
    batch: Batch,
    labels: dict[str, torch.Tensor],
    dtype: torch.dtype,
    change: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> Trio:
    """Raises AssertionError where fastbert's model, in training, is not as near as it must be. Returns the models.

    change: what another library makes of each of the three.
    """
    trio = make_trio(config, head, dtype)
    trio = Trio(*(change(model) for model in (trio.ours, trio.baseline, trio.oracle)))
    assert list(trio.ours.state_dict()) == list(trio.baseline.state_dict())  # the parameters' order is an optimizer's
    literal = head == "QuestionAnswering" and not batch.real.all()
    out, actual, loss, grads = run(trio.ours, head, batch, labels)
    form = config.family.heads.get(head)
    form = form if isinstance(form, ClassifierHead) else None
    last = form is not None and form.pooling_of(config) == "last"
    if form is not None and form.last_by_id:
        their_batch = batch.with_pads(config.pad_token_id)
    elif head in POOLED and not batch.real[:, -1 if last else 0].all():
        labels = {name: batch.front(t, last) if t.shape == batch.real.shape else t for name, t in labels.items()}
        their_batch = batch.real_tokens_first(last)
    else:
        their_batch = batch
    if form is not None and form.pooling_of(config) in ("mean", "late"):
        their_batch = their_batch.with_a_token_in_each()
    _, oracle, oracle_loss, oracle_grads = run(trio.oracle, head, their_batch, labels, literal)
    _, baseline, baseline_loss, baseline_grads = run(trio.baseline, head, their_batch, labels, literal)

    assert list(actual) == list(oracle) == list(baseline) and actual
    for name in actual:
        assert_close_to_reference(actual[name], oracle[name], baseline[name], GRADIENT_FACTOR, name)
    assert (loss is None) == (oracle_loss is None) == (not labels)
    if loss is not None:
        assert loss.dtype == torch.float32
        if head == "MultipleChoice" and batch.real.any(1).all():
            # One number of six logits: their rounding, which was judged above, would be all of its error.
            logits, targets = actual["logits"].detach().view(-1, CHOICES), labels["labels"]
            oracle_loss, baseline_loss = (cross_entropy(logits.to(t), targets) for t in (torch.float64, torch.float32))
        assert_close_to_reference(
            loss.to(dtype), oracle_loss.double(), baseline_loss.to(dtype), GRADIENT_FACTOR, "loss"
        )
    for name, value in out.items():
        assert torch.isfinite(value).all(), f"{name} is not finite"
        token = name in TOKEN_FIELDS or (name == "logits" and token_level(config.model_type, head))
        assert not token or (value[~batch.real] == 0).all(), f"{name} is not zero at padding"

    assert set(grads) == set(oracle_grads)
    for name, grad in grads.items():
        assert (grad is None) == (oracle_grads[name] is None), f"{name}: {grad}, theirs {oracle_grads[name]}"
    ours, theirs, eager = (leaf_gradients(g) for g in (grads, oracle_grads, baseline_grads))
    if batch.real.sum(1).max() > LONGEST_SQUARE:
        trio.ours.zero_grad()
        with delta_of_the_output():
            fused = leaf_gradients(run(trio.ours, head, batch, labels)[3])
        eager = {leaf: _the_one_that_errs_more(eager[leaf], fused[leaf], theirs[leaf]) for leaf in eager}
    for leaf, grad in ours.items():
        assert_close_to_reference(grad, theirs[leaf], eager[leaf], GRADIENT_FACTOR, f"gradient of {leaf}")
    return trio
