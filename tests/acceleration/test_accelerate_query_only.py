"""Tokens that attend while the mask leaves them out, as sentence-transformers expands queries: accelerated models and
our own classes beside transformers', whose forward computes the hidden states of all columns.
"""

# ruff: noqa: F811  (a fixture that is imported is also an argument)
from __future__ import annotations

import copy
import warnings
from typing import NamedTuple

import pytest
import torch
from family_configs import make_config
from full import left_to_full
from hf import FAMILIES, hf_class, is_alike, make_hf, make_oracle, make_ours, random_like
from seeds import torch_generator
from test_accelerate import dtype_axis, no_fallback, one_thread  # noqa: F401
from torch import nn

import fastbert
from fastbert import families
from fastbert.acceleration.instance import put_by_us
from fastbert.testing.cases import DTYPES
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

ATTEND = [name for name in FAMILIES if families.FAMILIES[name].masked_tokens_attend]
attending_axis = pytest.mark.parametrize("model_type", ATTEND)


class Queries(NamedTuple):
    """Rows of 12 columns: words, then tokens that attend alone, then it may be padding."""

    ids: torch.Tensor
    mask: torch.Tensor
    alone: torch.Tensor

    @property
    def read(self) -> torch.Tensor:
        return self.mask.bool() | self.alone


def queries(pad: int) -> Queries:
    lengths, added = torch.tensor([12, 7, 1, 4, 9]), torch.tensor([0, 5, 11, 3, 0])
    column = torch.arange(12)
    mask = column < lengths[:, None]
    alone = (column < (lengths + added)[:, None]) & ~mask
    ids = torch.randint(10, 43, mask.shape, generator=torch_generator(11))
    ids = ids.masked_fill(alone, 8).masked_fill(~(mask | alone), pad)
    return Queries(ids, mask.long(), alone)


def expect(model: nn.Module, alone: torch.Tensor) -> None:
    """As sentence-transformers' Transformer tells the base model that it calls next."""
    put_by_us(model).expect(query_only=alone)


def accelerated(model_type: str, index: int, dtype: torch.dtype) -> tuple[nn.Module, nn.Module, Queries]:
    config = make_config(model_type, index)
    plain = make_hf(config, "Model", dtype)
    return fastbert.accelerate(copy.deepcopy(plain)), plain, queries(config.pad_token_id or 0)


@left_to_full(lambda p: (ATTEND.index(p["model_type"]) + p["index"] + DTYPES.index(p["dtype"])) % 4 != 0)
@dtype_axis
@pytest.mark.parametrize("index", range(4))
@attending_axis
def test_accelerated(model_type, index, dtype, no_fallback):
    """Outputs and gradients. In a window tokens may see nothing, which each attention of transformers has its way
    with: its numbers there are compared where the window is wide.
    """
    model, plain, batch = accelerated(model_type, index, dtype)
    results = []
    for each in (model, plain, make_oracle(plain)):
        each.zero_grad()
        if each is model:
            expect(model, batch.alone)
        state = each(input_ids=batch.ids, attention_mask=batch.mask)[0]
        seen = sees_a_key(model.config if each is model else plain.config, batch)
        picked = state[seen]
        (picked * random_like(picked.shape, 3).to(picked.dtype)).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in each.parameters() if p.grad is not None])
        results.append((state, picked.detach(), gradient))
    (state, *found), (_, *near), (_, *exact) = results
    for ours, oracle, theirs in zip(found, exact, near, strict=True):
        assert_close_to_reference(ours, oracle.double(), theirs, GRADIENT_FACTOR)
    assert not state[~batch.read].any()
    assert (fastbert.status(model).packed, fastbert.status(model).others) == (1, 0)


