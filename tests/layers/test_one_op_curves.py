"""Training runs with all layers as one op, beside the same runs op by op: what a step's tests of gradients would miss.

Both runs are in bf16 under autocast, in Triton's interpreter. The oracle is the run whose layers are the ops in
float32, with the same masks: the rows of seeds are the same, however they are drawn. A run may err as much as the error
rule says, over the curve and at its worst step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from seeds import manual_seed, torch_generator

from fastbert import ops
from fastbert.backend import FUSED, use_backend
from fastbert.config import EncoderConfig
from fastbert.models.classes import CLASSES
from fastbert.native.availability import triton_error
from fastbert.packed_inputs import pack_inputs
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.skipif(triton_error() is not None, reason=str(triton_error())),
]

WORDS = 30
SMALL = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "num_labels": 3,
    "pad_token_id": 0,
}
DROPS = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
NO_DROPS = dict.fromkeys(DROPS, 0.0)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dropout": ("bert", {**DROPS, "num_hidden_layers": 2}),
    "windows": ("modernbert", {"num_hidden_layers": 2, "global_attn_every_n_layers": 2, "local_attention": 4}),
    "rotary": ("nomic_bert", {"num_hidden_layers": 1, "type_vocab_size": 1, **NO_DROPS}),
    "grouped": ("eurobert", {"num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 8}),
    "pre-norm": ("roberta-prelayernorm", {**DROPS, "num_hidden_layers": 2}),
}
RUNS = [
    ("dropout", "MaskedLM"),
    ("dropout", "SequenceClassification"),
    ("dropout", "embeddings"),
    ("windows", "TokenClassification"),
    ("rotary", "MaskedLM"),
    ("grouped", "SequenceClassification"),
    ("pre-norm", "TokenClassification"),
]
SHORT = {("dropout", "MaskedLM"), ("windows", "TokenClassification")}


def model_of(kind: str, head: str) -> torch.nn.Module:
    model_type, changes = KINDS[kind]
    manual_seed(0)
    config = EncoderConfig.from_dict({"model_type": model_type, "initializer_range": 0.2, **SMALL, **changes})
    return CLASSES[model_type, "Model" if head == "embeddings" else head](config).train()


def rows(draw: torch.Generator) -> list[list[int]]:
    """Each word is followed by the next one."""
    starts = torch.randint(5, WORDS, (4,), generator=draw).tolist()
    return [[5 + (start + i) % (WORDS - 5) for i in range(2 + n)] for n, start in enumerate(starts)]


def masked_words(model, ids, draw) -> torch.Tensor:
    labels = [[word if i % 2 else -100 for i, word in enumerate(row)] for row in ids]
    given = [[4 if i % 2 else word for i, word in enumerate(row)] for row in ids]
    return model(**pack_inputs(given, labels=labels)).loss


def tokens(model, ids, draw) -> torch.Tensor:
    return model(**pack_inputs(ids, labels=[[word % 3 for word in row] for row in ids])).loss


def classes(model, ids, draw) -> torch.Tensor:
    return model(**pack_inputs(ids, labels=[row[0] % 3 for row in ids])).loss


def ranking(model, ids, draw) -> torch.Tensor:
    """Sentence vectors: a text and its first words, among all others' (van den Oord et al. 2018, eq. 4)."""
    packed = [pack_inputs(each) for each in (ids, [row[:2] for row in ids])]
    states = [model(**each).last_hidden_state for each in packed]
    left, right = (
        ops.normalize(ops.pooling(x, p["batch"].cu_seqlens, mode="mean")) for x, p in zip(states, packed, strict=True)
    )
    return torch.nn.functional.cross_entropy(10.0 * left.float() @ right.float().T, torch.arange(len(ids)))


LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "MaskedLM": masked_words,
    "TokenClassification": tokens,
    "SequenceClassification": classes,
    "embeddings": ranking,
}


def curve(kind: str, head: str, steps: int, autocast: bool) -> torch.Tensor:
    """The losses of a run. Steps draw their seeds as trainers have them drawn: all at once."""
    model, seeds = model_of(kind, head), ops.StepSeeds("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses, draw = [], torch_generator(11)
    for step in range(steps):
        seeds.begin(step)
        with use_backend("triton"), ops.seeds_from(seeds), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = LOSSES[head](model, rows(draw), draw)
        with use_backend("triton"):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().float())
    return torch.stack(losses)


CURVES = [(*run, 4) for run in RUNS if run in SHORT] + [pytest.param(*run, 50, marks=pytest.mark.full) for run in RUNS]


@pytest.mark.parametrize(("kind", "head", "steps"), CURVES)
def test_a_run_errs_no_more_than_op_by_op(kind, head, steps, monkeypatch):
    served = []

    def counted(backend):
        accepts, run = FUSED["encoder_layers_training"][backend]
        return accepts, lambda *given, **options: served.append(1) or run(*given, **options)

    with monkeypatch.context() as patch:
        backend = next(b for b in FUSED["encoder_layers_training"] if b.value == "triton")
        patch.setitem(FUSED["encoder_layers_training"], backend, counted(backend))
        ours = curve(kind, head, steps, autocast=True)
    assert len(served) == steps * (2 if head == "embeddings" else 1)
    monkeypatch.setattr(ops, "try_fused", lambda op, x, find_operands: "op by op")
    baseline, oracle = (curve(kind, head, steps, autocast) for autocast in (True, False))
    assert_close_to_reference(ours.bfloat16(), oracle.double(), baseline.bfloat16(), GRADIENT_FACTOR, f"{kind} {head}")
