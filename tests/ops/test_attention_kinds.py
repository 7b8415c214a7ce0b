"""Windows, positions, grouped keys and rotary embedding, alone and together: every backend against the oracle."""

from __future__ import annotations

from functools import partial

import attention_cases
import pytest
import torch
from attention_cases import (
    EDGES,
    FEW,
    LONG,
    RAGGED,
    SLACK,
    backends,
    check,
    differentiate,
    each_backend,
    each_dtype,
    each_isa,
    each_kernel,
    each_kind,
    in_torch_cpu_and_triton,
    is_interpreted_in_16_bits,
    is_met_in_the_other_dtype,
    kept,
    make,
    positions,
    rotary_of,
)
from full import halved, left_to_full, thinned, triton_left_to_full
from isas import OF_FLOATS
from layouts import assert_same_results
from seeds import manual_seed

from fastbert.ops import Rotary, attention
from fastbert.testing.cases import LENGTHS, Lengths

backend = attention_cases.backend  # the fixture
BLOCKS = Lengths("", (1100, 2))  # more keys than a block of 256 and 1024 of the CPU's kernels
WINDOWS = ((0, 0), (7, 16), (-1, 2), (20, -1), (3, 3), (64, 64))


def cases_of(backend: str) -> tuple[Lengths, ...]:
    return (RAGGED, SLACK, LONG) if backend == "triton" else (RAGGED, EDGES, SLACK)


@triton_left_to_full
@thinned(3)
@left_to_full(lambda p: is_interpreted_in_16_bits(p) and p["window_size"] not in WINDOWS[1::3])
@pytest.mark.parametrize("window_size", WINDOWS, ids=str)
@each_dtype
@each_backend
def test_windows(backend, dtype, window_size):
    for case in cases_of(backend):
        for places in (None, positions(case)):
            tensors = make(case, 1 if backend == "triton" else 2, 16, dtype)
            check(backend, case, tensors, window_size=window_size, window_positions=places)


@triton_left_to_full
@halved
@pytest.mark.parametrize("heads", ((6, 2), (3, 1)), ids=str)
@each_dtype
@each_backend
def test_grouped_keys(backend, dtype, heads):
    if backend == "triton":  # tiles of 16, 32 and 128 tokens, and of 32 with a head_dim that is padded
        for case, head_dim in ((RAGGED, 32), (SLACK, 32), (LONG, 64), (LONG, 160)):
            check(backend, case, make(case, heads if case is not LONG else (2, 1), head_dim, dtype))
        return
    for case in (RAGGED, EDGES, *LENGTHS[4:6]):
        check(backend, case, make(case, heads, 32, dtype))
    check(backend, RAGGED, make(RAGGED, heads, 7, dtype), window_size=(5, 9))


@triton_left_to_full
@thinned(3)
@left_to_full(lambda p: is_interpreted_in_16_bits(p) and p["kind"] in ("halves", "pairs-by-token"))
@each_kind
@each_dtype
@each_backend
def test_rotary(backend, dtype, kind):
    # Of 5 and of 6 and 1 heads, which the Triton kernels rotate four in turn.
    heads = ((4, 2), (5, 5), (6, 1)) if backend == "triton" else ((2, 2),) * 4
    sizes = (
        ((RAGGED, 32), (SLACK, 80), (SLACK, 2))
        if backend == "triton"
        else ((RAGGED, 80), (EDGES, 64), (SLACK, 2), (RAGGED, 130))
    )
    for (case, head_dim), of_case in zip(sizes, heads, strict=True):
        check(backend, case, make(case, of_case, head_dim, dtype), rotary=rotary_of(case, head_dim, kind))


@left_to_full(is_interpreted_in_16_bits)
@thinned(4)
@left_to_full(lambda p: is_interpreted_in_16_bits(p) and p["kind"] != "pairs")
@each_kind
@each_dtype
@each_backend
def test_all_together(backend, dtype, kind):
    first, *others = (FEW, SLACK) if backend == "triton" else cases_of(backend)
    for case, places in ((first, None), *((other, positions(other)) for other in others)):
        options = {"window_size": (9, 20), "window_positions": places, "softmax_scale": -0.3}
        check(backend, case, make(case, (4, 2), dtype=dtype), rotary=rotary_of(case, 32, kind), **options)


