"""Qwen3 and Gemma 3 under accelerate: what calls of decoders have that those of encoders have not."""

from __future__ import annotations

import copy

import pytest
import torch
from family_configs import config_for, make_config
from hf import make_hf, make_oracle
from test_accelerate import no_fallback  # noqa: F401
from test_accelerate_families import IDS, assert_falls_back

import fastbert
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

DECODERS = ("gemma3_text", "qwen3")
decoders_axis = pytest.mark.parametrize("model_type", DECODERS)
LEFT = torch.tensor([[0] * 4 + [1] * 7, [1] * 11, [0] * 10 + [1], [0] * 2 + [1] * 9])


def pair(model_type: str, head: str = "Model", index: int = 0):
    plain = make_hf(config_for(model_type, head, index), head).eval()
    return plain, fastbert.accelerate(copy.deepcopy(plain))


def assert_same(model, plain, real: torch.Tensor, **inputs) -> None:
    with torch.no_grad():
        found, near, exact = (m(**inputs)[0] for m in (model, plain, make_oracle(plain)))
    assert_close_to_reference(found[real], exact[real].double(), near[real], GRADIENT_FACTOR)


@pytest.mark.parametrize("index", range(4))
@decoders_axis
def test_padding_on_the_left(model_type, index, no_fallback):  # noqa: F811
    """As their tokenizers pad; a first column is never read."""
    plain, model = pair(model_type, index=index)
    assert_same(model, plain, LEFT.bool(), input_ids=IDS, attention_mask=LEFT)


@decoders_axis
def test_keys_and_values_are_given_where_a_call_asks_for_them(model_type):
    plain, model = pair(model_type)
    plain.config.use_cache = model.config.use_cache = True  # transformers' default
    with torch.no_grad():
        assert model(IDS).past_key_values is None and fastbert.status(model).packed == 1
        assert_falls_back(model, "use_cache=True asks for the keys and values", input_ids=IDS, use_cache=True)
        first = model(IDS, use_cache=True).past_key_values
        assert first.get_seq_length() == IDS.shape[1]
        more = torch.tensor([[5], [6], [7], [8]])
        found, expected = (m(more, past_key_values=first).last_hidden_state for m in (model, copy.deepcopy(plain)))
        assert found.shape == expected.shape == (4, 1, 64)


@pytest.mark.parametrize(("model_type", "index"), (("gemma3_text", 0), ("gemma3_text", 1), ("qwen3", 1)))
def test_positions_without_a_mask_are_those_of_several_sequences(model_type, index, no_fallback):  # noqa: F811
    """As transformers' causal mask has it, and Gemma's that goes both ways."""
    plain, model = pair(model_type, index=index)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 5]])
    assert_same(model, plain, torch.ones(1, 11, dtype=torch.bool), input_ids=IDS[:1], position_ids=positions)
    with torch.no_grad():
        masked = model(IDS[:1], position_ids=positions, attention_mask=torch.ones(1, 11))[0]
        assert not torch.allclose(model(IDS[:1], position_ids=positions)[0], masked)


@decoders_axis
def test_several_rows_of_such_positions_are_left_to_transformers(model_type):
    _, model = pair(model_type)
    again = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2]]).expand(4, -1)
    assert_falls_back(model, "position_ids that do not count up by one", input_ids=IDS, position_ids=again)


@decoders_axis
def test_a_causal_call_of_another_kind(model_type):
    _, model = pair(model_type)
    assert_falls_back(model, "is_causal is False; when the model was accelerated", input_ids=IDS, is_causal=False)
    model.config.is_causal = False
    assert_falls_back(model, "its config's is_causal is False; when the model", input_ids=IDS)


@decoders_axis
def test_the_last_token_is_found_by_its_id(model_type, no_fallback):  # noqa: F811
    """On either side of padding; a token of padding's id at a text's end is passed over, as in transformers."""
    plain, model = pair(model_type, "SequenceClassification")
    pad = plain.config.pad_token_id
    ids = IDS.where(pad != IDS, 9)
    for mask in (LEFT, LEFT.flip(1)):
        given = ids.where(mask.bool(), pad)
        given[1, -2:] = pad
        assert_same(model, plain, torch.ones(4, dtype=torch.bool), input_ids=given, attention_mask=mask)
        ours = fastbert.AutoModelForSequenceClassification.from_config(make_config(model_type, num_labels=3))
        ours.load_state_dict(plain.state_dict())
        assert_same(ours.eval(), plain, torch.ones(4, dtype=torch.bool), input_ids=given, attention_mask=mask)


@decoders_axis
def test_a_mask_that_leaves_out_what_a_head_reads(model_type):
    _, model = pair(model_type, "SequenceClassification")
    ids = IDS.where(model.config.pad_token_id != IDS, 9)
    assert_falls_back(model, "the last token by its id", input_ids=ids, attention_mask=LEFT.flip(1))
