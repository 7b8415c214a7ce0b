"""attention: every backend, forward and backward, against the float64 oracle."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from attention_terms import assert_close_in_units, attention_terms
from full import halved, left_to_full
from isas import OF_FLOATS, backend_with_isa
from seeds import manual_seed

from fastbert.backend import Backend, select, use_backend
from fastbert.errors import BackendError
from fastbert.native.availability import extension_error, triton_error
from fastbert.ops.attention import AttentionOptions, attention, attention_probs
from fastbert.ops.rotary import Rotary
from fastbert.testing import reference
from fastbert.testing.cases import DTYPES, LENGTHS, Lengths
from fastbert.testing.numerics import GRADIENT_FACTOR, OUTPUT_FACTOR, assert_close_to_reference

RAGGED = LENGTHS[3]
FEW = Lengths("", (5, 33, 1))
SLACK = LENGTHS[5]


@pytest.fixture
def backend(request):
    error = {"cpu": extension_error, "triton": triton_error}.get(request.param, lambda: None)()
    if error is not None:
        pytest.skip(error)
    with backend_with_isa(request.param) as name:
        yield name


each_backend = pytest.mark.parametrize("backend", ("torch", *OF_FLOATS, "triton"), indirect=True)
each_kernel = pytest.mark.parametrize("backend", (*OF_FLOATS, "triton"), indirect=True)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
needs_extension = pytest.mark.skipif(extension_error() is not None, reason=str(extension_error()))


def make(case: Lengths, num_heads: int = 3, head_dim: int = 32, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """q, k and v, stacked."""
    return torch.randn(3, case.total_tokens, num_heads, head_dim).to(dtype)


def differentiate(function, qkv: torch.Tensor, dout: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, the gradient of qkv). dq and dk are differences that cancel: their scale is that of all three, stacked."""
    leaf = qkv.detach().clone().requires_grad_()
    out = function(*leaf.unbind())
    if out.requires_grad:  # the formula of nothing at all has no graph
        out.backward(dout.to(out.dtype))
    return out.detach(), torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def results_of(backend, qkv, dout, case, keep=None, seed=0, **options) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(out, dqkv) of `backend`, of the oracle and of the formula; `keep` is the mask that `seed` gives."""

    def ours(q, k, v):
        manual_seed(seed)
        upper_bound = max(case.lengths) + 5
        return attention(q, k, v, case.cu_seqlens, upper_bound, backend=backend, **options)

    literal = partial(reference.attention, cu_seqlens=case.cu_seqlens, keep=keep, **options)
    actual, baseline = differentiate(ours, qkv, dout), differentiate(literal, qkv, dout)
    oracle = differentiate(literal, qkv.double(), dout)
    return [actual, oracle, baseline]


def check(backend, qkv, case, in_units=False, **options) -> None:
    """By the error rule. in_units: each error counts by the terms of its element, where few have nearly all of it."""
    dout = torch.randn_like(qkv[0])
    results, factors = results_of(backend, qkv, dout, case, **options), (OUTPUT_FACTOR, GRADIENT_FACTOR)
    if in_units:
        terms = attention_terms(*qkv.double(), dout.double(), case.cu_seqlens, **options)
        results.append((terms["out"], torch.stack([terms["dq"], terms["dk"], terms["dv"]])))
    for *each, factor in zip(*results, factors, strict=True):
        (assert_close_in_units if in_units else assert_close_to_reference)(*each, factor)


def is_interpreted_in_16_bits(p) -> bool:
    return p["backend"] == "triton" and p["dtype"] is torch.bfloat16


@left_to_full(lambda p: is_interpreted_in_16_bits(p) and p["case"].id not in ("ragged", "slack", "all-empty"))
@pytest.mark.parametrize("case", LENGTHS, ids=lambda c: c.id)
@each_dtype
@each_backend
def test_against_oracle(backend, dtype, case):
    num_heads, head_dims = (2, (16, 80)) if backend == "triton" else (3, (16, 32, 80))
    for head_dim in head_dims:  # below, at and between the sizes kernels are tuned for
        check(backend, make(case, num_heads, head_dim, dtype), case)


@left_to_full(
    lambda p: (
        p["backend"] == "triton"
        and p["head_dim"] not in {torch.float32: (7, 128), torch.bfloat16: (2, 96, 256)}[p["dtype"]]
    )
)
@pytest.mark.parametrize("head_dim", (2, 7, 33, 64, 96, 128, 256))
@each_dtype
@each_kernel
def test_any_head_dim(backend, dtype, head_dim):
    case = FEW if backend == "triton" else RAGGED
    for num_heads in (2, 0):
        check(backend, make(case, num_heads, head_dim, dtype), case)


@left_to_full(lambda p: p["backend"] == "triton" and (max(p["lengths"]) > 500) != (p["dtype"] is torch.bfloat16))
@pytest.mark.parametrize("lengths", ((5, 6, 7, 11, 12, 13, 23, 24, 25), (63, 64, 65, 129), (511, 513, 1030)), ids=str)
@each_dtype
@each_kernel
def test_lengths_around_the_tiles(backend, dtype, lengths):
    """Tiles have 6, 8 or 12 rows and 16 to 64 columns, blocks 24 and 64 queries and 64 and 512 keys."""
    if backend == "triton" and max(lengths) > 500:
        lengths = (257, 130)  # the interpreter takes a minute for a thousand tokens
    check(backend, make(Lengths("", lengths), 1, 64, dtype), Lengths("", lengths))


ADVERSARIAL = {
    "large-logits": lambda q, k, v: (30 * q, 30 * k, v),
    "dominant-key": lambda q, k, v: (q, torch.cat([k[:5], 50 * k[5:6], k[6:]]), v),
    "constant": lambda q, k, v: (q, torch.ones_like(k), v),
}


@halved
@left_to_full(lambda p: is_interpreted_in_16_bits(p) and p["softmax_scale"] < 0)
@pytest.mark.parametrize("softmax_scale", (0.5, -0.5))
@pytest.mark.parametrize("kind", ADVERSARIAL)
@each_dtype
@each_backend
def test_adversarial_inputs(backend, dtype, kind, softmax_scale):
    qkv = torch.stack(ADVERSARIAL[kind](*make(RAGGED, dtype=dtype)))
    check(backend, qkv, RAGGED, in_units=True, softmax_scale=softmax_scale)


@pytest.mark.parametrize("backend", OF_FLOATS, indirect=True)
@each_dtype
def test_keys_and_values_with_a_mean(backend, dtype):
    """dP is as large as delta then, and dS what is left of them: the rounding of the output, which rowsum(dO O) has in
    it, is alike for all keys of a query, and so their mean brings it to dq."""
    qkv = make(RAGGED, head_dim=64, dtype=dtype) + torch.tensor([0, 3, 3])[:, None, None, None]
    gradients = (gradient for _, gradient in results_of(backend, qkv, torch.randn_like(qkv[0]), RAGGED))
    for name, *compared in zip(("dq", "dk", "dv"), *gradients, strict=True):
        assert_close_to_reference(*compared, GRADIENT_FACTOR, name)


@halved
@pytest.mark.parametrize("softmax_scale", (0.0, 1e-50, -1e-40), ids=str)  # fp32 has no 1e-50
@each_dtype
@pytest.mark.parametrize("window_size", ((-1, -1), (2, 1)), ids=str)
def test_a_scale_of_nothing_takes_the_mean(dtype, softmax_scale, window_size):
    """torch's; the kernels': test_attention_scale.py."""
    check("torch", make(RAGGED, dtype=dtype), RAGGED, softmax_scale=softmax_scale, window_size=window_size)


@pytest.mark.parametrize("softmax_scale", (float("nan"), float("inf")), ids=str)
def test_a_scale_that_is_not_finite_is_refused(softmax_scale):
    q, k, v = make(RAGGED)
    for call in (lambda **o: attention(q, k, v, RAGGED.cu_seqlens, 41, **o), partial(_probs, q, k)):
        with pytest.raises(ValueError, match=f"softmax_scale is {softmax_scale}, it must be finite"):
            call(softmax_scale=softmax_scale)


def _probs(q, k, case=RAGGED, **options):
    return attention_probs(q, k, case.cu_seqlens, max(case.lengths, default=0) + 5, **options)


NOTHING = (Lengths("none", (0, 0)), Lengths("no-sequence", ()), Lengths("slack", (0,), 3), Lengths("rest", (), 3))


# One of the cases is compiled.
@left_to_full(lambda p: p["compiled"] and (p["dropout_p"], p["case"].id) != (0.1, "none"))
@pytest.mark.parametrize("dropout_p", (0.0, 0.1))
@pytest.mark.parametrize("compiled", (False, True), ids=("eager", "compiled"))
@pytest.mark.parametrize("case", NOTHING, ids=lambda c: c.id)
@pytest.mark.parametrize("backend", ("torch", "cpu"), indirect=True)
def test_nothing_to_see_gives_zeros(backend, case, compiled, dropout_p):
    """No sequence, none with a token, or slack alone."""
    qkv = make(case)
    assert not _probs(*qkv[:2], case).any()
    tables = Rotary(torch.ones(8, 16), torch.zeros(8, 16))
    for max_seqlen in (0, 5):
        for options in ({}, {"rotary": tables}, {"window_size": (2, 1)}):
            if "window_size" in options and backend == "cpu":
                continue

            def f(q, k, v, max_seqlen=max_seqlen, options=options):
                options = {"dropout_p": dropout_p, **options, "backend": backend}
                return attention(q, k, v, case.cu_seqlens, max_seqlen, **options)

            torch.compiler.reset()
            out, grad = differentiate(
                torch.compile(f, backend="eager") if compiled else f, qkv, torch.ones_like(qkv[0])
            )
            assert out.shape == qkv[0].shape and not out.any() and not grad.any()


@left_to_full(is_interpreted_in_16_bits)  # strides count elements
@each_dtype
@each_kernel
def test_slices_of_a_fused_projection_are_read_where_they_lie(backend, dtype):
    case = FEW if backend == "triton" else RAGGED
    qkv = make(case, head_dim=64, dtype=dtype)
    dout = torch.randn_like(qkv[0])
    results = []
    for layout in ((0, 1, 2, 3), (1, 0, 2, 3), (1, 2, 0, 3), (1, 2, 3, 0)):  # the last has no row in one piece
        back = [layout.index(i) for i in range(4)]
        leaf = qkv.permute(layout).contiguous().requires_grad_()
        out = attention(*leaf.permute(back).unbind(), case.cu_seqlens, 41, backend=backend)
        out.backward(dout.transpose(0, 1).contiguous().transpose(0, 1))
        results.append((out, leaf.grad.permute(back)))
    assert all(torch.equal(*pair) for other in results[1:] for pair in zip(results[0], other, strict=True))


@each_kernel
def test_nothing_crosses_from_one_sequence_to_another(backend):
    case = Lengths("", (7, 65, 9), slack=4)
    qkv = make(case, num_heads=2)
    spoiled = qkv.clone()
    spoiled[:, 7:72] = torch.tensor([float("nan"), float("inf")]).repeat(16)
    spoiled[:, 81:] = float("nan")

    def f(q, k, v):
        return attention(q, k, v, case.cu_seqlens, 65, backend=backend)

    (out, grad), (spoiled_out, spoiled_grad) = (differentiate(f, x, x[0]) for x in (qkv, spoiled))
    clean = [*range(7), *range(72, 85)]
    assert torch.equal(out[clean], spoiled_out[clean]) and torch.equal(grad[:, clean], spoiled_grad[:, clean])
    assert not spoiled_out[81:].any() and not spoiled_grad[:, 81:].any()
    assert spoiled_out[7:72].isnan().all()


@each_kernel
def test_writes_all_that_it_allocates(backend):
    """Which is filled with NaN, by backend_with_isa and conftest.py."""
    x = make(SLACK, head_dim=33)
    results = differentiate(lambda *t: attention(*t, SLACK.cu_seqlens, 6, backend=backend), x, torch.ones_like(x[0]))
    assert all(torch.isfinite(t).all() for t in results)


@pytest.mark.parametrize("dropout_p", (0.0, 0.1))
@needs_extension
def test_opcheck(dropout_p):
    q, k, v = make(SLACK)
    philox = torch.tensor([2**61 + 5, 2**40 + 1]) if dropout_p else None
    form = (None, None, None, 0.2, dropout_p, -1, -1, False, False)
    forward, backward = (getattr(torch.ops.fastbert, f"attention_{d}_cpu").default for d in ("fwd", "bwd"))
    for return_stats in (True, False):
        torch.library.opcheck(forward, (q, k, v, SLACK.cu_seqlens, philox, *form, return_stats))
    out, stats = forward(q, k, v, SLACK.cu_seqlens, philox, *form, True)
    torch.library.opcheck(backward, (q, q, k, v, out, stats, SLACK.cu_seqlens, philox, *form))


@pytest.mark.parametrize("backend", ("torch", "cpu", "triton"), indirect=True)
def test_the_backend_that_was_asked_for_runs(backend):
    qkv, options = make(RAGGED), AttentionOptions(1.0)
    assert select("attention", backend, *qkv, options) is Backend(backend)
    assert select("attention", None, *qkv, options) is (Backend.CPU if extension_error() is None else Backend.TORCH)
    with use_backend(backend), torch.profiler.profile() as profile:
        attention(*qkv, RAGGED.cu_seqlens, 41)
    ours = [event.name for event in profile.events() if event.name.startswith("fastbert::")]
    tiles = ["fastbert::attention_tiles_triton"] if backend == "triton" else []
    assert ours == ([] if backend == "torch" else [*tiles, f"fastbert::attention_fwd_{backend}"])


@each_backend
def test_under_autocast_it_runs_in_the_lower_dtype(backend):
    for case in (LENGTHS[1], RAGGED):
        qkv = make(case)
        low = qkv.bfloat16()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = attention(*qkv, case.cu_seqlens, max(case.lengths), backend=backend)
        expected = reference.attention(*low.double(), case.cu_seqlens)
        assert_close_to_reference(out, expected, reference.attention(*low, case.cu_seqlens), name=case.id)


@needs_extension
def test_what_cannot_be_served_raises_with_the_reason():
    q = torch.zeros(4, 2, 16)
    cases = (
        ((q.double(),) * 3, "float64 .has float32 and bfloat16"),
        ((torch.zeros(4, 2, 257),) * 3, "head_dim is 257 .has 2 to 256"),
    )
    for qkv, reason in cases:
        with pytest.raises(BackendError, match=reason):
            attention(*qkv, torch.tensor([0, 4], dtype=torch.int32), 4, backend="cpu")
    for offsets, reason in (([0, 3, 2], "below"), ([0, 5], "above total_tokens, which is 4"), ([1, 4], "expected 0")):
        with pytest.raises(RuntimeError, match=rf"cu_seqlens\[.*\] is .*{reason}"):
            attention(q, q, q, torch.tensor(offsets, dtype=torch.int32), 4, backend="cpu")


@left_to_full(lambda p: p["compiler"] == "inductor")  # ours ends where the graph does; test_compile.py runs inductor
@pytest.mark.parametrize("compiler", ("aot_eager", "inductor"))
@pytest.mark.parametrize("backend", ("cpu",), indirect=True)
def test_compiles_into_one_graph(backend, compiler):
    qkv = make(RAGGED)

    def f(*qkv):
        return attention(*qkv, RAGGED.cu_seqlens, 41, backend=backend)

    eager, compiled = (differentiate(g, qkv, qkv[0]) for g in (f, torch.compile(f, fullgraph=True, backend=compiler)))
    assert all(map(torch.equal, eager, compiled))