@left_to_full(lambda p: p["window_size"] != ((-1, 10) if p["dtype"] is torch.bfloat16 else (40, 64)))
@left_to_full(lambda p: p["backend"] == "torch" or is_met_in_the_other_dtype(p, 0))  # torch has no blocks
@left_to_full(lambda p: not p["has_holes"])  # test_what_is_far_outside_of_the_window_is_not_visited has none
@pytest.mark.parametrize("has_holes", (True, False))
@pytest.mark.parametrize("window_size", ((-1, -1), (40, 64), (-1, 10)), ids=str)
@each_dtype
@backends("torch", *OF_FLOATS)
def test_sequences_longer_than_a_block_of_keys(backend, dtype, window_size, has_holes):
    """With steps up to 100 a block of keys may hold none that a query sees, and a later one the first."""
    options = {"window_size": window_size, "rotary": rotary_of(BLOCKS, 32)}
    places = positions(BLOCKS, 100) if has_holes else None
    check(backend, BLOCKS, make(BLOCKS, (2, 1), dtype=dtype), window_positions=places, **options)


@halved
@each_dtype
@each_isa
def test_large_logits_and_scales_of_nothing(backend, dtype):
    options = {"window_size": (30, 5), "window_positions": positions(EDGES)}
    for factor, softmax_scale in ((30.0, 0.5), (30.0, -0.5), (1.0, 0.0), (1.0, -1e-40)):
        q, k, v = make(EDGES, (4, 2), dtype=dtype)
        check(backend, EDGES, (factor * q, factor * k, v), in_units=True, softmax_scale=softmax_scale, **options)


@triton_left_to_full
@left_to_full(lambda p: is_interpreted_in_16_bits(p) and p["window_size"] != (1, 3))
@pytest.mark.parametrize("window_size", ((0, 0), (1, 3), (17, -1)), ids=str)
@each_dtype
@backends("torch", "triton")
def test_any_scale_in_windows(backend, dtype, window_size):
    """Blocks of which some queries see no key: there 0 would be multiplied by -inf."""
    for case, softmax_scale in ((RAGGED, 0.0), (SLACK, -1e-300), (Lengths("", (70,)), -0.25)):
        check(backend, case, make(case, 1, dtype=dtype), window_size=window_size, softmax_scale=softmax_scale)


@triton_left_to_full
@left_to_full(is_interpreted_in_16_bits)
@each_dtype
@each_kernel
def test_dropout_goes_by_token_head_and_key(backend, dtype):
    """The mask is the same whatever a query sees, and whichever heads share keys."""
    for case in (FEW,) if backend == "triton" else (RAGGED, LONG):
        keep = kept(backend, case, 4, 0.25, 7, dtype)
        options = {"window_size": (20, 9), "window_positions": positions(case), "rotary": rotary_of(case, 32)}
        check(backend, case, make(case, (4, 2), dtype=dtype), keep=keep, dropout_p=0.25, seed=7, **options)


@triton_left_to_full
@thinned(3)
@left_to_full(lambda p: p["backend"] == "triton" and p["dtype"] is torch.float32)
@pytest.mark.parametrize("window_size", ((-1, -1), (70, 20)), ids=str)
@each_dtype
@each_kernel
def test_threads_and_runs_do_not_change_bits(backend, dtype, window_size):
    """Long sequences are cut into tasks, by queries and by keys, where threads would idle; short ones are joined.
    dk and dv are sums over the heads of a group."""
    before = torch.get_num_threads()
    cases = (LONG,) if backend == "triton" else (Lengths("", (900, 3, 190)), Lengths("", (40, 61) * 9))
    for case, heads in zip(cases, ((2, 1), (6, 2)), strict=False):
        tensors = make(case, heads, 32, dtype)
        options = {"window_size": window_size, "rotary": rotary_of(case, 32), "dropout_p": 0.1, "backend": backend}

        def f(*qkv, case=case, options=options):
            manual_seed(1)
            return attention(*qkv, case.cu_seqlens, max(case.lengths), **options)

        results = []
        for threads in (1, 2) if backend == "triton" else (1, 3, 8, 1):
            torch.set_num_threads(threads)
            results.append(differentiate(f, tensors, tensors[0]))
        torch.set_num_threads(before)
        assert all(torch.equal(*pair) for other in results[1:] for pair in zip(results[0], other, strict=True))


@triton_left_to_full
@each_kernel
def test_a_window_that_hides_nothing_changes_no_bit(backend):
    """The positions of no holes are the places, with a stride as well; of the CPU's kernels that goes for any."""
    tensors, case = make(RAGGED, (4, 2)), RAGGED
    places = torch.cat([torch.arange(n) for n in case.lengths]).int()
    pairs = [({"window_size": (4, 7)}, {"window_size": (4, 7), "window_positions": torch.stack([places] * 2, 1)[:, 0]})]
    if backend != "triton":
        wide = ({"window_size": (40, 40)}, {"window_size": (2**31, -1)}, {"window_positions": positions(case)})
        pairs += [({}, options) for options in wide]
    for pair in pairs:
        plain = partial(attention, cu_seqlens=case.cu_seqlens, max_seqlen=41, backend=backend)
        found, expected = (differentiate(partial(plain, **options), tensors, tensors[0]) for options in pair)
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("window_size", ((3, 2**31 - 1), (2**31 - 1, 3), (2**40, 2**40)), ids=str)
@each_kernel
def test_windows_wider_than_any_sequence(backend, window_size):
    """As the literal formula has them: nothing wraps around where a token's number is added."""
    check(backend, SLACK, make(SLACK, 1), window_size=window_size)


