"""Heads that look at padding: labels of tokens there, and question answering over real tokens only."""

# ruff: noqa: F811  (a fixture that is imported is also an argument)
from __future__ import annotations

import copy
import pickle

import pytest
import torch
from family_configs import config_for
from hf import make_hf, make_oracle, make_ours
from test_accelerate import IDS, MASK, assert_as_transformers, no_fallback, one_thread, small  # noqa: F401
from torch import nn

import fastbert
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

LABELS = torch.tensor([[1, 0, 2, 1], [2, 1, 0, 0]])  # 0 at padding


def loss_of(model, **inputs) -> torch.Tensor:
    return model(input_ids=IDS, attention_mask=MASK, **inputs).loss


@pytest.mark.parametrize("head", ("TokenClassification", "MaskedLM", "PreTraining"))
def test_labels_at_padding_train_transformers_own_code(head, packed_layers):
    model = small(head).train()
    given = {"labels": LABELS} | ({"next_sentence_label": torch.tensor([0, 1])} if head == "PreTraining" else {})
    expected = loss_of(copy.deepcopy(model), **given)
    model = pickle.loads(pickle.dumps(fastbert.accelerate(model)))
    with pytest.warns(UserWarning, match="labels other than -100 at padding"):
        assert torch.equal(loss_of(model, **given), expected)
    assert not packed_layers
    assert "labels other than -100" in fastbert.status(model).why_not
    # The next call is judged by itself.
    ignored = given | {"labels": LABELS.where(MASK.bool(), -100)}
    oracle, near = (loss_of(m, **ignored) for m in (make_oracle(fastbert.restore(copy.deepcopy(model))), small(head)))
    assert_close_to_reference(loss_of(model, **ignored), oracle.double(), near, GRADIENT_FACTOR)
    assert len(packed_layers) == 3
    model(input_ids=IDS, attention_mask=MASK)
    assert len(packed_layers) == 6


def test_a_discriminators_labels_at_padding_do_not_count(packed_layers, no_fallback):
    """ELECTRA's loss goes by the mask."""
    model = small("PreTraining", "electra")
    labels = LABELS.clamp(max=1)
    near, oracle = (loss_of(m, labels=labels) for m in (copy.deepcopy(model), make_oracle(model)))
    assert_close_to_reference(
        loss_of(fastbert.accelerate(model), labels=labels), oracle.double(), near, GRADIENT_FACTOR
    )
    assert len(packed_layers) == 3


@pytest.mark.parametrize("head", ("TokenClassification", "MaskedLM"))
def test_logits_at_padding_are_what_a_head_makes_of_zeros(head):
    """Transformers' head, whose module sees zeros there; our own class gives zeros."""
    config = config_for("bert", head)
    model = make_hf(config, head).eval()
    ours = make_ours(config, head, model).eval()
    padding = ~MASK.bool()
    of_zeros = (model.classifier if head == "TokenClassification" else model.cls)(
        torch.zeros(1, model.config.hidden_size)
    )
    if head == "TokenClassification":
        assert torch.equal(of_zeros[0], model.classifier.bias)
    with torch.no_grad():
        found = fastbert.accelerate(model)(IDS, MASK).logits[padding]
        assert fastbert.status(model).packed == 1 and not ours(IDS, MASK).logits[padding].any()
    assert found.any() and torch.equal(found, found[:1].expand_as(found))
    near = of_zeros.detach().expand_as(found)
    assert_close_to_reference(found, near.double(), near, GRADIENT_FACTOR)


@pytest.mark.full  # LoRA and torch.compile each by itself: test_accelerate_integrations.py, test_status_wrappers.py
def test_labels_at_padding_under_lora_and_compile(packed_layers):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(small("TokenClassification"), peft.LoraConfig(r=2, target_modules=["query"]))
    expected = loss_of(copy.deepcopy(model), labels=LABELS)
    with pytest.warns(UserWarning, match="labels other than -100 at padding"):
        assert torch.equal(loss_of(fastbert.accelerate(model), labels=LABELS), expected)
    model = small("TokenClassification")
    expected = loss_of(copy.deepcopy(model), labels=LABELS)
    compiled = torch.compile(fastbert.accelerate(model), backend="eager")
    with pytest.warns(UserWarning, match="labels other than -100 at padding"):
        assert torch.equal(loss_of(compiled, labels=LABELS), expected)
    assert not packed_layers
    loss_of(compiled, labels=LABELS.where(MASK.bool(), -100))
    assert len(packed_layers) == 3


