"""attention's rotary embedding: every backend, forward and backward, against the float64 oracle."""

from __future__ import annotations

from functools import partial

import pytest
import test_attention
import torch
from full import left_to_full
from layouts import assert_same_results
from seeds import manual_seed
from test_attention import RAGGED, SLACK, check, differentiate, each_dtype, make
from test_attention_dropout import dropped_probabilities

from fastbert import ops
from fastbert.native.availability import triton_error
from fastbert.ops.attention import _tiles
from fastbert.ops.packing import token_positions
from fastbert.ops.rotary import Rotary, rotary_torch
from fastbert.testing import reference
from fastbert.testing.cases import LENGTHS, Lengths
from fastbert.testing.numerics import assert_close_to_reference

backend = test_attention.backend  # the fixture
in_torch_cpu_and_triton = pytest.mark.parametrize("backend", ("torch", "cpu", "triton"), indirect=True)
needs_triton = pytest.mark.skipif(triton_error() is not None, reason=str(triton_error()))
LONG = Lengths("", (130, 1))
FEW = Lengths("", (5, 33, 1))  # two tiles and a token
HALF = (torch.bfloat16, torch.float16)


def tables(max_positions: int, head_dim: int, base: float = 10000.0) -> Rotary:
    """cos and sin of position / base^(2 i / head_dim) (Su et al. 2021, section 3.3)."""
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(max_positions, dtype=torch.float64)[:, None] * frequencies
    return Rotary(angles.cos().float(), angles.sin().float())


def check_rotary(backend, case, num_heads=3, head_dim=32, dtype=torch.float32, **options) -> None:
    rotary = tables(max(case.lengths) + 5, head_dim)
    check(backend, make(case, num_heads, head_dim, dtype), case, rotary=rotary, **options)


@left_to_full(lambda p: p["backend"] == "triton" and p["dtype"] in HALF and p["case"].id not in ("ragged", "slack"))
@pytest.mark.parametrize("case", LENGTHS, ids=lambda c: c.id)
@each_dtype
@in_torch_cpu_and_triton
def test_against_oracle(backend, dtype, case):
    check_rotary(backend, case, dtype=dtype)


# One pair, padded, not padded; in 16 bits one of them.
@left_to_full(lambda p: p["backend"] == "triton" and p["head_dim"] not in ((2, 80, 128), (80,))[p["dtype"] in HALF])
@pytest.mark.parametrize("head_dim", (2, 16, 32, 64, 80, 96, 128))
@each_dtype
@in_torch_cpu_and_triton
def test_head_dims(backend, dtype, head_dim):
    case = FEW if backend == "triton" else RAGGED
    check_rotary(backend, case, 5, head_dim, dtype)  # heads are rotated four in turn
    if backend != "torch":
        check_rotary(backend, case, 0, head_dim, dtype)


@each_dtype
@in_torch_cpu_and_triton
def test_long_sequences(backend, dtype):
    """Tiles of 32 to 128 tokens, cut into blocks of 16 and 32 for the rotation."""
    for head_dim in (64, 160):
        check_rotary(backend, LONG, 1, head_dim, dtype)


@needs_triton
def test_float16():
    for case in (RAGGED, SLACK, LONG):
        check_rotary("triton", case, dtype=torch.float16)


def test_float64_runs_in_torch():
    (q, k, v), rotary = make(RAGGED).double(), tables(41, 32)
    out = ops.attention(q, k, v, RAGGED.cu_seqlens, 41, rotary=rotary)
    rotated = [reference.rotary(t, *rotary[:2], RAGGED.cu_seqlens) for t in (q, k)]
    assert torch.equal(out, ops.attention(*rotated, v, RAGGED.cu_seqlens, 41))


@left_to_full(lambda p: p["backend"] == "triton" and (p["window_size"] == (16, 40)) != (p["dtype"] in HALF))
@pytest.mark.parametrize("window_size", ((3, 3), (-1, 2), (16, 40)), ids=str)
@each_dtype
@pytest.mark.parametrize("backend", ("torch", "triton"), indirect=True)
def test_windows(backend, dtype, window_size):
    for case in (RAGGED, SLACK):
        check_rotary(backend, case, 2, dtype=dtype, window_size=window_size)


