"""ElectraForJointPreTraining against its definition, with transformers' two models (Clark et al. 2020, section 2)."""

from __future__ import annotations

import copy

import pytest
import torch
from batches import make_batch
from family_configs import config_for, make_config
from full import halved
from hf import hf_class, make_hf, make_ours
from seeds import manual_seed, torch_generator
from shares import assert_share
from torch import nn

from fastbert import ElectraForJointPreTraining
from fastbert.models.classes import CLASSES
from fastbert.testing.cases import DTYPES
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

SHARED = ("word_embeddings", "position_embeddings", "token_type_embeddings")
MASK_ID = 42


def make_pair(dtype: torch.dtype = torch.float32, generator_changes: dict | None = None):
    """transformers' generator, a quarter of the width, and discriminator, with random weights."""
    small = {"hidden_size": 32, "intermediate_size": 24, "num_attention_heads": 1, **(generator_changes or {})}
    generator = make_hf(config_for("electra", "MaskedLM", 0, **small), "MaskedLM", dtype, seed=1)
    return generator, make_hf(config_for("electra", "PreTraining", 0), "PreTraining", dtype, seed=2)


def make_joint(pair, **options) -> ElectraForJointPreTraining:
    heads = ("MaskedLM", "PreTraining")
    configs = [
        make_config(
            "electra",
            0,
            **{
                name: getattr(m.config, name)
                for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "embedding_size")
            },
        )
        for m in pair
    ]
    models = (make_ours(config, head, m) for config, head, m in zip(configs, heads, pair, strict=True))
    return ElectraForJointPreTraining(*models, **options).train()


def masked_batch(pattern: str = "right"):
    """(a batch with MASK_ID where labels hold the original id, the labels)"""
    batch = make_batch(make_config("electra"), pattern)
    chosen = batch.real & (torch.rand(batch.real.shape, generator=torch_generator(4)) < 0.4)
    labels = batch.inputs["input_ids"].where(chosen, -100)
    batch.inputs["input_ids"] = batch.inputs["input_ids"].masked_fill(chosen, MASK_ID)
    return batch, labels


def run(joint, inputs, labels, seed: int = 0):
    """(output, what the discriminator was fed): input_ids and labels."""
    seen = {}
    hook = joint.discriminator.register_forward_pre_hook(
        lambda module, args, kwargs: seen.update(kwargs, input_ids=args[0]), with_kwargs=True
    )
    manual_seed(seed)
    out = joint(**inputs, labels=labels)
    hook.remove()
    return out, seen["input_ids"], seen["labels"]


def by_hand(pair, inputs, labels, corrupted, replaced, weight: float):
    """(loss, the gradients of each model's parameters) with transformers' two models, their embeddings shared."""
    generator, discriminator = pair
    for name in SHARED:
        ours, theirs = (getattr(m.electra.embeddings, name) for m in pair)
        ours.weight = theirs.weight
    generator.tie_weights()
    assert generator.generator_lm_head.weight is discriminator.electra.embeddings.word_embeddings.weight
    generator_loss = generator(**inputs, labels=labels).loss
    discriminator_loss = discriminator(**{**inputs, "input_ids": corrupted}, labels=replaced).loss
    loss = generator_loss + weight * discriminator_loss
    loss.backward()
    return loss, [{name: p.grad for name, p in m.named_parameters(remove_duplicate=False)} for m in pair]


@halved
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pattern", ["none", "right", "holes"])
def test_loss_and_gradients(pattern, dtype):
    """Generator cross-entropy + 50 x discriminator binary cross-entropy, on the ids that the generator sampled."""
    pair = make_pair(dtype)
    joint = make_joint(pair)
    batch, labels = masked_batch(pattern)
    out, corrupted, replaced = run(joint, batch.inputs, labels)
    out.loss.backward()
    oracle_pair = copy.deepcopy(nn.ModuleList(pair)).double()
    arguments = (batch.inputs, labels, corrupted, replaced, 50.0)
    (oracle, oracle_grads), (baseline, baseline_grads) = by_hand(oracle_pair, *arguments), by_hand(pair, *arguments)
    assert_close_to_reference(out.loss.to(dtype), oracle.double(), baseline.to(dtype), GRADIENT_FACTOR, "loss")
    models = (joint.generator, joint.discriminator)
    for model, truth, eager in zip(models, oracle_grads, baseline_grads, strict=True):
        grads = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
        assert set(grads) == set(truth)
        for name in grads:
            if name.endswith("weight"):  # each leaf's weight and bias as one tensor, as in test_parity.py
                bias = name.removesuffix("weight") + "bias"
                names = [name] + ([bias] if bias in grads else [])
                joined = [torch.cat([g[n].flatten() for n in names]) for g in (grads, truth, eager)]
                assert_close_to_reference(*joined, GRADIENT_FACTOR, f"gradient of {name}")


