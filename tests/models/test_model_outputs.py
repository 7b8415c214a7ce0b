"""ModelOutput beside transformers' own, and logits that are computed only if they are read."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
import torch.nn.functional as F
import transformers
from batches import make_batch
from family_configs import config_for, make_config
from hf import make_trio
from torch.utils import _pytree as pytree

from fastbert.models.classes import CLASSES
from fastbert.models.outputs import ModelOutput
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference


@pytest.fixture
def both():
    """The output of the same call in fastbert and in transformers, with extras and without a loss."""
    config = config_for("bert", "Model")
    trio, batch = make_trio(config, "Model", torch.float32), make_batch(config)
    with torch.no_grad():
        ours, theirs = (m(**batch.inputs, output_hidden_states=True) for m in (trio.ours, trio.baseline))
    return ours, theirs


@pytest.fixture
def masked_lm():
    """A masked LM, a call's arguments, and a list that grows whenever the logits of all tokens are computed."""
    config = config_for("bert", "MaskedLM", num_hidden_layers=2)
    model, calls = CLASSES["bert", "MaskedLM"](config), []
    compute = model.masked_lm_logits
    model.masked_lm_logits = lambda *args: calls.append(1) or compute(*args)
    batch = make_batch(config)
    return model, {**batch.inputs, "labels": batch.inputs["input_ids"].where(batch.real, -100)}, calls


def test_reads_as_transformers(both):
    ours, theirs = both
    assert isinstance(theirs, transformers.utils.ModelOutput) and isinstance(ours, dict)
    assert (
        list(ours)
        == list(theirs.keys())
        == list(ours.keys())
        == ["last_hidden_state", "pooler_output", "hidden_states"]
    )
    assert len(ours) == len(theirs) == len(ours.to_tuple()) == len(ours.values()) == 3
    assert ours.attentions is None and theirs.attentions is None and "attentions" not in ours
    for out in both:
        assert (
            out["pooler_output"]
            is out.pooler_output
            is out[1]
            is out[-2]
            is out.to_tuple()[1]
            is out.get("pooler_output")
        )
        assert out[:2] == (out.last_hidden_state, out.pooler_output) and isinstance(out[0:1], tuple)
        assert [name for name, _ in out.items()] == list(out.keys())
        with pytest.raises(KeyError):
            out["attentions"]
        with pytest.raises(IndexError):
            out[3]
        with pytest.raises(AttributeError):
            out.nothing_of_that_name  # noqa: B018
        out.last_hidden_state = out.pooler_output
        assert out["last_hidden_state"] is out.pooler_output
    assert ours.get("attentions") is None and ours.get("attentions", 3) == 3


def test_they_are_data_classes_as_theirs_are(both):
    for out in both:
        assert {"last_hidden_state", "pooler_output"} <= {field.name for field in dataclasses.fields(type(out))}
        changed = dataclasses.replace(out, pooler_output=None)
        assert type(changed) is type(out) and list(changed) == ["last_hidden_state", "hidden_states"]
        assert changed.last_hidden_state is out.last_hidden_state


def test_return_dict_false(both):
    config = config_for("bert", "SequenceClassification")
    trio, batch = make_trio(config, "SequenceClassification", torch.float32), make_batch(config)
    labels = torch.zeros(6, dtype=torch.long)
    outs = [
        m(**batch.inputs, labels=labels, return_dict=False, output_attentions=True) for m in (trio.ours, trio.baseline)
    ]
    for out in outs:
        assert type(out) is tuple and [type(field) for field in out] == [torch.Tensor, torch.Tensor, tuple]
    assert outs[0][1].shape == outs[1][1].shape and len(outs[0][2]) == len(outs[1][2])
    out = trio.ours(**batch.inputs)
    assert list(out) == ["logits"] and out.loss is None


def test_copies(both):
    ours, _ = both
    for other in (pickle.loads(pickle.dumps(ours)), copy.copy(ours), copy.deepcopy(ours), ModelOutput(ours)):
        assert type(other) is ModelOutput and list(other) == list(ours)
        assert torch.equal(other.pooler_output, ours.pooler_output) and len(other.hidden_states) == 5
    assert type(dict(ours)) is dict and dict(ours).keys() == ours.keys()


def test_pytree(masked_lm):
    """What walks a module's outputs (FSDP, tree_map) finds the tensors, keeps the class, and computes no logits."""
    model, inputs, calls = masked_lm
    out = model(**inputs, output_hidden_states=True)
    leaves = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
    assert any(leaf is out.loss for leaf in leaves) and len(leaves) == 1 + len(out.hidden_states)
    mapped = pytree.tree_map(lambda x: x * 2 if isinstance(x, torch.Tensor) else x, out)
    assert type(mapped) is ModelOutput and list(mapped) == list(out) and torch.equal(mapped.loss, 2 * out.loss)
    assert not calls
    assert mapped.logits.shape == (6, 11, 43) and len(calls) == 1


READS = {
    "attribute": lambda out: out.logits,
    "key": lambda out: out["logits"],
    "position": lambda out: out[1],
    "slice": lambda out: out[:2][1],
    "tuple": lambda out: out.to_tuple()[1],
    "get": lambda out: out.get("logits"),
    "values": lambda out: list(out.values())[1],
    "items": lambda out: dict(out.items())["logits"],
    "dict": lambda out: dict(out)["logits"],
    "unpacked": lambda out: {**out}["logits"],
    "keywords": lambda out: (lambda **fields: fields)(**out)["logits"],
    "copied": lambda out: out.copy()["logits"],
    "pop": lambda out: out.pop("logits"),
    "union": lambda out: (out | {})["logits"],
    "again": lambda out: ModelOutput(out).logits,
}


