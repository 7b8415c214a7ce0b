"""A head of masked words and its loss as one step of autograd: the bits of its ops, and the oracle."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from family_configs import config_for
from full import halved, left_to_simulated
from precise import in_float64
from seeds import manual_seed, torch_generator
from torch import nn

import fastbert
from fastbert import ops
from fastbert.backend import Backend, use_backend
from fastbert.models.classes import CLASSES
from fastbert.native.availability import triton_error
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

pytestmark = pytest.mark.skipif(triton_error() is not None, reason=str(triton_error()))

WIDTH, EMBEDDING, WORDS, TOKENS = 24, 16, 37, 11
IDS = [[5, 6, 7, 8, 9], [10, 11, 12], [13, 14, 15, 16]]
LABELS = [[-100, 6, -100, 8, -100], [10, -100, -100], [-100, -100, 15, 16]]
MODES = ("float32", "bfloat16", "autocast")
NAMES = ("dense", "dense_bias", "weight", "bias", "table", "table_bias")


def op_by_op(monkeypatch) -> None:
    monkeypatch.setitem(
        fastbert.backend.SUPPORTS["masked_lm_loss"], Backend.TRITON, lambda x: "the ops of the head run one by one"
    )


def model_of(name: str, mode: str = "float32") -> nn.Module:
    """Without dropout, and with one layer: the head is behind it."""
    manual_seed(0)
    model = CLASSES[name, "MaskedLM"](config_for(name, "MaskedLM", num_hidden_layers=1)).eval()
    return model.to(torch.bfloat16) if mode == "bfloat16" else model


def forward(model: nn.Module, mode: str, **options) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        return model(**fastbert.pack_inputs(IDS, labels=LABELS), **options).loss


def step(model: nn.Module, mode: str, backend: str = "triton", **options) -> dict[str, torch.Tensor]:
    """The loss and all gradients."""
    model.zero_grad()
    with use_backend(backend):
        loss = forward(model, mode, **options)
        loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


def serves(model: nn.Module, mode: str = "float32") -> list:
    """What the op was bound to in a forward pass; nothing where it refused."""
    found, run = [], fastbert.backend.FUSED["masked_lm_loss"][Backend.TRITON]
    fastbert.backend.FUSED["masked_lm_loss"][Backend.TRITON] = run[0], lambda *a: found.append(a) or run[1](*a)
    try:
        with use_backend("triton"):
            forward(model, mode)
    finally:
        fastbert.backend.FUSED["masked_lm_loss"][Backend.TRITON] = run
    return found


@left_to_simulated(lambda p: (p["name"], p["mode"]) != ("bert", "float32"))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ("bert", "roberta", "albert", "distilbert", "modernbert", "deberta-v2"))
def test_heads_are_as_their_ops(name, mode, monkeypatch):
    """In float32 bit for bit. In 16 bits, whose products go by the processor, by the error rule."""
    model = model_of(name, mode)
    assert len(serves(model, mode)) == 1
    found, oracle = step(model, mode, num_items_in_batch=7), step(in_float64(model), "", "torch", num_items_in_batch=7)
    op_by_op(monkeypatch)
    assert not serves(model, mode)
    expected = step(model, mode, num_items_in_batch=7)
    assert found.keys() == expected.keys()
    for key, t in found.items():
        if mode == "float32":
            assert torch.equal(t, expected[key]), key
        elif not key.endswith(("key.bias", "k_lin.bias", "key_proj.bias")):  # which softmax does not see
            assert_close_to_reference(
                t.bfloat16(), oracle[key].double(), expected[key].bfloat16(), GRADIENT_FACTOR, f"{key} of {name}"
            )


def operands(dtype: torch.dtype, has_bias: bool = True) -> dict[str, torch.Tensor | None]:
    noise = torch_generator(3)

    def randn(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=noise) / 4).to(dtype)

    made = {
        "x": randn(TOKENS, WIDTH),
        "dense": randn(EMBEDDING, WIDTH),
        "dense_bias": randn(EMBEDDING),
        "weight": 1 + randn(EMBEDDING),
        "bias": randn(EMBEDDING),
        "table": randn(WORDS, EMBEDDING),
        "table_bias": randn(WORDS),
    }
    return made if has_bias else {**made, "dense_bias": None, "bias": None, "table_bias": None}


def formula(activation: str, indices, labels, x, dense, dense_bias, weight, bias, table, table_bias):
    inner = ops.activation(F.linear(x[indices], dense, dense_bias), activation)
    out = F.layer_norm(inner, inner.shape[-1:], weight, bias, 1e-5)
    logits = F.linear(out, table, table_bias)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels[indices])


def ours(activation: str, indices, labels, x, dense, dense_bias, weight, bias, table, table_bias):
    given = ops.MaskedLMOperands(
        ops.LinearWeights(dense, dense_bias, None, None),
        activation,
        ops.NormWeights(weight, bias, 1e-5),
        table,
        table_bias,
    )
    with use_backend("triton"):
        found = ops.try_fused("masked_lm_loss", x, lambda: given)
        assert callable(found), found
        return found(indices, labels)


def differentiated(run, activation, indices, labels, tensors, scale: float = 3.0) -> dict[str, torch.Tensor]:
    leaves = {name: None if t is None else t.clone().requires_grad_() for name, t in tensors.items()}
    loss = run(activation, indices, labels, **leaves)
    there = {name: t for name, t in leaves.items() if t is not None}
    return {
        "loss": loss.detach(),
        **dict(zip(there, torch.autograd.grad(loss * scale, [*there.values()]), strict=True)),
    }


@halved
@pytest.mark.parametrize("has_bias", (True, False))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("activation", ("gelu", "gelu_tanh", "relu", "silu", "tanh"))
def test_the_op_against_the_formula_in_float64(activation, dtype, has_bias):
    """Among the tokens that were picked one has no label, twice, as slack is; and one that has is there twice."""
    labels = torch.tensor([3, -100, 36, 0, -100, -100, 9, -100, -100, 12, -100])
    indices, tensors = torch.tensor([0, 2, 3, 6, 6, 9, 10, 10]), operands(dtype, has_bias)
    exact = {name: None if t is None else t.double() for name, t in tensors.items()}
    found = differentiated(ours, activation, indices, labels, tensors)
    oracle = differentiated(formula, activation, indices, labels, exact)
    baseline = differentiated(formula, activation, indices, labels, tensors)
    for name, t in found.items():
        assert t.dtype is (torch.float32 if name == "loss" else dtype)
        assert_close_to_reference(t, oracle[name], baseline[name], GRADIENT_FACTOR, name)
    assert not found["x"][10].any()


@pytest.mark.parametrize("indices", (torch.empty(0, dtype=torch.int64), torch.tensor([2, 3])))
def test_without_a_label_the_loss_and_all_gradients_are_0(indices):
    found = differentiated(ours, "gelu", indices, torch.full((TOKENS,), -100), operands(torch.float32))
    for name, t in found.items():
        assert not t.any(), name


@pytest.mark.parametrize("frozen", ("x", *NAMES))
def test_what_takes_no_gradient_gets_none(frozen):
    leaves = {name: t.requires_grad_(name != frozen) for name, t in operands(torch.float32).items()}
    ours("gelu", torch.tensor([1, 4]), torch.arange(TOKENS), **leaves).backward()
    assert [name for name, t in leaves.items() if t.grad is None] == [frozen]


def test_without_gradients_no_operands_are_asked_for():
    with use_backend("triton"), torch.no_grad():
        assert "gradients are off" in ops.try_fused("masked_lm_loss", torch.zeros(2, 8), pytest.fail)


@pytest.mark.parametrize(
    ("change", "reason"),
    (
        (
            {"dense": torch.zeros(EMBEDDING, WIDTH, dtype=torch.bfloat16)},
            "parameters are torch.bfloat16 and torch.float32",
        ),
        ({"x": torch.zeros(TOKENS, WIDTH, dtype=torch.bfloat16)}, "hidden_states are torch.bfloat16, the head's"),
    ),
)
def test_a_refusal_says_why(change, reason):
    with pytest.raises(AssertionError, match=reason):
        ours("gelu", torch.tensor([1]), torch.arange(TOKENS), **{**operands(torch.float32), **change})


def hooked(model) -> None:
    model.cls.predictions.transform.register_forward_hook(lambda *given: None)


def hooked_outside(model) -> None:
    model.cls.register_forward_hook(lambda *given: None)


def hooked_leaf(model) -> None:
    model.cls.predictions.transform.dense.register_forward_hook(lambda *given: None)


def replaced_norm(model) -> None:
    model.cls.predictions.transform.LayerNorm = nn.Identity()


def replaced_decoder(model) -> None:
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model.cls.predictions.decoder = Doubled(model.config.hidden_size, model.config.vocab_size)


@pytest.mark.filterwarnings("ignore:fastbert. BertForMaskedLM")
@pytest.mark.parametrize("change", (hooked, hooked_outside, hooked_leaf, replaced_norm, replaced_decoder))
def test_a_head_that_is_not_plain_is_called(change):
    model = model_of("bert")  # which is served: test_heads_are_as_their_ops
    change(model)
    assert not serves(model)
