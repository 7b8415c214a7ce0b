"""Losses of every head: slack enters no mean, and a sequence without tokens has no label."""

from __future__ import annotations

import pytest
import torch
from family_configs import config_for
from full import halved, left_to_full, thinned
from hf import randomise
from seeds import manual_seed
from slack import assert_slack_adds_nothing, step, with_capacity

import fastbert
from fastbert.backend import use_backend
from fastbert.models.classes import CLASSES
from fastbert.models.classifiers import ClassifierModel
from fastbert.models.heads import Encoded
from fastbert.packed_inputs import ModelInputs, PackedInputs, labels_of

IDS = [[5, 6, 7, 8, 9], [10, 11, 12], [13, 14, 15, 16], [17, 18]]
TOKENS = [[-100, 2, -100, 1, -100], [0, -100, -100], [-100, -100, 1, 1], [-100, 0]]
ENDS = {"start_positions": [0, 2, 1, 0], "end_positions": [3, 2, 9, 1]}
CLASS, NUMBERS = [1, 0, 2, -100], [0.5, -100.0, 3.0, 1.0]
SEVERAL = [[1.0, 0.0, 1.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 1.0, 0.0]]
SHARES = [[0.2, 0.3, 0.5], [1.0, 0.0, 0.0], [0.1, 0.1, 0.8], [0.0, 0.5, 0.5]]
SEQUENCE, CHOICE = "SequenceClassification", "MultipleChoice"

# Family, number of its configuration, head, labels, and what the config has beside.
CASES = {
    "masked": ("bert", 0, "MaskedLM", {"labels": TOKENS}, {}),
    "masked, positions counted": ("roberta", 0, "MaskedLM", {"labels": TOKENS}, {}),
    "masked, logits of few": ("modernbert", 0, "MaskedLM", {"labels": TOKENS}, {"sparse_prediction": True}),
    "next sentence": ("bert", 0, "NextSentencePrediction", {"labels": [1, 0, 1, 0]}, {}),
    "pairs": ("bert", 0, "PreTraining", {"labels": TOKENS, "next_sentence_label": [1, 0, -100, 1]}, {}),
    "order": ("albert", 0, "PreTraining", {"labels": TOKENS, "sentence_order_label": [1, 0, 1, 0]}, {}),
    "replaced": ("electra", 0, "PreTraining", {"labels": [[t > 0 for t in row] for row in TOKENS]}, {}),
    "tokens": ("bert", 0, "TokenClassification", {"labels": TOKENS}, {}),
    "answers": ("bert", 0, "QuestionAnswering", ENDS, {}),
    "choices": ("bert", 0, CHOICE, {"labels": [1, 0]}, {}),
    "choices, last": ("roformer", 0, CHOICE, {"labels": [1, -100]}, {}),
    "classes": ("bert", 0, SEQUENCE, {"labels": CLASS}, {}),
    "classes, first": ("distilbert", 0, SEQUENCE, {"labels": CLASS}, {}),
    "classes, norm": ("modernbert", 0, SEQUENCE, {"labels": CLASS}, {}),
    "classes, mean and norm": ("modernbert", 1, SEQUENCE, {"labels": CLASS}, {}),
    "classes, late": ("eurobert", 0, SEQUENCE, {"labels": CLASS}, {}),
    "classes, mean": ("eurobert", 2, SEQUENCE, {"labels": CLASS}, {}),
    "number": ("bert", 0, SEQUENCE, {"labels": NUMBERS}, {"num_labels": 1}),
    "number, integers": ("bert", 0, SEQUENCE, {"labels": [3, -100, 2, 0]}, {"num_labels": 1}),
    "numbers": ("bert", 0, SEQUENCE, {"labels": SHARES}, {"problem_type": "regression"}),
    "several": ("bert", 0, SEQUENCE, {"labels": SEVERAL}, {}),
    "several, late": ("eurobert", 0, SEQUENCE, {"labels": SEVERAL}, {}),
    "shares": ("deberta", 0, SEQUENCE, {"labels": SHARES}, {}),
    "classes where shares may be": ("deberta", 0, SEQUENCE, {"labels": CLASS}, {}),
    "one logit": ("deberta", 0, SEQUENCE, {"labels": NUMBERS}, {"num_labels": 1}),
}  # fmt: skip


def make(case: str) -> tuple[torch.nn.Module, PackedInputs]:
    family, index, head, labels, changes = CASES[case]
    manual_seed(0)
    config = config_for(family, head, index, **{"num_hidden_layers": 1, **changes})
    model = randomise(CLASSES[family, head](config)).train()
    if case == "replaced":
        labels = {"labels": [list(map(int, row)) for row in labels["labels"]]}
    return model, fastbert.pack_inputs([IDS[:2], IDS[2:]] if head == CHOICE else IDS, **labels)


