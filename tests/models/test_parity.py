"""Every family and head against transformers: outputs, loss and every gradient, on real tokens.

The oracle is transformers' eager model in float64, the baseline the same model in the tested dtype. A covering design
stands in for the full product: every head of every family meets every mask pattern, and the four configurations of
`family_configs.make_config` rotate over heads and masks, so that every (head, configuration) and, within each family,
every (configuration, mask) is met. `make test` has each form of a head once, in the first family that has it: with
another mask and configuration than the next head of its family, and in the other dtype; `make test-full` has the rest.
"""

from __future__ import annotations

import pytest
import torch
from batches import Batch, make_batch, make_labels
from family_configs import CHOICES, NUM_CONFIGS, config_for, make_config
from full import left_to_full, thinned
from hf import FAMILIES, MODELS, families_axis, is_left_out, make_trio, models_axis, place_of_head, random_like
from kinds import of_every_kind_of_head
from parity import call, check
from theirs import by_choice

from fastbert import families
from fastbert.backend import use_backend
from fastbert.families.schema import Share
from fastbert.models.baby import baby_config
from fastbert.testing.cases import DTYPES, MASKS

dtype_axis = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def is_shown_by_others(p) -> bool:
    """Each head has one mask, in one of the dtypes; a family's heads have different ones."""
    dtype = (place_of_head(p) + FAMILIES.index(p["model_type"]) // len(MASKS)) % len(DTYPES)
    return DTYPES.index(p["dtype"]) != dtype or is_left_out(p, MASKS.index(p["pattern"]), of=len(MASKS))


@of_every_kind_of_head()
@left_to_full(is_shown_by_others)
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


@thinned(4)
@dtype_axis
@pytest.mark.parametrize("head", sorted(h for m, h in MODELS if m == "megatron-bert"))
def test_the_baby_model(head, dtype):
    config = baby_config(vocab_size=50, classifier_dropout=0.0, num_labels=2, max_position_embeddings=16)
    assert (config.hidden_size, config.hidden_act) == (64, "relu")
    batch = make_batch(config, "right")
    check(config, head, batch, make_labels(config, head, batch, seed=0), dtype)


@thinned(24)  # what a kind of labels is, no family knows
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


@thinned(4)
@pytest.mark.parametrize(
    "act", ["gelu", "gelu_new", "gelu_python", "gelu_pytorch_tanh", "gelu_fast", "relu", "silu", "tanh"]
)
@pytest.mark.parametrize(
    ("model_type", "head"), [("bert", "MaskedLM"), ("roberta", "MaskedLM"), ("electra", "PreTraining")]
)
def test_activations(model_type, head, act):
    """Each name means transformers' function, in the layers and in the heads that follow the config."""
    config = config_for(model_type, head, 0, hidden_act=act, num_hidden_layers=2)
    batch = make_batch(config, "none")
    check(config, head, batch, make_labels(config, head, batch, seed=1), torch.float32)


def is_seen_by_check(p) -> bool:
    """Each head has one configuration; of eight heads seven are looked at by test_outputs_loss_and_gradients alone."""
    return MODELS.index((p["model_type"], p["head"])) % NUM_CONFIGS != p["index"] or is_left_out(p, of=8)


@left_to_full(is_seen_by_check)
@pytest.mark.parametrize("index", range(NUM_CONFIGS))
@models_axis
def test_state_dict_and_parameter_order(model_type, head, index):
    """The same keys in the same order: an optimizer's saved state goes by the order of the parameters."""
    config = config_for(model_type, head, index)
    trio = make_trio(config, head, torch.float32)
    assert list(trio.ours.state_dict()) == list(trio.baseline.state_dict())
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


@of_every_kind_of_head()
@left_to_full(lambda p: is_left_out(p, of=6))  # those of the encoder are every head's
@models_axis
def test_every_dropout_is_where_transformers_has_it(model_type, head, monkeypatch):
    different = {"hidden_dropout_prob": 0.11, "attention_probs_dropout_prob": 0.12, "classifier_dropout": 0.13}
    if model_type == "distilbert":
        different["qa_dropout"] = 0.14
    if model_type == "electra":
        different["summary_last_dropout"] = 0.15
    if model_type == "megatron-bert":
        different["classifier_dropout"] = None
    family = families.FAMILIES[model_type]
    different = {name: p for name, p in different.items() if name not in family.fixed}
    own = [name for name, kind in family.fields.items() if isinstance(kind, Share)]
    different |= {name: 0.16 + i / 100 for i, name in enumerate(own)}
    config = make_config(model_type, 0, num_labels=2, num_hidden_layers=2, **different)
    trio, batch = make_trio(config, head, torch.float32), make_batch(config, "none")
    if head == "MultipleChoice":
        batch.inputs = by_choice(model_type, batch.inputs, CHOICES)
    ours, theirs = (dropout_probabilities(model, batch, monkeypatch) for model in (trio.ours, trio.baseline))
    assert ours == theirs and theirs
