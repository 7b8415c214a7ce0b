"""Options of nn.Embedding that change what a lookup does: sparse gradients, gradients by frequency, a largest norm."""

from __future__ import annotations

import pytest
import torch
from family_configs import make_config
from full import halved, triton_left_to_full
from hf import make_hf
from isas import backend_with_isa, device_of
from precise import in_float64

import fastbert
from fastbert import ops
from fastbert.models.classes import CLASSES
from fastbert.native.availability import extension_error
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

IDS = torch.tensor([7, 2, 7, 0, 39, 2, 7])


@pytest.fixture(params=("torch", "cpu", "triton"))
def backend(request):
    if request.param == "cpu" and extension_error() is not None:
        pytest.skip(extension_error())
    with backend_with_isa(request.param) as name:
        yield name


@triton_left_to_full
@pytest.mark.parametrize("padding_idx", (None, 2, 5))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_gradient_of_the_rows_that_were_looked_up(backend, dtype, padding_idx):
    """They have the bits of the whole gradient, and the places that torch gives them."""
    device = device_of(backend)
    word, ids = torch.randn(40, 70, dtype=dtype, device=device), IDS.to(device)
    dout = torch.randn(7, 70, dtype=dtype, device=device)
    found = []
    for sparse in (True, False):
        leaf = word.clone().requires_grad_()
        options = {"padding_idx": padding_idx, "sparse": sparse, "backend": backend}
        ops.embed_layer_norm(ids, None, None, leaf, None, None, None, None, **options).backward(dout)
        found.append(leaf.grad)
    rows, whole = found
    assert rows.is_sparse and not whole.is_sparse
    assert torch.equal(rows.coalesce().to_dense(), whole)
    kept = IDS.unique()
    kept = kept if padding_idx is None else kept[kept != padding_idx]
    assert rows.coalesce().indices()[0].tolist() == kept.tolist()


def two_models(kind: str):
    """Ours or an accelerated one, and transformers', of the same weights; both in training, without dropout."""
    config = make_config("bert", 0)
    theirs = make_hf(config, "Model").train()
    if kind == "accelerated":
        ours = fastbert.accelerate(make_hf(config, "Model").train())
    else:
        ours = CLASSES["bert", "Model"](config).train()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@halved
@pytest.mark.parametrize("option,value", (("sparse", True), ("scale_grad_by_freq", True), ("max_norm", 0.3)))
@pytest.mark.parametrize("table", ("word", "position", "token_type"))
@pytest.mark.parametrize("kind", ("own", "accelerated"))
def test_options_of_a_table_are_those_of_torch(kind, table, option, value):
    """Two texts with padding, which counts where a gradient goes by how often a row was looked up."""
    if kind == "own" and option == "scale_grad_by_freq":
        return  # refused: the next test
    found = []
    ours, theirs = two_models(kind)
    ids = torch.stack([IDS, IDS.flip(0)]).clamp(max=30)
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    for model in (ours, theirs, in_float64(theirs)):
        leaf = model.get_submodule(f"embeddings.{table}_embeddings")
        setattr(leaf, option, value)
        out = model(ids, mask).last_hidden_state[mask > 0]
        out.square().sum().backward()
        assert leaf.weight.grad.is_sparse == (option == "sparse")
        found.append((out, leaf.weight.grad.to_dense(), leaf.weight))
    for actual, baseline, oracle in zip(*found, strict=True):
        assert_close_to_reference(actual, oracle, baseline, GRADIENT_FACTOR)


@pytest.mark.parametrize("table", ("word", "position", "token_type"))
def test_own_classes_refuse_gradients_by_counts_of_padding(table):
    ours, _ = two_models("own")
    leaf = ours.get_submodule(f"embeddings.{table}_embeddings")
    leaf.scale_grad_by_freq = True
    with pytest.raises(ValueError, match=rf"embeddings\.{table}_embeddings has scale_grad_by_freq=True"):
        ours(IDS[None])
    with torch.no_grad():
        ours(IDS[None])
    leaf.requires_grad_(False)
    ours(IDS[None])


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_compiled_they_are_still_sparse():
    model, _ = two_models("own")
    model.embeddings.word_embeddings.sparse = True
    compiled = torch.compile(model, backend="eager")
    compiled(IDS[None].clamp(max=30)).last_hidden_state.square().sum().backward()
    assert model.embeddings.word_embeddings.weight.grad.is_sparse