@pytest.mark.parametrize("how", READS)
def test_deferred_logits(masked_lm, how):
    """With labels, no logits of all tokens until they are read, once, in any way; then the usual ones."""
    model, inputs, calls = masked_lm
    out = model(**inputs)
    assert out.loss is out[0] is out["loss"] and out.attentions is None and "logits" in out and len(out) == 2
    assert repr(out) and not calls
    logits = READS[how](out)
    assert len(calls) == 1
    if how not in ("pop", "copied", "union", "again"):
        assert READS[how](out) is logits and out.logits is logits and len(calls) == 1
    labels = inputs.pop("labels")
    without = model(**inputs)
    assert torch.equal(without.logits, logits) and without.loss is None
    real = inputs["attention_mask"].bool()
    oracle, baseline = (F.cross_entropy(x[real], labels[real]) for x in (without.logits.double(), without.logits))
    assert_close_to_reference(out.loss, oracle, baseline, GRADIENT_FACTOR)


def test_pickled_deferred_logits(masked_lm):
    model, inputs, _ = masked_lm
    with torch.no_grad():
        out = model(**inputs)
        assert torch.equal(pickle.loads(pickle.dumps(out)).logits, model(**inputs).logits)


@pytest.mark.parametrize("how", ["no_grad", "inference_mode", "autocast", "grad"])
def test_deferred_logits_keep_the_mode_of_their_call(masked_lm, how):
    """Read outside of the block that the call was in, or inside another, they are what they would have been there."""
    model, inputs, _ = masked_lm
    labels = inputs.pop("labels")
    block = {
        "no_grad": torch.no_grad(),
        "inference_mode": torch.inference_mode(),
        "autocast": torch.autocast("cpu", torch.bfloat16),
        "grad": torch.enable_grad(),
    }[how]
    with block:
        expected, out, other = model(**inputs).logits, model(**inputs, labels=labels), model(**inputs, labels=labels)
    outside = out.logits
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled() and not torch.is_autocast_enabled("cpu")
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        inside = other.logits
        assert not torch.is_grad_enabled() and torch.is_autocast_enabled("cpu")
    for logits in (outside, inside):
        assert logits.dtype == expected.dtype and torch.equal(logits, expected)
        assert logits.requires_grad == expected.requires_grad == (how in ("autocast", "grad"))
        assert logits.is_inference() == expected.is_inference() == (how == "inference_mode")


@pytest.mark.parametrize("model_type", ["bert", "albert", "megatron-bert"])
def test_deferred_prediction_logits(model_type):
    config = config_for(model_type, "PreTraining", num_labels=2, num_hidden_layers=2)
    model, batch = CLASSES[model_type, "PreTraining"](config), make_batch(config)
    inputs, labels = batch.inputs, batch.inputs["input_ids"].where(batch.real, -100)
    pair = config.family.heads["PreTraining"].pair_label
    out = model(**inputs, labels=labels, **{pair: torch.zeros(6, dtype=torch.long)})
    assert list(out)[:2] == ["loss", "prediction_logits"]
    assert torch.equal(out.prediction_logits, model(**inputs).prediction_logits)
    # As transformers: no loss without both kinds of labels.
    assert model(**inputs, labels=labels).loss is None


def test_gradients_flow_through_loss_and_read_logits():
    """The loss and the logits share the graph: their gradients add up."""
    config = make_config("bert")
    model, batch = CLASSES["bert", "MaskedLM"](config), make_batch(config)
    labels = batch.inputs["input_ids"].where(batch.real, -100)

    def grad(use, dtype=torch.float32) -> torch.Tensor:
        model.to(dtype).zero_grad()
        use(model(**batch.inputs, labels=labels)).backward()
        return model.cls.predictions.transform.dense.weight.grad.clone()

    def both(out):
        return out.loss + out.logits.square().mean()

    baseline = grad(lambda out: out.loss) + grad(lambda out: out.logits.square().mean())
    assert_close_to_reference(grad(both), grad(both, torch.float64), baseline, GRADIENT_FACTOR)


@pytest.mark.parametrize("asked", [[0, 2], 1, [-1, 0], [99, 1], [99], 99, -9, 0, []], ids=str)
def test_some_of_the_hidden_states(asked):
    """As transformers 5.23 has it; versions before give all."""
    pytest.importorskip("transformers", minversion="5.23")
    config = config_for("bert", "Model")
    trio, batch = make_trio(config, "Model", torch.float32), make_batch(config, "right")
    ours, theirs, oracle = (
        m(**batch.inputs, output_hidden_states=asked).hidden_states for m in (trio.ours, trio.baseline, trio.oracle)
    )
    assert (ours is None) == (theirs is None)
    assert [x is None for x in ours or ()] == [x is None for x in theirs or ()]
    for found, near, exact in zip(ours or (), theirs or (), oracle or (), strict=True):
        if found is not None:
            assert_close_to_reference(found[batch.real], exact[batch.real], near[batch.real], GRADIENT_FACTOR)
