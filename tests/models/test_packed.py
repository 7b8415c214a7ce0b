"""Packed input is the padded input: the same bits; and no sequence sees another, bit for bit, in either direction."""

from __future__ import annotations

import copy

import pytest
import torch
from batches import make_batch, make_labels, token_level
from family_configs import CHOICES, config_for, has_rotary, head_of, make_config, measures_by_columns
from full import halved, left_to_full, thinned
from hf import families_axis, gradients, is_left_out, make_trio, models_axis, random_like, randomise
from kinds import of_every_kind, of_every_kind_of_head

import fastbert
from fastbert.backend import use_backend
from fastbert.families import FAMILIES
from fastbert.layers import rotary
from fastbert.models.classes import CLASSES
from fastbert.native.availability import extension_error, triton_error
from fastbert.packing import PackedBatch
from fastbert.testing.cases import DTYPES, MASKS
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

WITHOUT = ("all rows", "one row", "one token each")
TOKEN_FIELDS = ("last_hidden_state", "prediction_logits", "start_logits", "end_logits")


def make_model(config, head: str = "Model", dtype: torch.dtype = torch.float32):
    return randomise(CLASSES[config.model_type, head](config)).to(dtype).train()


def assert_same_gradients(a, b) -> None:
    first, second = gradients(a), gradients(b)
    for name, grad in first.items():
        assert (grad is None) == (second[name] is None), name
        assert grad is None or torch.equal(grad, second[name]), name


def packed_at_same_places(config, batch, pattern: str) -> dict:
    """Tokens padded on the left are turned by their places, which are other angles than their columns' at the same
    distances: other bits."""
    inputs = batch.packed()
    turned = config.distances is not None and config.distances.rotaries and not config.distances.are_absolute
    if pattern == "left" and turned:
        del inputs["position_ids"]
    return inputs


@of_every_kind_of_head()
@left_to_full(lambda p: is_left_out(p, MASKS.index(p["pattern"]), of=2 * len(MASKS)))  # every second head has a mask
@pytest.mark.parametrize("pattern", MASKS)
@models_axis
def test_packed_equals_padded(model_type, head, pattern):
    """Fields, loss and gradients of the same tokens at the same positions, in either layout: the same bits."""
    config = config_for(model_type, head, 0, num_hidden_layers=2)
    padded, batch = make_model(config, head), make_batch(config, pattern)
    packed, labels = copy.deepcopy(padded), make_labels(config, head, batch, seed=0)
    if measures_by_columns(config) and pattern == "holes":
        return  # windows of padded input go by its columns, which packed input does not have
    inputs = packed_at_same_places(config, batch, pattern)
    packed_labels = {name: t[batch.real] if t.dim() == 2 else t for name, t in labels.items()}
    given = dict(batch.inputs)
    if head == "MultipleChoice":
        given = {name: t.view(-1, CHOICES, t.shape[-1]) for name, t in given.items()}
        inputs["num_choices"] = CHOICES
    if head == "QuestionAnswering":  # columns of the padded input become places in the sequence
        inside = batch.real.gather(1, torch.stack(list(labels.values()), 1).clamp(max=batch.real.shape[1] - 1))
        for i, (name, positions) in enumerate(labels.items()):
            place = [int(row[:p].sum()) for row, p in zip(batch.real, positions.tolist(), strict=True)]
            counts = inside[:, i] & (positions < batch.real.shape[1])
            packed_labels[name] = torch.tensor(place).where(counts, batch.real.shape[1])  # which no text has
    one, other = padded(**given, **labels), packed(**inputs, **packed_labels)
    assert list(one) == list(other)
    for name in one:
        token = name in TOKEN_FIELDS or (name == "logits" and token_level(model_type, head))
        assert torch.equal(one[name][batch.real] if token else one[name], other[name]), name
    for out in (one, other):
        (out["loss"] if labels else out["last_hidden_state"].square().sum()).backward()
    assert_same_gradients(padded, packed)