@left_to_full(lambda p: p["backend"] == "triton" and p["dtype"] not in HALF)
@each_dtype
@in_torch_cpu_and_triton
def test_dropout_has_the_mask_that_it_has_without(backend, dtype):
    keep = dropped_probabilities(backend, RAGGED, 2, 0.25, 7, dtype)[0] != 0
    check_rotary(backend, RAGGED, 2, dtype=dtype, keep=keep, dropout_p=0.25, seed=7)


@each_dtype
@in_torch_cpu_and_triton
def test_rotates_as_the_oracle_does(backend, dtype):
    """The rotation alone, and back, in fp32 and rounded once: attention's softmax hides where it errs by a little."""
    rotary = tables(41, 80)
    q, k, _ = make(RAGGED, head_dim=80, dtype=dtype)
    if backend == "triton":
        from fastbert.kernels.rotary import rotate_back

        tiles = _tiles(RAGGED.cu_seqlens, RAGGED.total_tokens, 16, None)
        rotated = torch.ops.fastbert.rotary_triton(q, k, *rotary[:2], tiles, 16)
        rotate_back(*(back := (q.clone(), k.clone())), *rotary[:2], tiles, 16)
    else:
        positions = token_positions(RAGGED.cu_seqlens, RAGGED.total_tokens)
        cos, sin = (t[positions] for t in rotary[:2])
        rotated, back = ([rotary_torch(t, cos, s) for t in (q, k)] for s in (sin, -sin))
    for found, sign in ((rotated, 1), (back, -1)):
        for x, out in zip((q, k), found, strict=True):
            literal = partial(reference.rotary, cos=rotary[0], sin=sign * rotary[1], cu_seqlens=RAGGED.cu_seqlens)
            assert_close_to_reference(out, literal(x.double()), literal(x))
            assert torch.equal(out, literal(x.float()).to(dtype)) and out.is_contiguous()


@in_torch_cpu_and_triton
def test_only_distances_count(backend):
    """What rotary embedding is for: a shift of all positions does not change the output."""
    qkv, rotary = make(RAGGED), tables(141, 32)
    shifted = Rotary(*(t[100:] for t in rotary[:2]))
    out = ops.attention(*qkv, RAGGED.cu_seqlens, 41, rotary=shifted, backend=backend)
    literal = partial(reference.attention, cu_seqlens=RAGGED.cu_seqlens)
    assert_close_to_reference(out, literal(*qkv.double(), rotary=rotary), literal(*qkv, rotary=shifted))


@left_to_full(lambda p: p["backend"] == "triton" and p["dtype"] in HALF)  # strides count elements
@each_dtype
@in_torch_cpu_and_triton
def test_slices_of_a_fused_projection_are_read_where_they_lie(backend, dtype):
    qkv, rotary = make(FEW, head_dim=64, dtype=dtype), tables(33, 64)
    dout = torch.randn_like(qkv[0])

    def run(layout, dtype=dtype):
        back = [layout.index(i) for i in range(4)]
        leaf = qkv.to(dtype).permute(layout).contiguous().requires_grad_()
        out = ops.attention(*leaf.permute(back).unbind(), FEW.cu_seqlens, 33, rotary=rotary, backend=backend)
        out.backward(dout.to(dtype).transpose(0, 1).contiguous().transpose(0, 1))
        return out, leaf.grad.permute(back)

    layouts = (0, 1, 2, 3), (1, 0, 2, 3), (1, 2, 0, 3), (1, 2, 3, 0)  # the last has no row in one piece
    assert_same_results(backend, run, layouts)


