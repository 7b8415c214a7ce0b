"""One text through an accelerated model: what stands before the operator, and that the short way changes no bit."""

from __future__ import annotations

import collections
import copy

import pytest
import torch
import transformers
from counted_ops import Ops
from seeds import manual_seed
from torch.utils._python_dispatch import TorchDispatchMode

import fastbert
from fastbert.native.availability import extension_error

if extension_error() is not None:
    pytest.skip(extension_error(), allow_module_level=True)

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
FAMILIES = ("Bert", "Roberta", "XLMRoberta", "Electra", "ModernBert")
MOST_OPERATORS = 12  # torch's: two looks at the mask, views of ids and results, offsets; 40 where everything is checked


def model_of(family: str = "Bert", **fields) -> torch.nn.Module:
    manual_seed(0)
    config = getattr(transformers, f"{family}Config")(vocab_size=40, pad_token_id=1, **{**SHAPE, **fields})
    return fastbert.accelerate(getattr(transformers, f"{family}Model")(config).eval())


def given_of(tokens: int = 5, rows: int = 1) -> dict[str, torch.Tensor]:
    ids = torch.arange(2, 2 + tokens * rows).view(rows, tokens)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}


def op_by_op(monkeypatch, model, given):
    with monkeypatch.context() as patch:
        patch.setattr("fastbert.acceleration.forward.at_once", lambda *args: None)
        patch.setattr("fastbert.execution.at_once", lambda *args: None)
        return model(**given)


@torch.inference_mode()
@pytest.mark.parametrize("rows", (1, 3))
@pytest.mark.parametrize("family", FAMILIES)
def test_the_short_way_has_the_bits_of_the_ops(family, rows, monkeypatch):
    model, given = model_of(family), given_of(rows=rows)
    if family == "ModernBert":
        del given["token_type_ids"]
    found, expected = model(**given), op_by_op(monkeypatch, model, given)
    assert list(found) == list(expected) and all(torch.equal(found[name], expected[name]) for name in expected)


class Torchs(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.namespace] += 1
        return func(*args, **(kwargs or {}))


@torch.inference_mode()
def test_operators_of_one_text():
    model, given = model_of(), given_of()
    model(**given)
    with Ops() as ops, Torchs() as torchs:
        model(**given)
    assert dict(ops.calls) == {"encoder_cpu": 1}
    assert torchs.calls["aten"] <= MOST_OPERATORS, torchs.calls


@torch.inference_mode()
def test_what_is_wrong_has_the_words_of_the_checks():
    model, given = model_of(), given_of()
    given["input_ids"][0, 3] = 40
    with pytest.raises(fastbert.InputError, match="input_ids holds 40; valid values are 0 to 39"):
        model(**given)
    model = model_of(max_position_embeddings=4)
    with pytest.raises(
        fastbert.InputError, match="a sequence of 5 tokens is longer than the position table, which has 4"
    ):
        model(**given_of())


@torch.inference_mode()
@pytest.mark.parametrize("asked", ("output_hidden_states", "output_attentions"))
def test_what_else_is_asked_for_comes(asked):
    model, given = model_of(attn_implementation="eager"), given_of()
    found = model(**given, **{asked: True})[asked.removeprefix("output_")]
    assert len(found) == 2 + (asked == "output_hidden_states")
    assert "1 of 1 calls ran packed" in repr(model)


def double(leaf: torch.nn.Module) -> torch.nn.Module:
    made = copy.deepcopy(leaf)
    with torch.no_grad():
        made.weight.mul_(2)
    return made


CHANGES = {
    "a weight": lambda model: setattr(query(model), "weight", double(query(model)).weight),
    "a leaf": lambda model: setattr(model.encoder.layer[1].attention.self, "query", double(query(model))),
    "a hook": lambda model: query(model).register_forward_hook(lambda module, args, out: 2 * out),
    "a hook before": lambda model: query(model).register_forward_pre_hook(lambda module, args: (2 * args[0],)),
    "a norm's eps": lambda model: setattr(model.encoder.layer[0].output.LayerNorm, "eps", 0.5),
    "a table": lambda model: setattr(model.embeddings, "word_embeddings", double(model.embeddings.word_embeddings)),
    "the pooler": lambda model: setattr(model.pooler, "dense", double(model.pooler.dense)),
}


def query(model: torch.nn.Module) -> torch.nn.Linear:
    return model.encoder.layer[1].attention.self.query


@torch.inference_mode()
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_between_calls_is_seen(change):
    """What the model gives after it is what a model that always was so gives."""
    with torch.inference_mode(False):
        model, fresh = model_of(), model_of()
    before = model(**given_of())
    for each in (model, fresh):
        change(each)
    for _ in range(2):
        found, expected = model(**given_of()), fresh(**given_of())
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not torch.equal(found.pooler_output, before.pooler_output)