@of_every_kind()
@halved
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@families_axis
def test_default_positions_of_packed_input(model_type, dtype):
    """Without position_ids, a packed token's position is its place in its sequence; RoBERTa counts from the ids."""
    config = make_config(model_type, 3)
    model = make_model(config, dtype=dtype)
    for pattern in ("right", "left") if FAMILIES[model_type].positions_from_ids else ("right",):
        batch = make_batch(config, pattern)
        if model.family.positions_from_ids:  # a pad id among the real ones
            ids = batch.inputs["input_ids"]
            ids[-1, batch.real[-1].nonzero()[0]] = config.pad_token_id
            counted = (ids != config.pad_token_id).long()
            batch.positions = counted.cumsum(1) * counted + config.pad_token_id
        packed = batch.packed()
        del packed["position_ids"]
        one, other = model(**batch.inputs), model(**packed)
        assert torch.equal(one.last_hidden_state[batch.real], other.last_hidden_state)
        bounded = model(**{**packed, "cu_seqlens": packed["cu_seqlens"].long(), "max_seqlen": 15})
        assert torch.equal(bounded[0], other[0]), "max_seqlen is an upper bound"


@of_every_kind()
@pytest.mark.parametrize("checked", (True, False))
@families_axis
def test_a_bound_far_above_the_truth_makes_no_larger_tables(model_type, checked, monkeypatch):
    """Where the host has seen the offsets, it knows the longest; else no sequence is longer than the batch."""
    config = make_config(model_type, num_hidden_layers=2)
    if not checked and (not has_rotary(config) or config.distances.are_absolute):
        return  # a bound beyond a table of positions is refused
    model, packed = make_model(config).eval(), make_batch(config).packed()
    del packed["position_ids"]
    monkeypatch.setattr(rotary, "_table_cache", tables := {})
    fastbert.check_inputs(checked)
    try:
        with torch.no_grad():
            expected = model(**packed).last_hidden_state
            tables.clear()
            assert torch.equal(model(**{**packed, "max_seqlen": 10**6}).last_hidden_state, expected)
    finally:
        fastbert.check_inputs(True)
    assert all(len(cos) <= 128 for cos, _ in tables.values())


@of_every_kind()
@thinned(6)
@pytest.mark.parametrize("pattern", MASKS)
@families_axis
def test_hidden_states_and_attentions(model_type, pattern):
    """Every layer's input and output, and the probabilities that attention otherwise never writes down."""
    config = make_config(model_type, MASKS.index(pattern) % 4)
    trio, batch = make_trio(config, "Model", torch.float32), make_batch(config, pattern)
    options = {"output_hidden_states": True, "output_attentions": True}
    ours, oracle, baseline = (m(**batch.inputs, **options) for m in (trio.ours, trio.oracle, trio.baseline))
    pairs = batch.real[:, None, :, None] & batch.real[:, None, None, :]
    for name in ("hidden_states", "attentions"):
        assert len(ours[name]) == len(oracle[name]) > 0
        for i, values in enumerate(zip(ours[name], oracle[name], baseline[name], strict=True)):
            real = batch.real if name == "hidden_states" else pairs.expand_as(values[1])
            assert_close_to_reference(*(t[real] for t in values), GRADIENT_FACTOR, f"{name}[{i}]")
            assert (values[0][~real] == 0).all()
    if measures_by_columns(config) and pattern == "holes":
        return
    packed = trio.ours(**packed_at_same_places(config, batch, pattern), **options)
    for one, other in zip(ours["hidden_states"], packed["hidden_states"], strict=True):
        assert torch.equal(one[batch.real], other)
    # Packed: each sequence's own tokens by its own tokens.
    for one, other in zip(ours["attentions"], packed["attentions"], strict=True):
        for row, real in enumerate(batch.real):
            own, count = one[row][:, real][:, :, real], int(real.sum())
            assert torch.equal(own, other[row, :, :count, :count])


