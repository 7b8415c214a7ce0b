"""Each call asks once: what is in the tree, whether the mask is all ones, whether the whole encoder is one op."""

from __future__ import annotations

import collections

import pytest
import torch
from seeds import manual_seed
from torch import nn

import fastbert
from fastbert import ops
from fastbert.layers.guard import ModuleGuard, TreeCache
from fastbert.native.availability import extension_error
from fastbert.packing import is_all_ones

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(extension_error() is not None, reason=str(extension_error()))

IDS = torch.tensor([[2, 5, 9, 3], [2, 7, 3, 1]])
PADDED = (IDS != 1).long()
ONES = torch.ones_like(IDS)
SHAPE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 20}


@pytest.fixture
def asks(monkeypatch) -> collections.Counter[str]:
    """How often each question was asked."""
    made: collections.Counter[str] = collections.Counter()

    def counted(question: str, function):
        def count(*args, **options):
            made[question] += 1
            return function(*args, **options)

        return count

    monkeypatch.setattr(TreeCache, "get", counted("tree", TreeCache.get))
    monkeypatch.setattr(ModuleGuard, "is_current", counted("fingerprint", ModuleGuard.is_current))
    look = counted("ones", is_all_ones)
    for module in ("packing", "execution.request", "acceleration.forward"):
        monkeypatch.setattr(f"fastbert.{module}.is_all_ones", look)
    try_fused = ops.try_fused

    def asked(op, x, find_operands):
        made[op] += 1
        return try_fused(op, x, find_operands)

    monkeypatch.setattr(ops, "try_fused", asked)
    return made


def own(family: str = "bert") -> nn.Module:
    manual_seed(0)
    config = fastbert.EncoderConfig.of_family(family, pad_token_id=1, **SHAPE)
    return fastbert.AutoModel.from_config(config).eval()


def live(family: str = "Bert") -> nn.Module:
    manual_seed(0)
    config = getattr(transformers, f"{family}Config")(pad_token_id=1, **SHAPE)
    return fastbert.accelerate(getattr(transformers, f"{family}Model")(config).eval())


def hooked(model: nn.Module) -> nn.Module:
    model.encoder.layer[1].output.dense.register_forward_hook(lambda *_: None)
    return model


def packed(model: nn.Module) -> None:
    model(fastbert.pack_inputs([[2, 5, 9], [2, 3]]))


INFERENCE = {
    "quick": (own, lambda model: model(IDS)),
    "ones": (own, lambda model: model(IDS, ONES)),
    "padded": (own, lambda model: model(IDS, PADDED)),
    "packed": (own, packed),
    "offsets": (own, lambda model: model.encode_packed(IDS[0], torch.tensor([0, 1, 4], dtype=torch.int32), 3)),
    "states": (own, lambda model: model(IDS, PADDED, output_hidden_states=True)),
    "refused": (lambda: hooked(own()), lambda model: model(IDS, ONES)),
    "windows": (lambda: own("modernbert"), lambda model: model(IDS, PADDED)),
    "accelerated, ones": (live, lambda model: model(IDS, ONES)),
    "accelerated, padded": (live, lambda model: model(IDS, PADDED)),
    "accelerated, windows": (lambda: live("ModernBert"), lambda model: model(IDS, PADDED)),
}


@pytest.mark.parametrize("way", INFERENCE)
@torch.inference_mode()
def test_inference_asks_once(way, asks):
    make, call = INFERENCE[way]
    model = make()
    call(model)
    asks.clear()
    call(model)
    assert asks["tree"] == asks["fingerprint"] == (way != "states"), asks  # each layer by itself asks nothing
    assert asks["ones"] <= 1 and asks["encoder"] <= 1 and asks["encoder_layers"] <= 1, asks


@pytest.mark.parametrize("make", (own, live))
def test_training_asks_once(make, asks):
    model = make().train()
    for _ in range(2):
        asks.clear()
        model(IDS, PADDED).last_hidden_state.sum().backward()
    assert asks == {"tree": 1, "fingerprint": 1, "ones": 1, "encoder": 1, "encoder_layers_training": 1}


def test_a_text_asks_once(asks, tmp_path):
    import tiny

    encoder = fastbert.SentenceEncoder(tiny.write_sentence_model(tmp_path), device="cpu")
    encoder.encode("the cat sat")
    for texts in ("the cat sat", ["the cat sat", "a dog"]):
        asks.clear()
        encoder.encode(texts)
        assert asks == {"tree": 1, "fingerprint": 1, "encoder": 1}


def test_a_graph_asks_nothing(asks):
    model = own()
    offsets = torch.tensor([0, 1, 4], dtype=torch.int32)
    compiled = torch.compile(model.encode_packed, backend="eager", fullgraph=True)
    with torch.inference_mode():
        expected = model.encode_packed(IDS[0], offsets, 3)
        compiled(IDS[0], offsets, 3)
        asks.clear()
        assert torch.equal(compiled(IDS[0], offsets, 3), expected)
    assert asks["tree"] == asks["fingerprint"] == 0


def test_status_has_the_reasons():
    model = hooked(own())
    with torch.inference_mode():
        model(IDS)
        (found,) = fastbert.status(model).models
        reason = "encoder.layer.1.output.dense is no plain module"
        assert found.ways["whole encoder"].startswith(reason) and found.ways["layers"].startswith(reason)
        assert f"the last of these layer by layer: {reason}" in str(found)
    model = own()
    with torch.inference_mode():
        model(IDS, PADDED)
    assert fastbert.status(model).models[0].ways == {"whole encoder": ""}