def items_of(model: torch.nn.Module, packed: PackedInputs, make_total=float) -> dict:
    names = dict.fromkeys(("labels", *labels_of(packed, {})))
    return {name: make_total(7.0 + i) for i, name in enumerate(names)}


@thinned(3)  # every loss has one of the backends, and slack of one kind or of both
@pytest.mark.parametrize(("backend", "slack"), (("auto", "all"), ("torch", "all"), ("torch", "tokens")))
@pytest.mark.parametrize("case", CASES)
def test_slack_adds_nothing(case, backend, slack):
    """To a mean, nor to a share of a larger one."""
    model, packed = make(case)
    with use_backend(backend):
        assert_slack_adds_nothing(model, packed, lambda model, given: model(given).loss, slack)
        items = items_of(model, packed)
        assert_slack_adds_nothing(model, packed, lambda m, given: m(**given, num_items_in_batch=items).loss, slack)


@left_to_full(lambda p: [*CASES].index(p["case"]) % 2 == 0)  # all go to one place with it
@pytest.mark.parametrize("case", CASES)
def test_a_total_may_be_a_tensor(case):
    """Bit for bit."""
    model, packed = make(case)
    packed = with_capacity(packed)
    totals = items_of(model, packed), items_of(model, packed, torch.tensor)
    floats, tensors = (
        step(model, model, packed, lambda m, given, items=items: m(**given, num_items_in_batch=items).loss)
        for items in totals
    )
    assert all(map(torch.equal, floats, tensors))


@left_to_full(lambda p: [*CASES].index(p["case"]) % 2 == 1)
@pytest.mark.parametrize("case", CASES)
def test_a_batch_that_is_slack_alone_has_a_loss_of_zero(case):
    model, packed = make(case)
    empty = with_capacity(packed.without_sequences())
    for items in ({}, {"num_items_in_batch": items_of(model, packed)}):
        loss, gradients = step(model, model, empty, lambda m, given, items=items: m(**given, **items).loss)
        assert loss == 0.0 and not gradients.any()


READS_SEQUENCES = [
    case
    for case, (family, index, head, _, changes) in CASES.items()
    if (
        head == "NextSentencePrediction"
        or (
            issubclass(CLASSES[family, head], ClassifierModel)
            and CLASSES[family, head].head_spec.pooling_of(config_for(family, head, index)) not in ("tokens", "late")
        )
    )
]


@halved
@pytest.mark.parametrize("value", (torch.nan, torch.inf))
@pytest.mark.parametrize("case", READS_SEQUENCES)
def test_hidden_states_of_slack_are_not_read(case, value):
    """Of heads over a vector a sequence, whose gradients none has touched."""
    model, packed = make(case)
    packed = with_capacity(packed)
    inputs = ModelInputs(packed)
    prepared = model.base_model.prepare(inputs)
    given = model.check_options(labels_of(packed, {}), prepared.batch)
    hidden = model.run_base(prepared, inputs)[0].packed.detach()

    def loss(model, hidden):
        return model.compute(Encoded(model.base_model, hidden, prepared.batch), given)["loss"]

    inside = prepared.batch.has_sequence()
    assert not inside.all()
    with use_backend("torch"):
        expected = step(model, model, hidden, loss)
        found = step(model, model, hidden.where(inside[:, None], value), loss)
    assert found[0].isfinite() and found[1].any() and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("case", READS_SEQUENCES)
def test_a_sequence_without_tokens_has_no_label(case):
    """Whatever stands there."""
    model, packed = make(case)
    padded = with_capacity(packed)
    other = PackedInputs({**padded, "labels": padded["labels"].clone()})
    other["labels"][len(packed["labels"]) :] = 1
    expected, found = (step(model, model, each, lambda m, given: m(given).loss) for each in (padded, other))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(("case", "count"), (("number", 4), ("number, integers", 4), ("several", 12), ("shares", 12)))
def test_numbers_count_whatever_they_are(case, count):
    """-100 among them: over all that a batch has, a share of the mean is the mean."""
    model, packed = make(case)
    labels = packed["labels"].clone()
    labels.view(-1)[1] = -100
    packed = PackedInputs({**packed, "labels": labels})
    assert torch.equal(model(**packed, num_items_in_batch=count).loss, model(packed).loss)


def test_joint_pre_training_samples_nothing_for_slack():
    """Its one token stands for many: what they say of it must be one thing, or it is chance which one is written."""
    _, packed = make("masked")
    pair = (randomise(CLASSES["electra", head](config_for("electra", head))) for head in ("MaskedLM", "PreTraining"))
    joint, shown = fastbert.ElectraForJointPreTraining(*pair).train(), []
    joint.discriminator.register_forward_pre_hook(lambda module, given: shown.append(given[0]))
    padded, count = with_capacity(packed), packed["batch"].total_tokens
    out = joint(padded)
    assert (out.replaced[count:] == -100).all() and set(out.replaced[:count].tolist()) <= {0, 1}
    assert not shown[0][count:].any()