@halved
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@of_every_kind()
@families_axis
def test_inputs_embeds_and_position_ids(model_type, dtype):
    config = make_config(model_type, 0, num_hidden_layers=2)
    trio, batch = make_trio(config, "Model", dtype), make_batch(config, "right")
    embeds = random_like((6, 11, config.embedding_width), 3)
    types = {name: t for name, t in batch.inputs.items() if name != "input_ids"}
    positions = torch.randint(20, (6, 11))
    for inputs in (
        {**types, "inputs_embeds": embeds},
        {**types, "inputs_embeds": embeds, "position_ids": positions},
        {**batch.inputs, "position_ids": positions},
        {**batch.inputs, "position_ids": positions[:1]},
    ):
        results = []
        for model in (trio.ours, trio.oracle, trio.baseline):
            given = {n: t.to(model.dtype) if t.is_floating_point() else t for n, t in inputs.items()}
            results.append(model(**given)[0][batch.real])
        assert_close_to_reference(*results, GRADIENT_FACTOR)


@of_every_kind()
@families_axis
def test_own_embeddings_are_the_ids(model_type):
    """Word embeddings passed as inputs_embeds: the same bits as the ids, where the positions are the same."""
    config = make_config(model_type, 0, num_hidden_layers=2)
    model, batch = make_model(config), make_batch(config, "left")
    inputs = {name: t for name, t in batch.inputs.items() if name != "input_ids"}
    inputs["inputs_embeds"] = model.get_input_embeddings()(batch.inputs["input_ids"])
    if config.embeddings.skips_given:  # nothing is added to them: they go into the first layer
        inputs["inputs_embeds"] = model(**batch.inputs, output_hidden_states=True).hidden_states[0]
    with_ids = model(**batch.inputs, position_ids=batch.positions)
    assert torch.equal(model(**inputs, position_ids=batch.positions)[0], with_ids[0])


def isolation(model, config, batch, change, head: str):
    """(outputs, input gradients) of all sequences but number 2, whose embeddings went through `change`."""
    real = batch.real
    embeds = random_like((*real.shape, config.embedding_width), 7).to(model.dtype)
    embeds[2] = change(embeds[2])
    embeds.requires_grad_()
    inputs = {name: t for name, t in batch.inputs.items() if name != "input_ids"}
    out = model(inputs_embeds=embeds, **inputs, output_hidden_states=True)
    others = torch.arange(len(real)) != 2
    scalar = sum((t[others] * random_like(t[others].shape, 1).to(t.dtype)).sum() for t in out.to_tuple()[:-1])
    scalar.backward()
    fields = [t[others] for t in (*out.to_tuple()[:-1], *out.hidden_states)]
    return fields, embeds.grad[others]


@of_every_kind()
@thinned(6)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head", ["Model", "SequenceClassification", "TokenClassification"])
@families_axis
def test_no_sequence_sees_another(model_type, head, dtype):
    """Other values, huge ones and NaN in one sequence: the others' outputs and input gradients keep their bits."""
    head = head if head == "Model" else head_of(model_type, head)
    config = config_for(model_type, head, 1)
    model = make_model(config, head, dtype)
    for pattern in ("right", "holes"):
        batch = make_batch(config, pattern)
        fields, grad = isolation(model, config, batch, lambda x: x, head)
        for change in (torch.neg, lambda x: x * 1e4, lambda x: torch.full_like(x, float("nan"))):
            changed, changed_grad = isolation(model, config, batch, change, head)
            for one, other in zip(fields, changed, strict=True):
                assert torch.equal(one, other)
            assert torch.equal(grad, changed_grad) and torch.isfinite(grad).all() and (grad != 0).any()


@of_every_kind()
@families_axis
def test_other_tokens_in_one_sequence(model_type):
    """Other ids, with the same lengths: the other sequences' bits stay, padded and packed."""
    config = make_config(model_type, 0, num_hidden_layers=2)
    model, batch = make_model(config), make_batch(config, "right")
    before, before_packed = model(**batch.inputs)[0], model(**batch.packed())[0]
    batch.inputs["input_ids"][3] = torch.where(batch.real[3], 42 - batch.inputs["input_ids"][3], config.pad_token_id)
    after, after_packed = model(**batch.inputs)[0], model(**batch.packed())[0]
    others = torch.arange(6) != 3
    assert torch.equal(before[others], after[others]) and not torch.equal(before[3], after[3])
    packed_others = others.repeat_interleave(batch.real.sum(1))
    assert torch.equal(before_packed[packed_others], after_packed[packed_others])


