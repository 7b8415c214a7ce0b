"""What torch.jit and torch.export make of our models: refused with one clear error, or right for other batches too."""

from __future__ import annotations

import pytest
import torch
from full import left_to_full
from seeds import torch_generator
from torch import nn

import fastbert
from fastbert import InputError
from fastbert.models.hf import recording

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
IDS = torch.randint(1, 50, (2, 7), generator=torch_generator(0))
MASK = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])


def make(name: str) -> nn.Module:
    return getattr(fastbert, name)(fastbert.EncoderConfig.of_family("bert", vocab_size=50, **SHAPE)).eval()


class Packed(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        return self.model.encode_packed(input_ids, cu_seqlens, 14)


@pytest.mark.parametrize("backend", ("auto", "torch"))
def test_a_trace_of_packed_batches_is_refused(backend):
    """It would hold the first offsets: with the torch backend it gave the second batch the first one's padding."""
    with (
        fastbert.use_backend(backend),
        pytest.raises(InputError, match=r"^torch\.jit\.trace would record which tokens"),
    ):
        torch.jit.trace(Packed(make("BertModel")), (IDS.flatten(), torch.tensor([0, 7, 14], dtype=torch.int32)))


@left_to_full(lambda p: p["name"] == "BertForSequenceClassification")  # a head as the other
@pytest.mark.parametrize("name", ("BertModel", "BertForMaskedLM", "BertForSequenceClassification"))
def test_without_transformers_a_trace_and_an_export_are_refused(name, monkeypatch):
    """With it, its code is recorded: tests/ecosystem/test_own_inference.py."""
    monkeypatch.setattr(recording, "_has_transformers", lambda: False)
    for inputs in ((IDS, MASK), (IDS,)):
        with pytest.raises(InputError, match=r"^torch\.jit\.trace would record which tokens.* install transformers"):
            torch.jit.trace(make(name), inputs, strict=False)
    with pytest.raises(
        InputError, match=r"^torch\.export cannot record how a mask packs a batch.* install transformers"
    ):
        torch.export.export(make(name), (IDS, MASK))


@pytest.mark.parametrize("name", ("BertModel", "BertForMaskedLM"))
def test_a_script_is_refused(name):
    with pytest.raises(TypeError, match=r"^torch\.jit\.script cannot compile this model; torch\.compile does$"):
        torch.jit.script(make(name))
    with pytest.raises(TypeError, match=r"^torch\.jit\.script cannot"):
        torch.jit.script(nn.Sequential(make(name)))


def test_an_export_of_packed_batches_holds_for_other_lengths():
    model = Packed(make("BertModel"))
    exported = torch.export.export(model, (IDS.flatten(), torch.tensor([0, 7, 14], dtype=torch.int32))).module()
    for offsets in ([0, 7, 14], [0, 3, 14], [0, 0, 14]):
        cu_seqlens, others = torch.tensor(offsets, dtype=torch.int32), IDS.flatten().flip(0)
        with torch.no_grad():
            assert torch.equal(exported(others, cu_seqlens), model(others, cu_seqlens)), offsets