@triton_left_to_full
@left_to_full(is_interpreted_in_16_bits)
@each_dtype
@each_backend
def test_nothing_crosses_from_one_sequence_to_another(backend, dtype):
    """Neither values nor positions nor rows of the tables; slack is zeros, of which there is more than positions."""
    n = 20 if backend == "triton" else 165
    case, end = Lengths("", (7, n, 9), padding_rows=70), n + 7
    places, rotary = positions(case), rotary_of(case, 32, "pairs-by-token")
    tensors = make(case, (4, 2), dtype=dtype)
    dout = torch.randn_like(tensors[0])

    def run(tensors, places, rotary):
        options = {"window_size": (20, 9), "window_positions": places, "rotary": rotary, "backend": backend}
        return differentiate(lambda *qkv: attention(*qkv, case.cu_seqlens, n, **options), tensors, dout)

    expected = run(tensors, places, rotary)
    spoiled, moved, cos = tuple(t.clone() for t in tensors), places.clone(), rotary.cos.clone()
    for t in spoiled:
        t[7:end:2], t[8:end:2], t[end + 9 :] = float("nan"), float("inf"), float("nan")
    cos[7:end], moved[7:end] = float("nan"), moved[7:end] + 1000
    clean = [*range(7), *range(end, end + 79)]
    results = run(spoiled, moved, rotary._replace(cos=cos))
    for found, of_clean in zip(results, expected, strict=True):
        assert torch.equal(found[clean], of_clean[clean]) and not found[end + 9 :].any()
    assert results[0][7:end].isnan().all()


@left_to_full(lambda p: is_met_in_the_other_dtype(p, 0))
@each_dtype
@each_isa
def test_what_is_far_outside_of_the_window_is_not_visited(backend, dtype):
    """A NaN there would be seen: its product with a probability of 0 is NaN."""
    case, n = Lengths("", (4096,)), 4096
    options = {"window_size": (64, 64), "rotary": rotary_of(case, 32)}
    f = partial(attention, cu_seqlens=case.cu_seqlens, max_seqlen=n, backend=backend, **options)
    tensors = make(case, (2, 1), dtype=dtype)
    spoiled = tuple(t.clone() for t in tensors)
    for t in spoiled:
        t[2048] = float("nan")
    dout = torch.randn_like(tensors[0])
    # A query's NaN is in the gradients of all its keys; and the next block of 64 may be visited.
    far = (torch.arange(n) - 2048).abs() > 64 + 64 + 64
    for found, expected in zip(*(differentiate(f, x, dout) for x in (spoiled, tensors)), strict=True):
        assert torch.equal(found[far], expected[far]) and found[2048].isnan().all()


@triton_left_to_full
@in_torch_cpu_and_triton
def test_slices_and_tables_are_read_where_they_lie(backend):
    """Of a fused projection, of a wider table as transformers has it, with each half twice, or with no row in one
    piece."""
    case, places = FEW if backend == "triton" else RAGGED, positions(FEW if backend == "triton" else RAGGED)
    tensors, rotary = make(case, (4, 2)), rotary_of(case, 32, "pairs")
    fused = torch.cat(tensors, 1)
    wide = Rotary(*(torch.cat([t, t], -1)[:, :16] for t in rotary[:2]), True)
    columns_first = Rotary(*(t.t().contiguous().t() for t in rotary[:2]), True)
    dout = torch.randn_like(tensors[0])

    def run(layout, dtype=torch.float32):
        t, table = layout
        f = partial(attention, cu_seqlens=case.cu_seqlens, max_seqlen=max(case.lengths), rotary=table, backend=backend)
        strided = torch.stack([places, places], 1)[:, 0] if table is wide else places
        leaf = t.to(dtype).detach().requires_grad_()
        out = f(*leaf.split((4, 2, 2), 1), window_size=(9, 12), window_positions=strided)
        grad = dout.to(dtype) if table is rotary else dout.to(dtype).transpose(0, 1).contiguous().transpose(0, 1)
        return out, *torch.autograd.grad(out, leaf, grad)

    def laid_out(*order):
        back = [order.index(i) for i in range(3)]
        return fused.permute(order).contiguous().permute(back)

    layouts = (fused, rotary), (laid_out(0, 2, 1), wide), (laid_out(1, 0, 2), columns_first), (laid_out(2, 1, 0), wide)
    assert_same_results(backend, run, layouts)