@of_every_kind_of_head()
@left_to_full(lambda p: is_left_out(p, WITHOUT.index(p["mask"]), of=2 * len(WITHOUT)))  # every second head has one
@pytest.mark.parametrize("mask", WITHOUT)
@models_axis
def test_sequences_without_tokens(model_type, head, mask):
    """Masked rows, all of them too, and one-token sequences: finite outputs, zeros at padding, no NaN gradient."""
    config = config_for(model_type, head, 0, num_hidden_layers=2)
    model, batch = make_model(config, head), make_batch(config, "none")
    if mask == "one token each":
        batch.real = torch.nn.functional.one_hot(torch.arange(6), 11).bool()
    else:
        batch.real[slice(None) if mask == "all rows" else 1] = False
    batch.inputs["attention_mask"] = batch.real.long()
    labels, given = make_labels(config, head, batch, seed=0), dict(batch.inputs)
    if head == "MultipleChoice":
        given = {name: t.view(-1, CHOICES, t.shape[-1]) for name, t in given.items()}
    out = model(**given, **labels, output_hidden_states=True, output_attentions=True)
    for name in out:
        values = out[name] if isinstance(out[name], tuple) else (out[name],)
        for value in values:
            assert torch.isfinite(value).all(), name
            if name in (*TOKEN_FIELDS, "hidden_states") or (name == "logits" and token_level(model_type, head)):
                assert (value[~batch.real] == 0).all(), name
            if name == "attentions":
                assert torch.equal(value.sum(-1) > 0, batch.real[:, None].expand(value.shape[:-1]))
    if mask == "all rows" and head in ("MaskedLM", "TokenClassification", "QuestionAnswering"):
        assert out.loss == 0
    if mask == "all rows" and head == "Model" and "pooler_output" in out:
        names = dict(model.named_parameters())
        bias = names[f"{model.family.pooler}.bias"]
        torch.testing.assert_close(out.pooler_output, bias.tanh().expand(6, -1), rtol=1e-6, atol=1e-7)
    (out["loss"] if labels else sum(t.sum() for t in (out[0], out.get("pooler_output")) if t is not None)).backward()
    for name, grad in gradients(model).items():
        assert grad is None or torch.isfinite(grad).all(), name


@pytest.mark.parametrize("backend", ("torch", "cpu", pytest.param("triton", marks=pytest.mark.full)))
@pytest.mark.parametrize("model_type", ("bert", "roberta"))
def test_slack_may_be_longer_than_any_sequence(model_type, backend):
    """Rows behind the last sequence stand in no place: more of them than there are positions change nothing."""
    error = {"cpu": extension_error, "triton": triton_error}.get(backend, lambda: None)()
    if error is not None:
        pytest.skip(error)
    config = make_config(model_type, num_hidden_layers=2)
    model = CLASSES[model_type, "Model"](config).eval()
    offsets = torch.tensor([0, 4, 7], dtype=torch.int32)
    ids = torch.randint(5, 30, (7 + config.max_position_embeddings + 5,))

    def packed(rows):
        batch = PackedBatch(None, offsets, 4, 2, None, len(rows), bounds={"input_ids": (5, 30)})
        return fastbert.PackedInputs({"input_ids": rows, "batch": batch})

    for grad in (True, False):
        with torch.set_grad_enabled(grad), use_backend(backend):
            alone, found = (model(packed(rows)).last_hidden_state for rows in (ids[:7], ids))
        torch.testing.assert_close(found[:7], alone, rtol=1e-5, atol=1e-6)
        assert found.isfinite().all()