def loss_alone(model, ids, lengths, *positions) -> torch.Tensor:
    """The loss of spans, by each text alone; positions that are not in it do not count."""
    outputs, losses = [model(ids[i : i + 1, :n]) for i, n in enumerate(lengths)], []
    for name, places in zip(("start_logits", "end_logits"), positions, strict=True):
        scores = zip([out[name][0].log_softmax(-1) for out in outputs], places.tolist(), strict=True)
        losses.append(torch.stack([-score[at] for score, at in scores if at < len(score)]).mean())
    return (losses[0] + losses[1]) / 2


@pytest.mark.parametrize("model_type", ("bert", "modernbert", "distilbert"))
def test_spans_over_real_tokens(model_type, packed_layers, no_fallback):
    """Against each text alone, without padding, where transformers' softmax is the same."""
    config = config_for(model_type, "QuestionAnswering")
    plain = make_hf(config, "QuestionAnswering").eval()
    lengths, starts, ends = (7, 4, 2), torch.tensor([1, 3, 20]), torch.tensor([6, 5, 1])  # 20, 5: not in the text
    ids = torch.randint(3, 43, (3, 7))
    mask = (torch.arange(7) < torch.tensor(lengths)[:, None]).long()
    model = fastbert.accelerate(copy.deepcopy(plain), spans_over_real_tokens=True)
    ours = model(ids, attention_mask=mask, start_positions=starts, end_positions=ends)
    assert len(packed_layers) == config.num_hidden_layers
    oracle, near = (loss_alone(m, ids, lengths, starts, ends) for m in (make_oracle(plain), plain))
    assert_close_to_reference(ours.loss, oracle.double(), near, GRADIENT_FACTOR)
    for i, n in enumerate(lengths):
        real = ours.start_logits[i, :n], make_oracle(plain)(ids[i : i + 1, :n]).start_logits[0].double()
        assert_close_to_reference(*real, plain(ids[i : i + 1, :n]).start_logits[0], GRADIENT_FACTOR)
        assert ours.start_logits[i].softmax(-1)[n:].sum() == 0
    ours.loss.backward()
    loss, start, end = model(ids, mask, start_positions=starts, end_positions=ends, return_dict=False)
    assert torch.equal(loss, ours.loss) and torch.equal(start, ours.start_logits) and end.shape == (3, 7)
    assert model(ids, attention_mask=mask).loss is None
    assert list(fastbert.restore(model)(ids).start_logits[0]) == list(plain(ids).start_logits[0])


def test_spans_can_be_chosen_later_and_only_where_there_are_some(packed_layers):
    model = fastbert.accelerate(small("QuestionAnswering"))
    with pytest.warns(UserWarning, match="spans_over_real_tokens=True"):
        model(IDS, attention_mask=MASK)
    assert not packed_layers
    fastbert.accelerate(model, spans_over_real_tokens=True)(IDS, attention_mask=MASK)
    assert len(packed_layers) == 3
    with pytest.raises(ValueError, match=r"spans_over_real_tokens is for .* BertForTokenClassification has none"):
        fastbert.accelerate(small("TokenClassification"), spans_over_real_tokens=True)


def test_span_heads_read_padding(packed_layers):
    model = fastbert.accelerate(small("QuestionAnswering"))
    with pytest.warns(UserWarning, match=r"bert \(BertModel\) .* softmax runs over the padding"):
        assert_as_transformers(model, input_ids=IDS, attention_mask=MASK)
    assert not packed_layers
    assert assert_as_transformers(model, input_ids=IDS) is not None and packed_layers


def test_generator_and_discriminator(packed_layers, no_fallback):
    both = nn.ModuleDict({"generator": small("MaskedLM", "electra"), "discriminator": small("PreTraining", "electra")})
    for model in fastbert.accelerate(both).values():
        assert_as_transformers(model, input_ids=IDS, attention_mask=MASK)
    assert len(packed_layers) == 6