@in_torch_cpu_and_triton
def test_tables_are_read_where_they_lie(backend):
    """Columns of a wider table, as transformers has it with each half twice, and a transposed one."""
    qkv, (cos, sin, *_) = make(RAGGED), tables(41, 32)
    wide = Rotary(*(torch.cat([t, t], -1)[:, :16] for t in (cos, sin)))
    turned = Rotary(*(t.t().contiguous().t() for t in (cos, sin)))
    results = [
        ops.attention(*qkv, RAGGED.cu_seqlens, 41, rotary=rotary, backend=backend)
        for rotary in (Rotary(cos, sin), wide, turned)
    ]
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@in_torch_cpu_and_triton
def test_nothing_crosses_from_one_sequence_to_another(backend):
    case, rotary = Lengths("", (7, 65, 9), slack=70), tables(65, 32)  # more slack than there are positions
    qkv = make(case)
    spoiled = qkv.clone()
    spoiled[:, 7:72] = torch.tensor([float("nan"), float("inf")]).repeat(16)
    spoiled[:, 81:] = float("nan")

    def f(q, k, v):
        return ops.attention(q, k, v, case.cu_seqlens, 65, rotary=rotary, backend=backend)

    (out, grad), (spoiled_out, spoiled_grad) = (differentiate(f, x, qkv[0]) for x in (qkv, spoiled))
    clean = [*range(7), *range(72, 151)]
    assert torch.equal(out[clean], spoiled_out[clean])
    assert not spoiled_out[81:].any() and spoiled_out[7:72].isnan().all()
    assert torch.equal(grad[:, clean], spoiled_grad[:, clean]) and not spoiled_grad[:, 81:].any()


@in_torch_cpu_and_triton
def test_the_same_bits_every_time(backend):
    qkv, rotary = make(FEW, 2, dtype=torch.bfloat16), tables(33, 32)

    def f(q, k, v):
        manual_seed(1)
        return ops.attention(q, k, v, FEW.cu_seqlens, 33, rotary=rotary, dropout_p=0.1, backend=backend)

    first, second = (differentiate(f, qkv, qkv[0]) for _ in range(2))
    assert all(map(torch.equal, first, second))


@needs_triton
def test_a_position_beyond_the_tables_is_not_read():
    """max_seqlen was no bound: the host cannot see that, but nothing may be read from beyond the tables' ends."""
    q = torch.randn(20, 2, 32)
    tiles = _tiles(torch.tensor([0, 18], dtype=torch.int32), 20, 16, None)
    rotated, _ = torch.ops.fastbert.rotary_triton(q, q, *tables(10, 32)[:2], tiles, 16)
    assert torch.isfinite(rotated[:10]).all() and rotated[10:18].isnan().all() and not rotated[18:].any()


