"""What all layers as one op keep from forward to backward, with and without recomputation: docs/memory.md."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from seeds import manual_seed

import fastbert
from fastbert.backend import use_backend
from fastbert.models.classes import CLASSES
from fastbert.native.availability import triton_error
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

pytestmark = pytest.mark.skipif(triton_error() is not None, reason=str(triton_error()))

PAGE = (Path(fastbert.__file__).parents[1] / "docs" / "memory.md").read_text(encoding="utf-8")
HIDDEN, INNER, HEADS = 32, 128, 2
WINDOWS = {"model_type": "modernbert", "global_attn_every_n_layers": 2, "local_attention": 4}


def make(layers: int, **changes) -> torch.nn.Module:
    manual_seed(0)
    shape = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": HEADS, "vocab_size": 40}
    drops = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    config = {"model_type": "bert", "pad_token_id": 0, "num_hidden_layers": layers, "initializer_range": 0.2}
    config |= {**shape, **drops, **changes}
    made = CLASSES[config["model_type"], "Model"](fastbert.EncoderConfig.from_dict(config), add_pooling_layer=False)
    return made.train()


def kept_bytes(model: torch.nn.Module, tokens: int) -> int:
    """Of activations: what autograd saves whose size goes by the number of tokens, of which no other size is a
    multiple.
    """
    found: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if any(size % tokens == 0 for size in t.shape):
            found[t.untyped_storage().data_ptr()] = t.numel() * t.element_size()
        return t

    ids, offsets = torch.arange(tokens) % 30 + 1, torch.tensor([0, tokens], dtype=torch.int32)
    with use_backend("triton"), torch.autocast("cpu", torch.bfloat16):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = model(input_ids=ids, cu_seqlens=offsets).last_hidden_state
        out.sum().backward()
    return sum(found.values())


def of_a_layer(recomputes: bool) -> int:
    """Bytes a token: those of three layers less those of two."""
    counts, tokens = [], 52  # a multiple of 4: rows of float32 numbers begin at 16 bytes
    for layers in (2, 3):
        model = make(layers)
        if recomputes:
            model.gradient_checkpointing_enable()
        counts.append(kept_bytes(model, tokens))
    each, rest = divmod(counts[1] - counts[0], tokens)
    assert rest == 0
    return each


def formula(hidden: int, inner: int, heads: int, recomputes: bool) -> int:
    """16-bit rows: the sum before the layer; and qkv, the context, the sum and the normed rows of each half, and the
    wide matrix. In fp32 mean and rstd of each norm, and two numbers a head and token.
    """
    if recomputes:
        return 2 * hidden + 8
    return 2 * (3 + 1 + 2 + 2) * hidden + 2 * inner + 2 * 8 + 8 * heads


@pytest.mark.simulated
@pytest.mark.parametrize("recomputes", (False, True))
def test_bytes_a_token_and_layer(recomputes):
    assert of_a_layer(recomputes) == formula(HIDDEN, INNER, HEADS, recomputes)
    assert f"{formula(768, 3072, 12, recomputes):,}" in PAGE


def step(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    manual_seed(3)
    ids, offsets = torch.arange(12) % 30 + 1, torch.tensor([0, 4, 5, 12], dtype=torch.int32)
    with use_backend("triton"):
        out = model(input_ids=ids, cu_seqlens=offsets).last_hidden_state
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    return {"out": out.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("model_type", ("bert", pytest.param("modernbert", marks=pytest.mark.simulated)))
def test_a_model_that_recomputes_is_the_same(model_type):
    """By one op, which is seen in a profile; bit for bit."""
    models = [make(1) if model_type == "bert" else make(2, **WINDOWS) for _ in range(2)]
    plain = step(models[0])
    models[1].gradient_checkpointing_enable()
    with torch.profiler.profile() as profile:
        found = step(models[1])
    assert plain.keys() == found.keys()
    assert all(torch.equal(t, found[name]) for name, t in plain.items())
    calls = [event.name for event in profile.events() if event.name.startswith("_EncoderLayers")]
    assert sorted(calls) == ["_EncoderLayers", "_EncoderLayersBackward"]


@pytest.mark.simulated
def test_where_it_is_refused_layers_are_checkpointed_one_by_one():
    model = make(2)
    for parameter in model.encoder.layer[0].parameters():
        parameter.requires_grad_(False)
    plain = step(model)
    model.zero_grad()
    model.gradient_checkpointing_enable()
    found = step(model)
    for name, t in plain.items():
        assert_close_to_reference(found[name], t.double(), t, GRADIENT_FACTOR, name)
