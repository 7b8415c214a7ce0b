"""Every family and head against transformers: outputs, loss and every gradient, on real tokens.

The oracle is transformers' eager model in float64, the baseline the same model in the tested dtype. A covering design
stands in for the full product: every head of every family meets every mask pattern, and the four configurations
of `hf.make_config` rotate over heads and masks, so that every (head, configuration) and, within each family, every
(configuration, mask) is met. `make test` has each in one dtype, so that every head, and within each family every mask
and every configuration, is met in both; `make test-full` has the other.
"""

from __future__ import annotations

import pytest
import torch
from full import left_to_full
from hf import (
    CHOICES,
    FAMILIES,
    MODELS,
    NUM_CONFIGS,
    Batch,
    config_for,
    families_axis,
    gradients,
    leaf_gradients,
    make_batch,
    make_config,
    make_labels,
    make_trio,
    models_axis,
    random_like,
    token_level,
)
from theirs import by_choice

from fastbert.backend import use_backend
from fastbert.models.baby import baby_config
from fastbert.testing import reference
from fastbert.testing.cases import DTYPES, MASKS
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

dtype_axis = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
POOLED = ("Model", "PreTraining", "NextSentencePrediction", "SequenceClassification", "MultipleChoice")
TOKEN_FIELDS = ("last_hidden_state", "prediction_logits", "start_logits", "end_logits")
SEQUENCE_FIELDS = ("pooler_output", "seq_relationship_logits", "sop_logits")


def call(model, head: str, batch: Batch, labels: dict[str, torch.Tensor]):
    inputs = dict(batch.inputs)
    if head == "MultipleChoice":
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