def test_what_the_discriminator_sees():
    """Only labelled tokens change; they are replaced where the sample is not the original; padding is left alone."""
    joint, (batch, labels) = make_joint(make_pair()), masked_batch("right")
    ids = batch.inputs["input_ids"]
    out, corrupted, replaced = run(joint, batch.inputs, labels)
    chosen = labels != -100
    assert torch.equal(corrupted[~chosen], ids[~chosen]) and (replaced[~chosen] == 0).all()
    assert torch.equal(replaced[chosen], (corrupted != labels)[chosen].long()) and replaced.sum() > 0
    assert out.logits.shape == ids.shape and (out.logits[~batch.real] == 0).all()
    _, again, _ = run(joint, batch.inputs, labels)
    _, other, _ = run(joint, batch.inputs, labels, seed=1)
    assert torch.equal(again, corrupted) and not torch.equal(other, corrupted)


def test_samples_follow_the_generator():
    """A generator that is sure of one token replaces by it; where that is the original, nothing counts as replaced."""
    joint, (batch, labels) = make_joint(make_pair()), masked_batch("right")
    chosen = labels != -100
    with torch.no_grad():
        joint.generator.generator_lm_head.bias[7] = 1e4
    _, corrupted, _ = run(joint, batch.inputs, labels)
    assert (corrupted[chosen] == 7).all()
    _, corrupted, replaced = run(joint, batch.inputs, torch.where(chosen, 7, -100))
    assert (corrupted[chosen] == 7).all() and (replaced == 0).all()
    # Half and half: both tokens come, in about equal numbers.
    with torch.no_grad():
        joint.generator.generator_lm_head.bias[8] = 1e4
        joint.generator.generator_predictions.LayerNorm.weight.zero_()
        joint.generator.generator_predictions.LayerNorm.bias.zero_()
    sampled = torch.cat([run(joint, batch.inputs, labels, seed)[1][chosen] for seed in range(20)])
    assert ((sampled == 7) | (sampled == 8)).all()
    assert_share(sampled == 7, 0.5)


def test_no_gradient_through_the_sample():
    """The discriminator's loss reaches the generator through the shared embeddings alone."""
    pair, (batch, labels) = make_pair(), masked_batch("right")
    grads = []
    for weight in (50.0, 0.0):
        joint = make_joint(pair, discriminator_weight=weight)
        run(joint, batch.inputs, labels)[0].loss.backward()
        grads.append({name: p.grad for name, p in joint.generator.named_parameters()})
    for name, grad in grads[0].items():
        shared = any(part in name for part in SHARED)
        assert (grad != 0).any() and torch.equal(grad, grads[1][name]) != shared, name


def test_packed_equals_padded():
    pair, (batch, labels) = make_pair(), masked_batch("right")
    padded, packed = make_joint(pair), make_joint(pair)
    one, _, _ = run(padded, batch.inputs, labels)
    inputs = {name: t for name, t in batch.packed().items() if name != "position_ids"}
    other, _, _ = run(packed, inputs, labels[batch.real])
    assert torch.equal(one.loss, other.loss) and torch.equal(one.logits[batch.real], other.logits)
    for out in (one, other):
        out.loss.backward()
    for (name, a), (_, b) in zip(padded.named_parameters(), packed.named_parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name


def test_odd_but_valid_inputs():
    """Ids of another dtype and layout, and a batch without a label: the same bits, and no NaN."""
    joint, (batch, labels) = make_joint(make_pair()), masked_batch("right")
    expected = run(joint, batch.inputs, labels)[0].loss
    odd = {name: t.int().T.contiguous().T for name, t in batch.inputs.items()}
    assert torch.equal(run(joint, odd, labels)[0].loss, expected)
    loss = run(joint, batch.inputs, torch.full_like(labels, -100))[0].loss
    loss.backward()
    assert torch.isfinite(loss) and all(torch.isfinite(p.grad).all() for p in joint.parameters() if p.grad is not None)


def test_sharing():
    """Embeddings of one size are one Parameter, the generator's decoder included; of two sizes they are not shared."""
    joint = make_joint(make_pair())
    embeddings = [model.base_model.embeddings for model in (joint.generator, joint.discriminator)]
    for name in SHARED:
        assert getattr(embeddings[0], name).weight is getattr(embeddings[1], name).weight
    assert joint.generator.generator_lm_head.weight is embeddings[1].word_embeddings.weight
    assert embeddings[0].LayerNorm.weight is not embeddings[1].LayerNorm.weight
    apart = make_joint(make_pair(generator_changes={"embedding_size": 32}))
    first, second = (model.base_model.embeddings for model in (apart.generator, apart.discriminator))
    assert all(getattr(first, name).weight is not getattr(second, name).weight for name in SHARED)
    with pytest.raises(ValueError, match="generator has a vocabulary of 50, discriminator of 43"):
        make_joint(make_pair(generator_changes={"vocab_size": 50}))


def test_each_model_is_saved_on_its_own(tmp_path):
    joint = make_joint(make_pair())
    for model, head in ((joint.generator, "MaskedLM"), (joint.discriminator, "PreTraining")):
        model.save_pretrained(tmp_path / head)
        theirs = hf_class("electra", head).from_pretrained(tmp_path / head).state_dict()
        ours = CLASSES["electra", head].from_pretrained(tmp_path / head).state_dict()
        for key, tensor in model.state_dict().items():
            assert torch.equal(theirs[key], tensor) and torch.equal(ours[key], tensor), key