def sees_a_key(config, batch: Queries) -> torch.Tensor:
    """Which of the tokens that are read see a word in every layer."""
    windows = [getattr(config, name, None) for name in ("local_attention", "sliding_window")]
    reach = min([window // 2 for window in windows if window], default=12)
    column, last = torch.arange(12), batch.mask.sum(1, keepdim=True) - 1
    return batch.read & (column - last <= max(0, reach - 1))


@left_to_full(is_alike)
@attending_axis
def test_of_ours(model_type):
    """The same packed by pack_inputs, from rows and from lists: the same bits, in inference and in training."""
    config = make_config(model_type, 1)
    plain = make_hf(config, "Model")
    model, ours = fastbert.accelerate(copy.deepcopy(plain)), make_ours(config, "Model", plain)
    batch = queries(config.pad_token_id or 0)
    expect(model, batch.alone)
    expected = model(input_ids=batch.ids, attention_mask=batch.mask)[0][batch.read]
    packed = fastbert.pack_inputs(batch.ids, batch.mask, query_only_mask=batch.alone.long())
    assert torch.equal(ours(packed).last_hidden_state[batch.read], expected)
    counts = batch.read.sum(1).tolist()
    rows, alone = ([row[:n].tolist() for row, n in zip(t, counts)] for t in (batch.ids, batch.alone.long()))  # noqa: B905
    listed = fastbert.pack_inputs(rows, query_only_mask=alone)
    assert torch.equal(ours(listed).last_hidden_state, expected)
    with torch.inference_mode():
        ours.eval()
        inferred = ours(listed).last_hidden_state
        assert torch.equal(ours(packed).last_hidden_state[batch.read], inferred)
    torch.testing.assert_close(inferred, expected.detach(), rtol=1e-4, atol=1e-4)
    with fastbert.use_backend("torch"):
        torch.testing.assert_close(ours(listed).last_hidden_state, inferred, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model_type", [name for name in FAMILIES if name not in ATTEND])
def test_families_whose_masked_tokens_do_not_attend(model_type):
    """Their own calls are transformers', with the reason; packed input is refused."""
    model, plain, batch = accelerated(model_type, 1, torch.float32)
    expect(model, batch.alone)
    with pytest.warns(UserWarning, match="query_expansion with attend=False: transformers clears"):
        found = model(input_ids=batch.ids, attention_mask=batch.mask)[0]
    assert torch.equal(found, plain(input_ids=batch.ids, attention_mask=batch.mask)[0])
    packed = fastbert.pack_inputs(batch.ids, batch.mask, query_only_mask=batch.alone.long())
    ours = make_ours(make_config(model_type, 1), "Model", plain)
    with pytest.raises(fastbert.InputError, match=f"query_only_mask: {model_type} clears"):
        ours(packed)


def test_tokens_that_see_nothing_have_sdpa_s_result():
    """Zeros come out of attention, as of transformers' SDPA; its eager attention gives such a row a mean of all."""
    config = make_config("modernbert", 0, local_attention=4)
    theirs = make_hf(config, "Model").eval()
    theirs.set_attn_implementation("sdpa")
    batch = queries(config.pad_token_id or 0)
    model = fastbert.accelerate(copy.deepcopy(theirs))
    with torch.no_grad():
        expect(model, batch.alone)
        found = model(input_ids=batch.ids, attention_mask=batch.mask)[0]
        expected = theirs(input_ids=batch.ids, attention_mask=batch.mask)[0]
    torch.testing.assert_close(found[batch.read], expected[batch.read], rtol=1e-3, atol=1e-3)


def test_what_runs_transformers_own_code():
    model, plain, batch = accelerated("bert", 0, torch.float32)
    turned = batch.mask.flip(1), batch.alone.flip(1)
    for mask, alone, reason in ((*turned, "padding on the left"), (batch.mask, batch.alone[:, 1:], "another shape")):
        expect(model, alone)
        with pytest.warns(UserWarning, match=reason):
            found = model(input_ids=batch.ids, attention_mask=mask)[0]
        assert torch.equal(found, plain(input_ids=batch.ids, attention_mask=mask)[0])


def test_the_next_call_is_as_ever(no_fallback):
    """What a call is told holds for it alone; where no token attends alone, nothing is different."""
    model, _, batch = accelerated("bert", 0, torch.float32)
    plain = model(input_ids=batch.ids, attention_mask=batch.mask)[0]
    expect(model, torch.zeros_like(batch.alone))
    assert torch.equal(model(input_ids=batch.ids, attention_mask=batch.mask)[0], plain)
    expect(model, batch.alone)
    assert not torch.equal(model(input_ids=batch.ids, attention_mask=batch.mask)[0], plain)
    assert torch.equal(model(input_ids=batch.ids, attention_mask=batch.mask)[0], plain)


def test_hidden_states_and_attentions(no_fallback):
    model, plain, batch = accelerated("bert", 0, torch.float32)
    for each in (model, plain):
        each.eval()
    with torch.no_grad():
        expect(model, batch.alone)
        found = model(batch.ids, batch.mask, output_hidden_states=True, output_attentions=True)
        expected = plain(batch.ids, batch.mask, output_hidden_states=True, output_attentions=True)
    for ours, theirs in zip(found.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(ours[batch.read], theirs[batch.read], rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(found.attentions, expected.attentions, strict=True):
        rows = batch.read[:, None, :, None]
        torch.testing.assert_close(ours * rows, theirs * rows, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model_type", ("bert", "modernbert"))
def test_compiled(model_type):
    """One graph for packed input, whatever the numbers of keys; and around an accelerated model."""
    config = make_config(model_type, 1)
    ours = make_ours(config, "Model", make_hf(config, "Model")).eval()
    compiled = torch.compile(ours, fullgraph=True, dynamic=True)
    batch = queries(config.pad_token_id or 0)
    counts = batch.read.sum(1).tolist()
    for drop in (0, 2):
        rows = [row[:n].tolist() for row, n in zip(batch.ids, counts, strict=True)][drop:]
        alone = [row[:n].long().tolist() for row, n in zip(batch.alone, counts, strict=True)][drop:]
        packed = fastbert.pack_inputs(rows, query_only_mask=alone)
        with torch.no_grad():
            found, expected = compiled(packed).last_hidden_state, ours(packed).last_hidden_state
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_bad_input():
    batch = queries(0)
    with pytest.raises(fastbert.InputError, match="query_only_mask: in sequence 1 a token that is attended to stands"):
        fastbert.pack_inputs(batch.ids, batch.mask.flip(1), query_only_mask=batch.alone.flip(1).long())
    with pytest.raises(fastbert.InputError, match="query_only_mask: in sequence 0 a token that is attended to stands"):
        fastbert.pack_inputs([[5, 6, 7]], query_only_mask=[[0, 1, 0]])
    with pytest.raises(fastbert.InputError, match="query_only_mask has 2 values for sequence 0, which has 3 tokens"):
        fastbert.pack_inputs([[5, 6, 7]], query_only_mask=[[0, 1]])
    with pytest.raises(fastbert.InputError, match=r"query_only_mask has shape \(5, 11\); input_ids has \(5, 12\)"):
        fastbert.pack_inputs(batch.ids, batch.mask, query_only_mask=batch.alone[:, 1:].long())


def test_batches_travel_and_are_padded():
    """To another process or device, and to the sizes of a bucket."""
    packed = fastbert.pack_inputs([[5, 6, 7], [8, 9]], query_only_mask=[[0, 0, 1], [0, 1]])
    assert packed["batch"].num_keys.tolist() == [2, 1] and packed.to("cpu")["batch"].num_keys.tolist() == [2, 1]
    wider = packed.with_capacity(9, 4, 5)["batch"]
    assert wider.num_keys.tolist() == [2, 1, 0, 0] and wider.cu_seqlens.tolist() == [0, 3, 5, 5, 5]
    config = make_config("bert", 0)
    model = hf_class("bert", "Model")  # the class of theirs, of the same name as ours
    ours = make_ours(config, "Model", make_hf(config, "Model")).eval()
    assert type(ours).__name__ == model.__name__
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        found = ours(packed.with_capacity(9, 4, 5)).last_hidden_state
        assert torch.equal(found[:5], ours(packed).last_hidden_state)
