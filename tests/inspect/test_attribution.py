"""Integrated gradients are Captum's over transformers' model, on the same path, and complete."""

from __future__ import annotations

import pytest
import torch
from family_configs import config_for
from full import left_to_full
from hf import families_axis, make_hf, make_ours, make_trio
from kinds import of_few_kinds
from seeds import torch_generator

import fastbert
from fastbert import inspect
from fastbert.errors import InputError
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

LENGTHS = (9, 4, 6)


def texts(config) -> list[list[int]]:
    generator = torch_generator(1)
    low = 3 if (config.pad_token_id or 0) < 3 else 4
    return [torch.randint(low, config.vocab_size, (n,), generator=generator).tolist() for n in LENGTHS]


def models(model_type: str, head: str):
    config = config_for(model_type, head, 0)
    theirs = make_hf(config, head).eval()
    return config, theirs, make_ours(config, head, theirs).eval()


# Whose embeddings differ: gradients end there.
@left_to_full(lambda p: p["model_type"] not in ("albert", "bert", "esm", "modernbert"))
@families_axis
def test_they_are_captums(model_type):
    captum = pytest.importorskip("captum.attr")
    config, theirs, ours = models(model_type, "SequenceClassification")
    if config.embeddings.skips_given:
        with pytest.raises(InputError, match="takes inputs_embeds for the sum"):
            inspect.integrated_gradients(ours, fastbert.pack_inputs(texts(config)), 1)
        return
    ids = texts(config)
    found = inspect.integrated_gradients(ours, fastbert.pack_inputs(ids), 1, kept_ids=[ids[0][0]], batch_tokens=100)
    words = theirs.get_input_embeddings()
    exact = theirs.double()
    for one, attribution in zip(ids, found, strict=True):
        row = torch.tensor([one])
        filled = row.where(row == ids[0][0], config.pad_token_id)
        method = captum.IntegratedGradients(lambda embeds: exact(inputs_embeds=embeds).logits[:, 1])
        theirs_is = method.attribute(words(row), baselines=words(filled), n_steps=50).sum(-1)[0]
        error = (attribution.scores.double() - theirs_is).abs().max() / theirs_is.abs().max()
        assert error < 1e-4, (error, attribution.scores, theirs_is)
        assert attribution.completeness_error < 0.03
    assert all(
        p.requires_grad for p in ours.parameters() if p.dim() == 2 and p.shape[0] != config.max_position_embeddings
    )


@of_few_kinds()
@families_axis
def test_relevance_is_the_papers_of_transformers_attentions(model_type):
    config = config_for(model_type, "SequenceClassification", 0)
    trio = make_trio(config, "SequenceClassification", torch.float32)
    ids = texts(config)
    batch = fastbert.pack_inputs(ids)
    if config.embeddings.skips_given:
        with pytest.raises(InputError, match="takes inputs_embeds for the sum"):
            inspect.attention_relevance(trio.ours.eval(), batch, 1)
        return

    def formula(theirs, one: list[int]) -> torch.Tensor:
        output = theirs.eval()(torch.tensor([one]), attention_mask=torch.ones(1, len(one)), output_attentions=True)
        gradients = torch.autograd.grad(output.logits[0, 1], output.attentions)
        relevance = torch.eye(len(one), dtype=output.logits.dtype)
        for probs, gradient in zip(output.attentions, gradients, strict=True):
            relevance = relevance + (probs * gradient)[0].clamp(min=0).mean(0) @ relevance
        return relevance.detach()

    trained = [p.requires_grad for p in trio.ours.parameters()]
    found = inspect.attention_relevance(trio.ours.eval(), batch, 1)
    assert [p.requires_grad for p in trio.ours.parameters()] == trained
    for one, relevance in zip(ids, found, strict=True):
        assert_close_to_reference(relevance, *(formula(m, one) for m in (trio.oracle, trio.baseline)), GRADIENT_FACTOR)


def test_why_two_sentences_are_close():
    config, _, ours = models("bert", "Model")
    batch = fastbert.pack_inputs(texts(config))

    def mean(hidden, cu_seqlens):
        return torch.stack([part.mean(0) for part in hidden.split(cu_seqlens.diff().tolist())])

    with torch.no_grad():
        vectors = mean(ours(batch).last_hidden_state, batch["batch"].cu_seqlens)
    found = inspect.integrated_gradients(ours, batch, inspect.similarity(vectors[0], mean))
    expected = torch.nn.functional.cosine_similarity(vectors, vectors[:1])
    assert [a.value for a in found] == pytest.approx(expected.tolist(), rel=1e-5)
    assert all(a.completeness_error < 0.01 for a in found)


def test_targets_of_other_heads():
    config, _, ours = models("bert", "TokenClassification")
    batch = fastbert.pack_inputs(texts(config))
    found = inspect.integrated_gradients(ours, batch, inspect.token_label(2, 1))
    with torch.no_grad():
        logits, ends = ours(batch).logits, batch["batch"].cu_seqlens
    assert [a.value for a in found] == pytest.approx([float(logits[int(e) + 2, 1]) for e in ends[:-1]], rel=1e-5)
    assert all(a.completeness_error < 0.01 for a in found)
    config, _, ours = models("bert", "QuestionAnswering")
    found = inspect.integrated_gradients(ours, batch, inspect.span(1, 3))
    with torch.no_grad():
        out = ours(batch)
    at = [int(e) for e in ends[:-1]]
    expected = [float(out.start_logits[i + 1] + out.end_logits[i + 3]) for i in at]
    assert [a.value for a in found] == pytest.approx(expected, rel=1e-5)


def test_what_cannot_be_is_said():
    config, _, ours = models("bert", "SequenceClassification")
    batch = fastbert.pack_inputs(texts(config))
    with pytest.raises(InputError, match="steps is 0"):
        inspect.integrated_gradients(ours, batch, 1, steps=0)
    with pytest.raises(InputError, match=r"gives shape \(\) for"):
        inspect.integrated_gradients(ours, batch, lambda output, cu_seqlens: output["logits"].sum())
    with pytest.raises(InputError, match="training mode"):
        inspect.integrated_gradients(ours.train(), batch, 1)
