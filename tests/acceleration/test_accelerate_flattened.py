"""Batches that are packed already, as transformers' DataCollatorWithFlattening makes them."""

# ruff: noqa: F811  (a fixture that is imported is also an argument)
from __future__ import annotations

import copy

import pytest
import torch
import transformers
from family_configs import config_for, head_of, make_config
from hf import FAMILIES, make_hf, make_oracle
from kinds import of_few_kinds
from seeds import torch_generator
from test_accelerate import IDS, no_fallback, one_thread, small  # noqa: F401

import fastbert
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

LENGTHS = (5, 1, 9, 3)


def flattened(model_type: str, **options):
    """(the sequences, each (1, n) of the rows, the collator's batch)."""
    config = make_config(model_type)
    first = config.pad_token_id + 1 if config.family.positions_from_ids else 0
    generator = torch_generator(3)
    rows = [torch.randint(10, 43, (n,), generator=generator).tolist() for n in LENGTHS]
    labels = [torch.randint(3, (n,), generator=generator).tolist() for n in LENGTHS]
    options = {"return_flash_attn_kwargs": True, "return_seq_idx": True, "position_ids_start": first} | options
    collate = transformers.DataCollatorWithFlattening(**options)
    batch = collate([{"input_ids": ids, "labels": label} for ids, label in zip(rows, labels, strict=True)])
    return [torch.tensor([ids]) for ids in rows], batch


def one_by_one(model, rows, labels):
    """Logits of each sequence alone, in one row, and the loss of all of them."""
    logits = torch.cat([model(ids).logits for ids in rows], dim=1)
    return logits, torch.nn.functional.cross_entropy(logits[0], labels[0])


@of_few_kinds()
@pytest.mark.parametrize("model_type", [name for name in FAMILIES if head_of(name) == "TokenClassification"])
def test_sequences_in_one_row(model_type, packed_layers, no_fallback):
    plain = make_hf(config_for(model_type, "TokenClassification"), "TokenClassification").eval()
    rows, batch = flattened(model_type)
    if model_type == "roformer":
        batch.pop("position_ids")  # its forward has no such argument
    model = fastbert.accelerate(copy.deepcopy(plain))
    ours = model(**batch)
    assert len(packed_layers) == plain.config.num_hidden_layers
    oracle, near = (one_by_one(m, rows, batch["labels"]) for m in (make_oracle(plain), plain))
    assert_close_to_reference(ours.logits, oracle[0].double(), near[0], GRADIENT_FACTOR)
    assert_close_to_reference(ours.loss, oracle[1].double(), near[1], GRADIENT_FACTOR)
    ours.loss.backward()
    status = fastbert.status(model)
    assert (status.packed, status.others) == (1, 0)


def test_the_base_models_output(no_fallback):
    model = fastbert.accelerate(small())
    rows, batch = flattened("bert")
    batch.pop("labels")
    out = model(**batch, output_hidden_states=True)
    assert out.last_hidden_state.shape == (1, sum(LENGTHS), 64) and len(out.hidden_states) == 4
    assert all(t.shape == (1, sum(LENGTHS), 64) for t in out.hidden_states)
    torch.testing.assert_close(out.pooler_output, model(rows[0]).pooler_output)  # of column 0, as transformers pools
    with pytest.raises(fastbert.InputError, match="output_attentions is not for a row of several sequences"):
        model(**batch, output_attentions=True)
    with pytest.raises(fastbert.InputError, match="cu_seqlens ends at 17, but there are 18 tokens"):
        model(**batch | {"cu_seq_lens_q": torch.tensor([0, 17]), "cu_seq_lens_k": torch.tensor([0, 17])})


@of_few_kinds()
@pytest.mark.parametrize("model_type", [name for name in FAMILIES if name != "roformer"])  # which takes no positions
def test_positions_that_start_again_are_sequences_where_transformers_has_it_so(model_type, packed_layers, no_fallback):
    """Its flash attention goes by them; the others let all tokens of a row see each other."""
    rows, batch = flattened(model_type, return_flash_attn_kwargs=False, return_seq_idx=False)
    model = fastbert.accelerate(make_hf(make_config(model_type), "Model").eval())
    given = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
    together = model(**given)[0]
    plain = fastbert.restore(copy.deepcopy(model))
    exact, near = make_oracle(plain), plain(**given)[0]
    assert_close_to_reference(together, exact(**given)[0].double(), near, GRADIENT_FACTOR)
    model.config._attn_implementation_internal = "flash_attention_2"
    alone, near = (torch.cat([m(ids)[0] for ids in rows], dim=1) for m in (exact, plain))
    assert_close_to_reference(model(**given)[0], alone.double(), near, GRADIENT_FACTOR)
    in_order = {"input_ids": rows[0], "position_ids": batch["position_ids"][:, : LENGTHS[0]]}
    alone = exact(rows[0])[0].double(), plain(rows[0])[0]
    assert_close_to_reference(model(**in_order)[0], *alone, GRADIENT_FACTOR)  # one sequence
    assert len(packed_layers) == 3 * model.config.num_hidden_layers


OTHERS = {
    "rows": ({"cu_seq_lens_q": torch.tensor([0, 4, 8])}, "one row that holds all sequences; there are 2 rows"),
    "padding": ({"attention_mask": torch.tensor([[1, 1, 1, 0]])}, "with an attention_mask that has padding"),
    "keys": ({"cu_seq_lens_k": torch.tensor([0, 2, 4])}, "cu_seq_lens_k is not cu_seq_lens_q"),
    "positions": ({"position_ids": None}, "transformers counts positions through all sequences"),
    "index-alone": ({"cu_seq_lens_q": None, "seq_idx": torch.zeros(1, 4)}, "the argument seq_idx"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_left_to_transformers(name, packed_layers):
    changed, reason = OTHERS[name]
    rows = 2 if name == "rows" else 1
    given = {"input_ids": IDS[:rows], "cu_seq_lens_q": torch.tensor([0, 3, 4]), "position_ids": torch.arange(4)[None]}
    given |= changed
    model = small()
    expected = model(**given)[0]
    with pytest.warns(UserWarning, match=reason):
        assert torch.equal(fastbert.accelerate(model)(**given)[0], expected)
    assert not packed_layers
