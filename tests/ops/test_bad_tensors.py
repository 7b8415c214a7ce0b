"""Tensors that kernels cannot take, or must take with care: other devices, dtypes, shapes, addresses and sizes."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from full import halved, triton_left_to_full
from isas import CPU_BACKENDS, backend_with_isa, device_of
from layer_specs import spec_of
from seeds import torch_generator
from test_ops import check

import fastbert
from fastbert import ops
from fastbert.backend import use_backend
from fastbert.errors import BackendError, InputError
from fastbert.packed_inputs import ModelInputs
from fastbert.testing import reference
from fastbert.testing.cases import Lengths
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

CASE = Lengths("", (5, 0, 9), padding_rows=2)
OFFSETS, TOKENS = CASE.cu_seqlens, CASE.total_tokens


GENERATOR = torch_generator(0)


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR)


def ids(limit: int) -> torch.Tensor:
    return torch.randint(limit, (TOKENS,), generator=GENERATOR)


W = 80  # wide enough for whole vectors, and a rest
# {op: its tensors by name}; the first of them is where all others must be.
TENSORS = {
    "attention": {**{name: rows(TOKENS, 2, 16) for name in "qkv"}, "cu_seqlens": OFFSETS},
    "attention_probs": {**{name: rows(TOKENS, 2, 16) for name in "qk"}, "cu_seqlens": OFFSETS},
    "attention_from_probs": {"probs": rows(3, 2, 9, 9), "v": rows(TOKENS, 2, 16), "cu_seqlens": OFFSETS},
    "add_layer_norm": {
        "x": rows(TOKENS, W), "residual": rows(TOKENS, W), "weight": rows(W), "bias": rows(W), "x_bias": rows(W),
    },
    "add_rms_norm": {"x": rows(TOKENS, W), "residual": rows(TOKENS, W), "weight": rows(W), "x_bias": rows(W)},
    "embed_layer_norm": {
        "word": rows(9, W), "position": rows(9, W), "token_type": rows(2, W), "weight": rows(W), "bias": rows(W),
        "input_ids": ids(9), "position_ids": ids(9), "token_type_ids": ids(2),
    },
    "feed_forward": {"x": rows(TOKENS, W), "up_weight": rows(96, W), "up_bias": rows(96), "down_weight": rows(W, 96)},
    "linear": {"x": rows(TOKENS, W), "weight": rows(96, W), "bias": rows(96)},
    "cross_entropy": {"hidden_states": rows(TOKENS, W), "weight": rows(9, W), "bias": rows(9), "labels": ids(9)},
    "logits_cross_entropy": {"logits": rows(TOKENS, 9), "labels": ids(9)},
    "sequence_cross_entropy": {"logits": rows(TOKENS), "cu_seqlens": OFFSETS, "targets": torch.tensor([2, 0, 1])},
    "pooling": {"hidden_states": rows(TOKENS, W), "cu_seqlens": OFFSETS},
    "maxsim": {
        "queries": rows(TOKENS, W), "documents": rows(TOKENS, W), "cu_seqlens_q": OFFSETS, "cu_seqlens_d": OFFSETS,
    },
    "pack": {"x": rows(TOKENS, W), "indices": torch.tensor([1, 3])},
    "unpack": {"packed": rows(2, W), "indices": torch.tensor([1, 3])},
}  # fmt: skip
OPTIONS = {
    "attention": {"max_seqlen": 9},
    "attention_probs": {"max_seqlen": 9},
    "linear": {"activation": "gelu"},
    "unpack": {"num_rows": 4},
}
ALONE = {"activation", "at_least_fp32", "compute_dtype", "dropout", "in_int8", "normalize"}  # take one tensor
# Tested below, in test_adamw.py, or through `linear`.
OF_OTHERS = {
    "DeferredRows",
    "EncoderOperands",
    "HeldEncoder",
    "LayerOperands",
    "LayerWeights",
    "LinearWeights",
    "NormWeights",
    "Relative",
    "Rotary",
    "StepSeeds",
    "adamw",
    "adamw_deferred",
    "linears",
    "are_weights_packed",
    "multiplies_bf16",
    "only_recorded_writes",
    "repack",
    "rms_norm",
    "rotate",
    "seeds_from",
    "transform_unsupported",
    "try_fused",
    "warn_of_missing_kernels",
    "with_same_seeds",
}


def call(op: str, tensors: dict[str, torch.Tensor], **options):
    return getattr(ops, op)(**tensors, **OPTIONS.get(op, {}), **options)


def test_no_op_is_forgotten():
    assert set(ops.__all__) == set(TENSORS) | ALONE | OF_OTHERS
    for op, tensors in TENSORS.items():
        call(op, tensors)


@halved
@pytest.mark.parametrize("backend", ("torch", None))
@pytest.mark.parametrize("op, name", [(op, name) for op, tensors in TENSORS.items() for name in list(tensors)[1:]])
def test_a_tensor_on_another_device(op, name, backend):
    """Before anything is launched, whatever the backend; meta stands for a device that there is not."""
    tensors = TENSORS[op]
    first = next(iter(tensors))
    for moved, message in ((name, f"{name} is on meta, {first} on cpu"), (first, f" is on cpu, {first} on meta")):
        given = {**tensors, moved: tensors[moved].to("meta")}
        refused = pytest.raises(ValueError, match=f"{message}; all must be on one device")
        with use_backend(backend or "auto"), torch.profiler.profile() as profile, refused:
            call(op, given)
        assert not [event.name for event in profile.events() if event.name.startswith(("aten::", "fastbert::"))]


def layer_operands(make=rows) -> ops.LayerOperands:
    linears = [ops.LinearWeights(make(32, 32), make(32), None, None) for _ in range(6)]
    norms = ops.NormWeights(make(32), make(32), 1e-5), ops.NormWeights(make(32), make(32), 1e-5)
    return ops.LayerOperands.of([ops.LayerWeights(spec_of(num_heads=2, num_kv_heads=2, head_dim=16), linears, norms)])


def encoder_layers(x, cu_seqlens):
    operands = layer_operands()
    return ops.try_fused("encoder_layers", x, lambda: operands)(cu_seqlens)


def encoder_layers_training(x, cu_seqlens):
    operands = layer_operands(lambda *shape: torch.nn.Parameter(rows(*shape)))
    return ops.try_fused("encoder_layers_training", x, lambda: operands)(cu_seqlens)


WITH_OFFSETS = {
    **{
        op: partial(lambda op, c: call(op, {**TENSORS[op], "cu_seqlens": c}), op)
        for op, tensors in TENSORS.items()
        if "cu_seqlens" in tensors
    },
    "encoder_layers": lambda c: torch.no_grad()(encoder_layers)(rows(TOKENS, 32), c),
    "encoder_layers_training": lambda c: encoder_layers_training(rows(TOKENS, 32), c),
}


@pytest.mark.parametrize("op", WITH_OFFSETS)
def test_offsets_of_another_kind(op):
    run = WITH_OFFSETS[op]
    if run(OFFSETS) is None:
        pytest.skip(f"no backend has {op} here")
    bad = (
        (OFFSETS.float(), "cu_seqlens is torch.float32; it must be int32"),
        (OFFSETS.bool(), "cu_seqlens is torch.bool; it must be int32"),
        (OFFSETS[None], r"cu_seqlens has shape \(1, 4\); it must be \(batch \+ 1,\)"),
        (OFFSETS[:0], r"cu_seqlens has shape \(0,\); it must be"),
        (OFFSETS[0], r"cu_seqlens has shape \(\); it must be"),
    )
    for offsets, message in bad:
        with pytest.raises(ValueError, match=f"{op}: {message}"):
            run(offsets)
    with pytest.raises(ValueError, match="cu_seqlens is on meta"):
        run(OFFSETS.to("meta"))


@pytest.mark.parametrize(
    "op, backend",
    [("attention", b) for b in ("torch", "cpu-generic", "triton")]
    + [("pooling", b) for b in ("torch", "cpu-generic", "triton")],
)
def test_offsets_of_int64_or_with_gaps_are_the_same_offsets(op, backend):
    with backend_with_isa(backend) as name:
        tensors = {n: t.to(device_of(backend)) for n, t in TENSORS[op].items()}
        expected = call(op, tensors, backend=name)
        offsets = tensors["cu_seqlens"]
        strided = torch.stack([offsets, offsets], 1)[:, 0]
        assert not strided.is_contiguous()
        for other in (offsets.long(), strided, strided.long()):
            assert torch.equal(call(op, {**tensors, "cu_seqlens": other}, backend=name), expected)


@pytest.mark.parametrize("head_dim", (257, 320))
def test_heads_wider_than_the_kernels_run_in_torch(head_dim):
    tensors = {name: rows(TOKENS, 1, head_dim) for name in "qkv"}
    with torch.profiler.profile() as profile:
        check(
            lambda q, k, v: ops.attention(q, k, v, OFFSETS, 9),
            lambda q, k, v: reference.attention(q, k, v, OFFSETS),
            tensors,
            torch.float32,
            joint=True,
        )
    assert not [event.name for event in profile.events() if event.name.startswith("fastbert::")]
    for backend in ("cpu", "triton"):
        with backend_with_isa(backend), pytest.raises(BackendError, match=rf"head_dim is {head_dim} \(has 2 to 256\)"):
            ops.attention(**tensors, cu_seqlens=OFFSETS, max_seqlen=9, backend=backend)


def tiny_model(**fields) -> fastbert.BertModel:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = fastbert.EncoderConfig(**{"vocab_size": 50, "max_position_embeddings": 20, **sizes, **fields})
    return fastbert.BertModel(config).eval()


@torch.no_grad()
def test_a_model_with_wide_heads_runs():
    model, batch = tiny_model(hidden_size=320, num_attention_heads=1), torch.randint(50, (2, 7))
    oracle = copy.deepcopy(model).double()(batch)[0]
    with use_backend("torch"):
        baseline = model(batch)[0]
    assert_close_to_reference(model(batch)[0], oracle, baseline, GRADIENT_FACTOR)


LIMITS = {"input_ids": 50, "token_type_ids": 2, "position_ids": 20}


@pytest.mark.parametrize("layout", ("padded", "masked", "packed"))
@pytest.mark.parametrize("name", LIMITS)
def test_ids_out_of_range(name, layout):
    """Each id tensor in each layout, below and above its table, at the last real token; at padding it is no error."""
    model, limit = tiny_model(), LIMITS[name]
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]])
    given = {n: torch.full((2, 4), most - 1) for n, most in LIMITS.items()}
    if layout == "masked":
        given["attention_mask"] = mask
    if layout == "packed":
        given = {n: t.flatten() for n, t in given.items()} | {"cu_seqlens": torch.tensor([0, 3, 8])}
    model.prepare(ModelInputs(**given))
    for value in (-1, limit, 10**6, -(2**62)):
        given[name] = given[name].clone()
        given[name].view(-1)[-1] = value
        with pytest.raises(InputError, match=f"{name} holds {value}; valid values are 0 to {limit - 1}"):
            model(**given)
        if layout == "masked":
            given[name] = torch.where(mask.flip(0) == 1, limit - 1, value)
            with pytest.raises(InputError, match=f"{name} holds {value};"):
                model(**given)
            given[name] = torch.where(mask == 1, limit - 1, value)
            model(**given)


@pytest.mark.parametrize("name", ("token_type_ids", "position_ids", "cu_seqlens"))
def test_a_models_inputs_on_two_devices(name):
    given = {n: torch.zeros(8, dtype=torch.int64) for n in LIMITS} | {"cu_seqlens": torch.tensor([0, 3, 8])}
    given[name] = given[name].to("meta")
    with pytest.raises(InputError, match=f"{name} is on meta; the input is on cpu"):
        tiny_model()(**given)


def test_a_model_elsewhere_than_its_inputs():
    model = tiny_model().to("meta")
    with pytest.raises(ValueError, match="embed_layer_norm: input_ids is on cpu, word on meta"):
        model(torch.zeros(2, 4, dtype=torch.int64))


def off(t: torch.Tensor) -> torch.Tensor:
    """The same values, contiguous, one element after an address that wide loads take; so are its gradients."""
    moved = torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)
    assert moved.is_contiguous() and moved.data_ptr() % 16 == t.element_size()
    return moved


EVERY_BACKEND = pytest.mark.parametrize("backend", ("torch", *CPU_BACKENDS, "triton"))
LITERAL = {
    "attention": lambda **t: reference.attention(**t, cu_seqlens=OFFSETS),
    "add_layer_norm": lambda x, residual, weight, bias, x_bias: reference.add_layer_norm(
        x, residual, weight, bias, x_bias
    )[0],
    "add_rms_norm": lambda **t: reference.add_rms_norm(**t)[0],
    "embed_layer_norm": lambda **t: reference.embed_layer_norm(
        **{name: t.get(name, TENSORS["embed_layer_norm"].get(name)) for name in TENSORS["embed_layer_norm"]}
    ),
    "feed_forward": lambda x, up_weight, up_bias, down_weight: reference.feed_forward(
        x, up_weight, up_bias, down_weight, "gelu"
    ),
    "linear": partial(reference.linear, name="gelu"),
    "cross_entropy": lambda hidden_states, weight, bias: reference.cross_entropy(
        hidden_states, weight, bias, TENSORS["cross_entropy"]["labels"]
    ),
    "pooling": lambda hidden_states: reference.pooling(hidden_states, OFFSETS, "mean"),
    "maxsim": lambda queries, documents: reference.maxsim(queries, OFFSETS, documents, OFFSETS),
    "pack": lambda x: x[[1, 3]],
    "unpack": lambda packed: torch.stack([packed[0] * 0, packed[0], packed[0] * 0, packed[1]]),
}


@triton_left_to_full
@halved
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=lambda d: str(d).removeprefix("torch."))
@EVERY_BACKEND
@pytest.mark.parametrize("op", LITERAL)
def test_addresses_that_wide_loads_do_not_take(op, backend, dtype):
    """Values, results' gradients, ids and offsets; backends that have no kernel run in torch."""
    fixed = {name: t for name, t in TENSORS[op].items() if not t.is_floating_point()}
    with backend_with_isa(backend) as name, use_backend(name):
        device = device_of(backend)

        def ours(**tensors):
            at = {n: off(t.to(device)) for n, t in fixed.items()}
            return off(call(op, {**{n: off(t) for n, t in tensors.items()}, **at}))

        floats = {n: torch.randn_like(t) for n, t in TENSORS[op].items() if t.is_floating_point()}
        check(ours, LITERAL[op], floats, dtype, joint=op == "attention", device=device)


@triton_left_to_full
@EVERY_BACKEND
def test_whole_layers_at_such_addresses(backend):
    with backend_with_isa(backend) as name, use_backend(name):
        model = tiny_model()
        batch = torch.randint(50, (2, 7), device=device_of(backend))
        for train in (False, True):
            expected = model(batch)[0].detach()
            with torch.set_grad_enabled(train):
                moved = copy.deepcopy(model)
                for parameter in moved.parameters():
                    parameter.data = off(parameter.data)
                assert torch.equal(moved(batch)[0], expected)