@in_torch_cpu_and_triton
@pytest.mark.parametrize("layer_type", ("full_attention", "sliding_attention"))  # their bases differ
def test_parity_with_modernbert(backend, layer_type):
    modeling = pytest.importorskip("transformers.models.modernbert.modeling_modernbert")
    case, head_dim = Lengths("", (9, 40)), 64
    config = modeling.ModernBertConfig(hidden_size=3 * head_dim, num_attention_heads=3)
    embedding = modeling.ModernBertRotaryEmbedding(config)
    q, k, v = make(case, head_dim=head_dim)
    wide = embedding(q, torch.arange(40)[None], layer_type)  # cos and sin, (1, 40, head_dim)
    positions = torch.cat([torch.arange(n) for n in case.lengths])
    theirs = modeling.apply_rotary_pos_emb(q[None], k[None], *(t[:, positions] for t in wide), unsqueeze_dim=2)
    rotated = [t[0] for t in theirs]
    rotary = Rotary(*(t[0, :, : head_dim // 2] for t in wide))
    out = ops.attention(q, k, v, case.cu_seqlens, 40, rotary=rotary, backend=backend)
    oracle = reference.attention(*(t.double() for t in (*rotated, v)), case.cu_seqlens)
    assert_close_to_reference(out, oracle, reference.attention(*rotated, v, case.cu_seqlens))


@in_torch_cpu_and_triton
def test_under_autocast_it_runs_in_the_lower_dtype(backend):
    qkv, rotary = make(RAGGED), tables(41, 32)
    low = qkv.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = ops.attention(*qkv, RAGGED.cu_seqlens, 41, rotary=rotary, backend=backend)
        assert torch.equal(out, ops.attention(*low, RAGGED.cu_seqlens, 41, rotary=rotary, backend=backend))
    literal = partial(reference.attention, cu_seqlens=RAGGED.cu_seqlens, rotary=rotary)
    assert_close_to_reference(out, literal(*low.double()), literal(*low))


def test_probs_are_those_of_the_output():
    case = Lengths("", (5, 0, 9, 1))
    q, k, _ = make(case).double()
    rotary = tables(9, 32)
    probs = ops.attention_probs(q, k, case.cu_seqlens, 9, rotary=rotary)
    rotated = [reference.rotary(t, *rotary[:2], case.cu_seqlens) for t in (q, k)]
    assert torch.equal(probs, ops.attention_probs(*rotated, case.cu_seqlens, 9))
    with pytest.raises(ValueError, match="cos has 3 positions, max_seqlen is 9"):
        ops.attention_probs(q, k, case.cu_seqlens, 9, rotary=tables(3, 32))


# Ours ends where the graph does; test_compile.py runs inductor. Both backends rotate by the same code.
@left_to_full(lambda p: p["compiler"] == "inductor" or p["backend"] == "torch")
@pytest.mark.parametrize("compiler", ("aot_eager", "inductor"))
@pytest.mark.parametrize("backend", ("torch", "cpu"), indirect=True)
def test_compiles_into_one_graph(backend, compiler):
    rotary = tables(50, 32)

    def f(q, k, v, cu_seqlens, max_seqlen):
        return ops.attention(q, k, v, cu_seqlens, max_seqlen, rotary=rotary, backend=backend)

    compiled = torch.compile(f, fullgraph=True, backend=compiler)
    for case in (RAGGED, SLACK):
        qkv, dout = make(case), torch.randn(case.total_tokens, 3, 32)
        where = {"cu_seqlens": case.cu_seqlens, "max_seqlen": max(case.lengths)}
        literal = partial(reference.attention, cu_seqlens=case.cu_seqlens, rotary=rotary)
        actual = differentiate(partial(compiled, **where), qkv, dout)
        oracle, baseline = differentiate(literal, qkv.double(), dout), differentiate(literal, qkv, dout)
        for i, factor in enumerate((2, 3)):
            assert_close_to_reference(actual[i], oracle[i], baseline[i], factor)


@needs_triton
def test_opcheck():
    tiles = _tiles(SLACK.cu_seqlens, SLACK.total_tokens, 16, None)
    for q, k, _ in (make(SLACK).transpose(0, 1).contiguous().unbind(1), make(SLACK)):
        torch.library.opcheck(torch.ops.fastbert.rotary_triton, (q, k, *tables(6, 32)[:2], tiles, 16))


@in_torch_cpu_and_triton
def test_layers_share_what_is_made_of_cu_seqlens(backend):
    cache: dict = {}
    qkv, rotary = make(RAGGED), tables(41, 32)
    outs = [ops.attention(*qkv, RAGGED.cu_seqlens, 41, rotary=rotary, cache=cache, backend=backend) for _ in range(2)]
    assert torch.equal(*outs)
    made = {"torch": {"torch_positions", "torch_buckets"}, "cpu": set(), "triton": {("triton_tiles", 32)}}
    assert set(cache) == made[backend]


@in_torch_cpu_and_triton
def test_bad_input_is_named(backend):
    q, cu_seqlens = torch.zeros(4, 2, 16), torch.tensor([0, 4], dtype=torch.int32)
    cos, sin, *_ = tables(4, 16)
    cases = (
        ((cos[:, :5], sin), r"cos has shape \(4, 5\), expected \(rows, head_dim // 2 = 8\)"),
        ((cos, sin[:, None]), r"sin has shape \(4, 1, 8\), expected"),
        ((cos, sin.bfloat16()), "sin is torch.bfloat16, expected torch.float32"),
        ((cos.to("meta"), sin), "cos is on meta, q on cpu"),
        ((cos[:3], sin), "cos has 3 positions, max_seqlen is 4"),
        ((cos, torch.cat([sin, sin])), r"cos has shape \(4, 8\), sin \(8, 8\)"),
        ((cos, sin.clone().requires_grad_()), "sin requires a gradient"),
    )
    with torch.profiler.profile() as profile:
        for rotary, reason in cases:
            with pytest.raises(ValueError, match=reason):
                ops.attention(q, q, q, cu_seqlens, 4, rotary=Rotary(*rotary), backend=backend)
        odd = torch.zeros(4, 2, 15)
        with pytest.raises(ValueError, match="head_dim is 15"):
            ops.attention(odd, odd, odd, cu_seqlens, 4, rotary=Rotary(cos, sin), backend=backend)
    assert not [event for event in profile.events() if event.name.startswith("fastbert::")]
