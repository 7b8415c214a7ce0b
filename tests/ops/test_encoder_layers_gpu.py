"""All layers as one op on the GPU's kernels, in Triton's interpreter: values, gradients, dropout, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from full import halved, left_to_simulated, thinned
from layer_specs import (
    CASES,
    CU_SEQLENS,
    HIDDEN,
    NUM_KEYS,
    POSITIONS,
    TOKENS,
    WITH_HOLES,
    Case,
    fused,
    make,
    operands_of,
)
from seeds import manual_seed, torch_generator
from trained_layers import MODES, Several, assert_same, check, differentiate, masks

from fastbert import ops
from fastbert.backend import use_backend
from fastbert.native.availability import triton_error

pytestmark = pytest.mark.skipif(triton_error() is not None, reason=str(triton_error()))

OPS = ("encoder_layers_training", "encoder_layers_recomputing")
_NORMS = "queries, keys or what a sublayer gives have norms, or norms a zero-centred weight"
REFUSED = {
    "pre, some biases": "of the Linears of one product some have a bias, and others not",
    "disentangled": "attention has relative terms",
    "bias by distance": "attention has relative terms",
    "pre, disentangled": "attention has relative terms",
    **dict.fromkeys(("qwen3", "gemma3", "post, normed heads"), _NORMS),
}
SERVED = [name for name in CASES if name not in REFUSED]
STACKS = {
    "post": ("post", "post, no biases", "post, no attention norm", "post, grouped"),
    "post, some gated": ("post", "post, merged", "post"),
    "modernbert": ("global", "local", "global"),
    "pre": ("pre", "pre, local", "pre, grouped, merged"),
    "rms": ("rms, grouped", "rms"),
}
SLACK = torch.cat([CU_SEQLENS[:-1], CU_SEQLENS[-1:] - 7])
ONE_TOKEN = torch.tensor([0, 1], dtype=torch.int32)
X = torch.randn(TOKENS, HIDDEN, generator=torch_generator(1))


def stack_of(name: str) -> list[Case]:
    """With one activation, as the fused op asks."""
    cases = [CASES[each] for each in STACKS[name]]
    activation = cases[0].spec.feed_forward.activation
    alike = [replace(case.spec.feed_forward, activation=activation) for case in cases]
    return [replace(case, spec=replace(case.spec, feed_forward=half)) for case, half in zip(cases, alike, strict=True)]


def all_but(name: str, mode: str, op: str) -> pytest.MarkDecorator:
    """In `make test` one case of a test runs."""
    return left_to_simulated(lambda p: (p["name"], p["mode"], p["op"]) != (name, mode, op))


@all_but("pre, merged", "float32", OPS[0])
@thinned(7)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SERVED)
def test_against_oracle(name, mode, op):
    with use_backend("triton"):
        check([CASES[name]], mode, name=name, op=op, cu_seqlens=SLACK)


@all_but("post, merged", "autocast", OPS[1])
@thinned(7)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SERVED)
def test_dropout_against_oracle(name, mode, op):
    case = CASES[name].with_dropouts(0.1, 0.2, 0.3, 0.4)
    with use_backend("triton"):
        check([case], mode, masks(case, 7, "triton"), 7, name, op, positions=WITH_HOLES)


@all_but("post", "float32", OPS[0])
@thinned(5)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", STACKS)
def test_several_layers_against_oracle(name, mode, op):
    with use_backend("triton"):
        check(stack_of(name), mode, name=name, op=op)


def trained(op: str, groups: list[Several], x: torch.Tensor, autocast: bool = False, **shared) -> dict:
    """The groups one after the other, each as one op, with all gradients."""
    layers = [layer for group in groups for layer in group.layers]
    sizes = [len(group.layers) for group in groups]

    def run(several: Several, x: torch.Tensor) -> torch.Tensor:
        manual_seed(3)
        given = iter(several.layers)
        for size in sizes:
            x = fused(op, [next(given) for _ in range(size)], x, **shared)
        return x

    with use_backend("triton"), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return differentiate(run, Several(layers), x)


@pytest.mark.simulated
@halved
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", STACKS)
def test_several_layers_are_one_after_the_other_and_recomputed_ones_the_same(name, mode):
    """With their bits and masks, forward and backward; but where a pre-norm layer ends and no norm follows, gradients
    are rounded before they are dropped.
    """
    dtype = torch.bfloat16 if mode == "bfloat16" else torch.float32
    layers = [make(case.with_dropouts(0.1, 0.2, 0.3, 0.4), i) for i, case in enumerate(stack_of(name)[:2])]
    layers = [layer.map(lambda t: t.to(dtype)) for layer in layers]
    autocast, x = mode == "autocast", X[:20].to(dtype)
    shared = {"cu_seqlens": CU_SEQLENS[:4]}
    whole = trained(OPS[0], [Several(layers)], x, autocast, **shared)
    assert_same(trained(OPS[1], [Several(layers)], x, autocast, **shared), whole)
    apart = trained(OPS[0], [Several([layer]) for layer in layers], x, autocast, **shared)
    assert_same({"out": apart["out"]} if layers[0].spec.norm_first else apart, whole)


@pytest.mark.simulated
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", ("post", "global", "rms, grouped"))
def test_one_token_no_gradient_of_x_and_rows_that_lie_apart(name, op):
    layer, x = Several([make(CASES[name].with_dropouts(0.1, 0.2, 0.3, 0.4))]), X[:6]
    one = trained(op, [layer], X[:1], cu_seqlens=ONE_TOKEN)
    assert all(t.isfinite().all() for t in one.values()) and one["dx"].any()
    shared = {"cu_seqlens": CU_SEQLENS[:3]}
    expected = trained(op, [layer], x, **shared)
    assert_same(trained(op, [layer], torch.cat([x, x], 1)[:, :HIDDEN], **shared), expected)
    with use_backend("triton"):

        def run(several: Several, x: torch.Tensor) -> torch.Tensor:
            manual_seed(3)
            return fused(op, several.layers, x, **shared)

        assert_same(differentiate(run, layer, x, needs_dx=False), expected)


@pytest.mark.simulated
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", ("local", "post"))
def test_tokens_that_attend_alone(name, op):
    with use_backend("triton"):
        check([CASES[name]], "float32", name=name, op=op, num_keys=NUM_KEYS)


@pytest.mark.simulated
@pytest.mark.parametrize("op", OPS)
def test_positions_that_lie_apart(op):
    layer, shared = Several([make(CASES["local"])]), {"cu_seqlens": CU_SEQLENS}
    expected = trained(op, [layer], X, positions=WITH_HOLES, **shared)
    apart = torch.stack([WITH_HOLES, -WITH_HOLES], 1).int()[:, 0]
    assert not apart.is_contiguous()
    assert_same(trained(op, [layer], X, positions=apart, **shared), expected)
    assert not torch.equal(trained(op, [layer], X, positions=POSITIONS, **shared)["out"], expected["out"])


@pytest.mark.simulated
def test_weights_at_odd_addresses():
    """As parts of a flat vector may lie: loads of 16 bytes would fault."""

    def moved(t: torch.Tensor) -> torch.Tensor:
        memory = torch.empty(t.numel() + 1, dtype=t.dtype)
        return memory[1:].view(t.shape).copy_(t)

    layer = make(CASES["post"])
    expected, found, shared = [], [], {"cu_seqlens": CU_SEQLENS[:3]}
    for mode in (False, True):
        expected.append(trained(OPS[0], [Several([layer])], X[:6], mode, **shared))
        with use_backend("triton"), torch.autocast("cpu", torch.bfloat16, enabled=mode):
            given = layer.map(lambda t: moved(t).requires_grad_())
            out = fused(OPS[0], [given], X[:6], **shared)
            out.backward(torch.randn(out.shape, generator=torch_generator(5)).to(out.dtype))
            found.append({"out": out.detach(), **{f"{name}, layer 0": t.grad for name, t in given.tensors().items()}})
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


def test_weights_that_change_and_move():
    """What is kept of where they lie is not what they hold, and is made anew where they lie elsewhere."""
    layer = make(CASES["post"]).map(lambda t: t.clone().requires_grad_())
    other = make(CASES["post"], 5)
    for step in range(3):
        with torch.no_grad(), use_backend("triton"):
            for mine, new in zip(layer.tensors().values(), other.tensors().values(), strict=True):
                if step == 1:
                    mine.copy_(new)
                elif step == 2:
                    mine.data = new * 2
        values = layer.map(lambda t: t.detach().clone())
        with use_backend("triton"), torch.autocast("cpu", torch.bfloat16):
            found = fused(OPS[0], [layer], X[:6], cu_seqlens=CU_SEQLENS[:3])
            expected = fused(OPS[0], [values.map(lambda t: t.requires_grad_())], X[:6], cu_seqlens=CU_SEQLENS[:3])
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_kernel_has_is_refused(name):
    assert asked([make(CASES[name])]) == REFUSED[name]


def asked(layers: list, x: torch.Tensor = X, op: str = OPS[0]) -> str:
    layers = [layer.map(lambda t: t.clone().requires_grad_()) for layer in layers]
    with use_backend("triton"):
        found = ops.try_fused(op, x, lambda: operands_of(layers))
    assert isinstance(found, str), "it was served"
    return found


@pytest.mark.parametrize("op", OPS)
def test_reasons(op):
    layer, half = make(CASES["post"]), make(CASES["post"]).map(torch.Tensor.half)
    assert asked([layer], X[:0], op) == "there is no token"
    assert asked([layer], X[None], op) == "x has 3 dimensions, the kernels take (total_tokens, hidden_size)"
    assert asked([layer], X.double(), op) == "dtype torch.float64 (has float32, bfloat16 and float16)"
    assert asked([half], X, op) == "x is torch.float32, the weights torch.float16"
    assert asked([layer, make(CASES["pre"])], X, op).startswith("norms stand before halves of one layer")
    assert asked([layer.quantized()], X, op) in (
        "weights are int8",
        "it is for training all of a layer: a weight takes no gradient",
    )
    with torch.autocast("cpu", torch.float16):
        assert asked([layer], X, op) == "under autocast to torch.float16 sums stay in float32"
    with torch.no_grad():
        assert asked([layer], X, op) == "it is for training: gradients are off"
    frozen = layer.map(lambda t: t.clone().requires_grad_())
    frozen.tensors()["norm 1"].requires_grad_(False)
    for given, reason in (
        (frozen, "it is for training all of a layer: a weight takes no gradient"),
        (layer.quantized(), "weights are int8"),
    ):
        with use_backend("triton"):
            assert ops.try_fused(op, X, lambda given=given: operands_of([given])) == reason


@pytest.mark.parametrize("backend", ("torch", "cuda"))
def test_a_backend_without_it_is_never_met(backend):
    with use_backend(backend):
        found = ops.try_fused(OPS[1], X, lambda: operands_of([make(CASES["post"])]))
    assert found == f"{backend}, the backend that was asked for, does not have it"
    assert ops.try_fused(OPS[1], X, lambda: operands_of([make(CASES["post"])])).startswith("no backend has it")


def test_the_op_is_seen_in_a_profile():
    layer = make(CASES["post"]).map(lambda t: t.clone().requires_grad_())
    with use_backend("triton"), torch.profiler.profile() as profile:
        fused(OPS[0], [layer], X[:6], cu_seqlens=CU_SEQLENS[:3]).sum().backward()
    names = {event.name for event in profile.events()}
    assert {"_EncoderLayers", "_EncoderLayersBackward"} <= names
