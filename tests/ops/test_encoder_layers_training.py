"""Layers of every kind as one op for training: outputs, gradients, dropout."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from full import halved, left_to_full, thinned
from isas import CPU_BACKENDS, backend_with_isa
from layer_specs import (
    CASES,
    CU_SEQLENS,
    HIDDEN,
    NUM_KEYS,
    TOKENS,
    WITH_HOLES,
    Case,
    Layer,
    fused,
    make,
    operands_of,
    relative_lists_of,
    rotary_tables,
)
from seeds import manual_seed, torch_generator
from trained_layers import MODES, Several, assert_same, check, differentiate, masks

from fastbert import ops
from fastbert.native.availability import extension_error
from fastbert.ops.layers.layer_numbers import LayerNumbers

pytestmark = pytest.mark.skipif(extension_error() is not None, reason=str(extension_error()))

SCALES = LayerNumbers._fields.index("scales")


@thinned(3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_against_oracle(name, mode):
    check([CASES[name]], mode, name=name)


@halved
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_dropout_against_oracle(name, mode):
    case = CASES[name].with_dropouts(0.1, 0.2, 0.3, 0.4)
    check([case], mode, masks(case, 7), 7, name)


@thinned(3)
@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("name", ("local", "rms, grouped", "post, merged", "disentangled", "bias by distance"))
def test_every_isa_windows_by_position_and_tokens_that_attend_alone(name, backend):
    case = CASES[name].with_dropouts(0.1, 0.2, 0.3, 0.4)
    with backend_with_isa(backend):
        for mode in MODES:
            check([case], mode, masks(case, 7), 7, name, positions=WITH_HOLES)
            check([case], mode, masks(case, 7), 7, name, num_keys=NUM_KEYS)


def results(name: str, x: torch.Tensor, needs_dx: bool = True, run=fused, **shared) -> dict[str, torch.Tensor]:
    def ours(layer: Layer, x: torch.Tensor) -> torch.Tensor:
        manual_seed(3)
        return run("encoder_layers_training", [layer], x, **shared)

    return differentiate(ours, make(CASES[name].with_dropouts(0.1, 0.2, 0.3, 0.4)), x, needs_dx)


X = torch.randn(TOKENS, HIDDEN, generator=torch_generator(1))
SOME = ("local", "global", "rms, grouped", "post", "post, no attention norm", "disentangled", "bias by distance")


@pytest.mark.parametrize("name", SOME)
def test_number_of_threads_and_rows_that_lie_apart(name):
    threads, expected = torch.get_num_threads(), results(name, X)
    torch.set_num_threads(3 if threads != 3 else 2)
    found = results(name, X)
    torch.set_num_threads(threads)
    assert_same(found, expected)
    assert_same(results(name, torch.cat([X, X], 1)[:, :HIDDEN]), expected)


@pytest.mark.parametrize("name", SOME)
def test_without_dx(name):
    """Of a first layer behind frozen embeddings."""
    assert_same(results(name, X, needs_dx=False), results(name, X))


@pytest.mark.parametrize("name", SOME)
def test_no_tokens(name):
    for gradient in results(name, X[:0], cu_seqlens=torch.zeros(3, dtype=torch.int32)).values():
        assert not gradient.any()


STACKS = {
    "post": ("post", "post, no biases", "post"),
    "modernbert": ("global", "local", "global"),
    "mixed": ("pre", "rms", "post, grouped", "pre, two gates"),
    "distances": ("disentangled", "post", "pre, disentangled", "bias by distance"),
}


def stack_of(name: str) -> list[Case]:
    """With one activation, as the fused op asks."""
    cases = [CASES[each] for each in STACKS[name]]
    activation = cases[0].spec.feed_forward.activation
    alike = [replace(case.spec.feed_forward, activation=activation) for case in cases]
    return [replace(case, spec=replace(case.spec, feed_forward=half)) for case, half in zip(cases, alike, strict=True)]


@thinned(3)  # test_several_layers_are_one_after_the_other has all, by single layers' bits
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", STACKS)
def test_several_layers_against_oracle(name, mode):
    check(stack_of(name), mode, name=name)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", STACKS)
def test_several_layers_are_one_after_the_other(name, mode):
    """With their bits and masks, forward and backward."""
    dtype = torch.bfloat16 if mode == "bfloat16" else torch.float32
    layers = Several([make(case.with_dropouts(0.1, 0.2, 0.3, 0.4), i) for i, case in enumerate(stack_of(name))])
    found = []
    for is_one in (True, False):

        def run(several: Several, x: torch.Tensor, is_one=is_one) -> torch.Tensor:
            manual_seed(3)
            for group in [several.layers] if is_one else [[layer] for layer in several.layers]:
                x = fused("encoder_layers_training", group, x)
            return x

        with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
            found.append(differentiate(run, layers.map(lambda t: t.to(dtype)), X.to(dtype)))
    assert_same(*found)


@left_to_full(lambda p: p["name"] != "local")  # test_opcheck traces "disentangled", and "post" has less
@pytest.mark.parametrize("name", ("local", "post", "disentangled"))
def test_compiled(name):
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    manual_seed(3)
    layer = make(CASES[name])
    expected = differentiate(lambda layer, x: fused("encoder_layers_training", [layer], x), layer, X)
    assert_same(differentiate(lambda layer, x: compiled("encoder_layers_training", [layer], x), layer, X), expected)


@pytest.mark.parametrize("frozen", ("weight 3", "bias 0", "norm 1"))
def test_what_takes_no_gradient_is_refused(frozen):
    layer = make(CASES["post"]).map(lambda t: t.clone().requires_grad_())
    layer.tensors()[frozen].requires_grad_(False)
    found = ops.try_fused("encoder_layers_training", X, lambda: operands_of([layer]))
    assert found == "it is for training all of a layer: a weight takes no gradient"


def arguments(name: str, count: int = 1, dtype: torch.dtype = torch.bfloat16) -> list:
    """Of the registered forward, over `count` layers."""
    case = CASES[name].with_dropouts(0.1, 0.2, 0.3, 0.4)
    dtype = dtype if case.spec.attention.norm is None else torch.float32  # which is x's
    made = [make(case)] * count
    weights, biases, _, _, norms, activation, layers, ints, floats, _, _, _ = operands_of(made)
    tables = [t for table in rotary_tables() for t in table[:2]]
    philox = torch.arange(8 * count).view(count, 4, 2)
    shared = (tables, [0, 0, 3], WITH_HOLES.int(), NUM_KEYS, *relative_lists_of(made, dtype))
    return [X, CU_SEQLENS, weights, biases, norms, philox, activation, layers, ints, floats, *shared, dtype]


def backward_arguments(given: list, kept: list[torch.Tensor], needs_dx: bool) -> list:
    x, cu_seqlens, weights, _, norms, *others, _ = given
    return [torch.ones_like(x), x, cu_seqlens, weights, norms, kept, *others, needs_dx]


@left_to_full(lambda p: p["name"] != "disentangled" or not p["needs_dx"])  # others differ in values, or have less
@pytest.mark.parametrize("needs_dx", (True, False))
@pytest.mark.parametrize("name", CASES)
def test_opcheck(name, needs_dx):
    given = arguments(name, 2)
    torch.library.opcheck(torch.ops.fastbert.encoder_layers_fwd_cpu, tuple(given))
    _, *kept = torch.ops.fastbert.encoder_layers_fwd_cpu(*given)
    rest = tuple(backward_arguments(given, kept, needs_dx))
    torch.library.opcheck(torch.ops.fastbert.encoder_layers_bwd_cpu, rest)


def test_operands_that_do_not_fit():
    forward, backward = torch.ops.fastbert.encoder_layers_fwd_cpu, torch.ops.fastbert.encoder_layers_bwd_cpu
    given = arguments("post")
    _, *kept = forward(*given)
    for at, change, message in (
        (2, lambda weights: weights[1:], "got 5 weights, expected 6"),
        (3, lambda biases: [*biases, biases[0]], "there are 1 weights, biases and weight_scales too many"),
        (4, lambda norms: norms[1:], "there are 3 tensors of norms, the layers have more"),
        (5, lambda philox: philox[0], r"expected \(1, 3, 2\) or \(1, 4, 2\)"),
        (5, lambda philox: philox[:, :2], r"expected \(3, 2\) or \(4, 2\)"),
        (5, lambda philox: None, "philox, its seed and offset, is None"),
        (7, lambda layers: [1], "there are no numbers 1"),
        (7, lambda layers: [], "there are no layers"),
        (8, lambda ints: [3, *ints[1:]], "num_heads is 3, num_kv_heads 4"),
        (8, lambda ints: [*ints[:SCALES], 1, *ints[SCALES + 1 :]], "int8 weights have no gradients"),
        (16, lambda relative: [torch.ones(3, 4, 8)], "there are 1 relative terms, too many for the layers"),
    ):
        wrong = [*given[:at], change(given[at]), *given[at + 1 :]]
        with pytest.raises(RuntimeError, match=message):
            forward(*wrong)
    for wrong, message in (
        (kept[1:], "forward keeps more than"),
        ([*kept, kept[0]], "forward keeps 12 tensors, got 13"),
    ):
        with pytest.raises(RuntimeError, match=message):
            backward(*backward_arguments(given, wrong, True))
