"""fastbert.status(model) and repr(model): what runs fast, how often it did, and why not."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
import transformers
from family_configs import make_config
from full import left_to_full
from test_accelerate import IDS, MASK, small
from torch import nn

import fastbert


def test_calls_are_counted():
    model = small("SequenceClassification")
    assert fastbert.status(model).models[0].kind == "left alone"
    fastbert.accelerate(model)
    status = fastbert.status(model)
    assert (status.packed, status.others, status.why_not) == (0, 0, "")
    assert repr(status) == "bert (BertModel): accelerated, not called yet"
    for _ in range(3):
        model(IDS, attention_mask=MASK)
    with pytest.warns(UserWarning, match="padding on the left"):
        model(IDS, attention_mask=MASK.flip(1))
    status = fastbert.status(model)
    assert (status.packed, status.others) == (3, 1) and status.why_not.startswith("padding on the left")
    assert repr(status).startswith("bert (BertModel): 3 of 4 calls ran packed; the last that did not: padding on the")
    assert "fastbert: 3 of 4 calls ran packed; the last that did not: padding on the left" in repr(model)
    assert "fastbert: 3 of 4 calls" in str(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert "fastbert: accelerated, not called yet" in repr(other)  # a copy counts by itself
        other(IDS)
        assert (fastbert.status(other).packed, fastbert.status(model).packed) == (1, 3)
    with pytest.raises(fastbert.InputError):
        model(IDS + 99)
    assert fastbert.status(model).packed == 3
    assert "fastbert" not in repr(fastbert.restore(model))


def test_what_holds_several_models_or_none():
    own = fastbert.BertModel(make_config("bert"))
    gpt = transformers.GPT2Model(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=10))
    both = nn.ModuleDict({"own": own, "theirs": fastbert.accelerate(small()), "gpt": gpt})
    both["theirs"](IDS)
    lines = repr(fastbert.status(both)).splitlines()
    assert lines == [
        "own (BertModel): fastbert's own class, not called yet",
        "theirs (BertModel): 1 of 1 calls ran packed",
    ]
    assert repr(fastbert.status(gpt)) == "there is no model that fastbert has"
    with pytest.raises(TypeError, match="status takes a module or a SentenceEncoder, not str"):
        fastbert.status("bert-base-uncased")


@left_to_full(lambda p: p["wrapper"] == "compiled")  # see the last test
@pytest.mark.parametrize("wrapper", ("peft", "compiled", "module"))
def test_inside_of_another_librarys_module(wrapper):
    model = fastbert.accelerate(small("SequenceClassification"))
    if wrapper == "peft":
        peft = pytest.importorskip("peft")
        around: nn.Module = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["query"]))
    else:
        around = torch.compile(model, backend="eager") if wrapper == "compiled" else nn.Sequential(model)
    around(IDS)
    status = fastbert.status(around)
    assert (status.packed, status.others) == (1, 0) and status.models[0].name.endswith("bert (BertModel)")
    assert "fastbert: 1 of 1 calls ran packed" in repr(around)


def test_calls_of_threads_are_counted():
    model = fastbert.accelerate(small())
    model(IDS)
    threads = [threading.Thread(target=lambda: [model(IDS) for _ in range(25)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fastbert.status(model).packed == 101


@pytest.mark.full
def test_calls_in_a_compiled_model_are_counted():
    model = fastbert.accelerate(small())
    compiled = torch.compile(model, backend="eager")
    for _ in range(3):
        compiled(IDS)
    assert fastbert.status(compiled).packed == 3