def check(config, head: str, batch: Batch, labels: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    trio = make_trio(config, head, dtype)
    literal = head == "QuestionAnswering" and not batch.real.all()
    out, actual, loss, grads = run(trio.ours, head, batch, labels)
    last = getattr(config.family.heads.get(head), "pooling", None) == "last"
    if head in POOLED and not batch.real[:, -1 if last else 0].all():
        labels = {name: batch.front(t, last) if t.dim() == 2 else t for name, t in labels.items()}
        their_batch = batch.real_tokens_first(last)
    else:
        their_batch = batch
    _, oracle, oracle_loss, oracle_grads = run(trio.oracle, head, their_batch, labels, literal)
    _, baseline, baseline_loss, baseline_grads = run(trio.baseline, head, their_batch, labels, literal)

    assert list(actual) == list(oracle) == list(baseline) and actual
    for name in actual:
        assert_close_to_reference(actual[name], oracle[name], baseline[name], GRADIENT_FACTOR, name)
    assert (loss is None) == (oracle_loss is None) == (not labels)
    if loss is not None:
        assert loss.dtype == torch.float32
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
    for leaf, grad in ours.items():
        assert_close_to_reference(grad, theirs[leaf], eager[leaf], GRADIENT_FACTOR, f"gradient of {leaf}")


def is_the_other_dtype(p) -> bool:
    number, mask = MODELS.index((p["model_type"], p["head"])), MASKS.index(p["pattern"])
    return DTYPES.index(p["dtype"]) != (number + mask // 2) % 2


@left_to_full(is_the_other_dtype)
@dtype_axis
@pytest.mark.parametrize("pattern", MASKS)
@models_axis
def test_outputs_loss_and_gradients(model_type, head, pattern, dtype):
    number, mask = MODELS.index((model_type, head)), MASKS.index(pattern)
    config = config_for(model_type, head, (number + mask) % NUM_CONFIGS)
    if (model_type, head) == ("albert", "PreTraining"):
        config = config.replace(num_labels=2)  # transformers' loss of sentence order knows no other number
    batch = make_batch(config, pattern, seed=number)
    check(config, head, batch, make_labels(config, head, batch, seed=number), dtype)


@dtype_axis
@pytest.mark.parametrize("head", sorted(h for m, h in MODELS if m == "megatron-bert"))
def test_the_baby_model(head, dtype):
    config = baby_config(vocab_size=50, classifier_dropout=0.0, num_labels=2, max_position_embeddings=16)
    assert (config.hidden_size, config.hidden_act) == (64, "relu")
    batch = make_batch(config, "right")
    check(config, head, batch, make_labels(config, head, batch, seed=0), dtype)


@dtype_axis
@pytest.mark.parametrize("kind", ["regression", "several regressions", "multi_label_classification"])
@families_axis
def test_sequence_losses(model_type, kind, dtype):
    """The kinds of labels beside classes; all rows take part, so their first columns are real."""
    num_labels = 1 if kind == "regression" else 3
    config = config_for(
        model_type, "SequenceClassification", FAMILIES.index(model_type) % NUM_CONFIGS, num_labels=num_labels
    )
    if kind == "several regressions":
        config = config.replace(problem_type="regression")
    batch = make_batch(config, "right")
    labels = random_like((6, num_labels), 5).to(dtype)
    if kind == "multi_label_classification":
        labels = (labels > 0).to(dtype)
    check(config, "SequenceClassification", batch, {"labels": labels}, dtype)


@pytest.mark.parametrize(
    "act", ["gelu", "gelu_new", "gelu_python", "gelu_pytorch_tanh", "gelu_fast", "relu", "silu", "tanh"]
)
@pytest.mark.parametrize(
    ("model_type", "head"), [("bert", "MaskedLM"), ("roberta", "MaskedLM"), ("electra", "PreTraining")]
)
def test_activations(model_type, head, act):
    """Each name means transformers' function, in the layers and in the heads that follow the config."""
    config = config_for(model_type, head, 0, hidden_act=act)
    batch = make_batch(config, "none")
    check(config, head, batch, make_labels(config, head, batch, seed=1), torch.float32)


@pytest.mark.parametrize("index", range(NUM_CONFIGS))
@models_axis
def test_state_dict_and_parameter_order(model_type, head, index):
    """The same keys in the same order: an optimizer's saved state goes by the order of the parameters."""
    config = config_for(model_type, head, index)
    trio = make_trio(config, head, torch.float32)
    ours, theirs = list(trio.ours.state_dict()), list(trio.baseline.state_dict())
    if model_type == "xlm-roberta" and head != "Model":
        # transformers 5 generates this file and registers the head before the model; RoBERTa's own order holds here.
        base = [key for key in theirs if key.startswith("roberta.")]
        theirs = base + [key for key in theirs if key not in base]
    assert ours == theirs
    for name, tensor in trio.baseline.state_dict().items():
        assert torch.equal(trio.ours.state_dict()[name], tensor), name


def dropout_probabilities(model, batch: Batch, monkeypatch) -> list[float]:
    """The probability of every dropout that a training step applies, in sorted order."""
    seen: list[float] = []

    def record(x, p=0.5, training=True, inplace=False):
        seen.extend([p] if training and p > 0 else [])
        return x

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "dropout", record)
        with use_backend("torch"):  # other backends drop inside of their kernels
            call(model.train(), "Model", batch, {})
    return sorted(seen)


@models_axis
def test_every_dropout_is_where_transformers_has_it(model_type, head, monkeypatch):
    different = {"hidden_dropout_prob": 0.11, "attention_probs_dropout_prob": 0.12, "classifier_dropout": 0.13}
    if model_type == "distilbert":
        different["qa_dropout"] = 0.14
    if model_type == "electra":
        different["summary_last_dropout"] = 0.15
    if model_type == "megatron-bert":
        del different["classifier_dropout"]
    config = make_config(model_type, 0, num_labels=2, **{"classifier_dropout": None, **different})
    trio, batch = make_trio(config, head, torch.float32), make_batch(config, "none")
    if head == "MultipleChoice":
        batch.inputs = by_choice(model_type, batch.inputs, CHOICES)
    ours, theirs = (dropout_probabilities(model, batch, monkeypatch) for model in (trio.ours, trio.baseline))
    assert ours == theirs and theirs
