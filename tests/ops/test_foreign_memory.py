"""No id, offset, index or label leads out of the tensors that it selects from, with every backend, both ways."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from full import halved, left_to_full
from isas import CPU_BACKENDS, backend_with_isa, device_of

from fastbert import ops
from fastbert.native.availability import triton_error
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

IDS = {"input_ids": "word", "position_ids": "position", "token_type_ids": "token_type"}
BAD = (-1, 9, 2**20, 2**32 + 3, -(2**40))  # of 9 rows; two of them are rows as 32-bit numbers
each_bad = pytest.mark.parametrize("bad", BAD)
CPU = ("torch", *CPU_BACKENDS)
needs_triton = pytest.mark.skipif(triton_error() is not None, reason=str(triton_error()))
ON_GPU = device_of("triton")


# --------------------------------------------------------------------------------------------------------------------
# embed_layer_norm, called directly

WIDTH = 40


def rows_between(rows: int, width: int = WIDTH) -> torch.Tensor:
    """A table in the middle of a larger one: what lies beyond it is 1e4, and can be read without a fault."""
    around = torch.full((3 * rows, width), 1e4)
    around[rows : 2 * rows] = torch.randn(rows, width)
    return around[rows : 2 * rows]


def operands(bad: int | None = None, name: str = "input_ids", tokens: int = 70) -> dict[str, torch.Tensor]:
    given = {n: torch.randint(9, (tokens,)) for n in IDS}
    if bad is not None:
        given[name][[3, 40]] = bad
    tables = {n: rows_between(9) for n in ("word", "position", "token_type")}
    return {**given, **tables, "weight": torch.randn(WIDTH), "bias": torch.randn(WIDTH)}


@halved
@pytest.mark.parametrize("name", IDS)
@each_bad
@pytest.mark.parametrize("backend", CPU)
def test_ids_beyond_a_table(backend, bad, name):
    given = operands(bad, name)
    table = given[IDS[name]]
    message = f"embed_layer_norm: {name} holds {bad}; valid values are 0 to 8"
    with backend_with_isa(backend) as chosen:
        for trains in (False, True):
            table.requires_grad_(trains)
            with pytest.raises(IndexError, match=message):
                ops.embed_layer_norm(**given, backend=chosen)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@each_bad
def test_gradients_of_ids_beyond_a_table(bad, backend):
    given = operands(bad)
    with backend_with_isa(backend), pytest.raises(IndexError, match=f"ids holds {bad}; valid values are 0 to 8"):
        torch.ops.fastbert.embed_bwd_cpu(torch.randn(70, WIDTH), given["input_ids"], given["word"], -1)


@left_to_full(lambda p: (p["name"], p["bad"]) != ("position_ids", -1))
@needs_triton
@left_to_full(lambda p: p["bad"] not in (-1, 2**32 + 3))  # the others lie between
@pytest.mark.parametrize("name", IDS)
@each_bad
def test_ids_beyond_a_table_on_a_gpu(bad, name):
    """The row is NaN, nothing else changes, and no gradient is written for it."""
    good = {n: t.to(ON_GPU) for n, t in operands().items()}
    spoiled = {**good, name: good[name].clone()}
    spoiled[name][[3, 40]] = bad
    others = torch.arange(70, device=ON_GPU).remainder(37) != 3  # all but tokens 3 and 40
    for weight in (good["weight"], None):
        one, other = (ops.embed_layer_norm(**{**t, "weight": weight}, backend="triton") for t in (good, spoiled))
        assert other[~others].isnan().all() and torch.equal(one[others], other[others])
    dout = torch.randn(70, WIDTH, device=ON_GPU)
    table = good["word"]
    found = torch.ops.fastbert.embed_bwd_triton(dout, spoiled[name], table, -1)
    oracle, baseline = (
        torch.zeros_like(table, dtype=dtype).index_add(0, good[name][others].long(), dout[others].to(dtype))
        for dtype in (torch.float64, torch.float32)
    )
    assert_close_to_reference(found, oracle, baseline, GRADIENT_FACTOR)
    for count in (33, 70):  # nothing but such ids
        ids = torch.full((count,), bad, device=ON_GPU)
        assert not torch.ops.fastbert.embed_bwd_triton(dout[:count], ids, table, -1).any()


@pytest.mark.parametrize("backend", ("torch", "cpu", pytest.param("triton", marks=needs_triton)))
def test_tensors_that_do_not_fit_each_other(backend):
    good = {n: t.to(device_of(backend)) for n, t in operands(tokens=5).items()}
    ids, word = good["input_ids"], good["word"]
    changes = (
        ({"input_ids": ids[:4]}, "input_ids"),
        ({"token_type_ids": ids[None]}, "token_type_ids"),
        ({"position_ids": ids[:3]}, "ids"),
        ({"input_ids": ids.int()}, "input_ids is (torch.int32|Int)"),
        ({"position_ids": ids > 3}, "position_ids is (torch.bool|Bool)"),
        ({"word": word[:, :1]}, "word has shape"),
        ({"token_type": word[:, :16]}, "token_type has shape"),
        ({"token_type": word[:0], "token_type_ids": None}, "no rows|has 0 rows for 5 tokens"),
        ({"word": word[:0]}, "no rows|has 0 rows for 5 tokens"),
        ({"weight": good["weight"][:16]}, "weight has shape"),
        ({"bias": good["bias"][:1]}, "bias has shape"),
        ({"inputs_embeds": word[:4]}, "(inputs_embeds|word) has"),
        ({"input_ids": None}, "give input_ids or inputs_embeds"),
        ({"padding_idx": 9}, "padding_idx is 9; the table has 9 rows"),
        ({"padding_idx": -1}, "padding_idx is -1; the table has 9 rows"),
        ({"position_padding_idx": 9}, "position_padding_idx is 9; the table has 9 rows"),
    )
    for change, message in changes:
        with pytest.raises((ValueError, RuntimeError, IndexError), match=message):
            ops.embed_layer_norm(**{**good, **change}, backend=backend)
    nothing = {n: t[:0] if t.dtype is torch.int64 else t for n, t in good.items()}
    empty = ops.embed_layer_norm(**{**nothing, "word": word[:0], "token_type": word[:0]}, backend=backend)
    assert empty.shape == (0, WIDTH)


# --------------------------------------------------------------------------------------------------------------------
# Other ops that select memory by number, on the kernels of a GPU


@needs_triton
@each_bad
def test_labels_beyond_the_classes(bad):
    hidden, weight = torch.randn(5, 16, device=ON_GPU, requires_grad=True), rows_between(9, 16).to(ON_GPU)
    labels = torch.tensor([1, 2, bad, 3, 4], device=ON_GPU)
    loss = ops.cross_entropy(hidden, weight, None, labels, backend="triton")
    loss.backward()
    assert loss.isnan() and hidden.grad[2].isnan().all() and hidden.grad[[0, 1, 3, 4]].isfinite().all()
    for backend in ("torch", "cpu"):
        with pytest.raises(IndexError, match=f"Target {bad} is out of bounds"):
            ops.cross_entropy(hidden.cpu(), weight.cpu(), None, labels.cpu(), backend=backend)


@halved
@needs_triton
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@each_bad
def test_indices_beyond_the_rows(bad, dtype):
    x, indices = rows_between(9).to(ON_GPU, dtype), torch.tensor([0, 2, bad, 7], device=ON_GPU)
    packed = ops.pack(x, indices, backend="triton")
    assert packed[2].isnan().all() and torch.equal(packed[[0, 1, 3]], x[[0, 2, 7]])
    indices = indices.sort().values
    padded = ops.unpack(x[:4].contiguous(), indices, 9, backend="triton")
    assert padded.isfinite().all() and padded.abs().max() < 100
    for change in (indices.int(), indices[None], indices[:3]):
        with pytest.raises(ValueError, match="indices"):
            ops.unpack(x[:4], change, 9, backend="triton")
    with pytest.raises(ValueError, match="indices is"):
        ops.pack(x, indices.int(), backend="triton")


OFFSETS = ([0, 2**20], [0, 5, 13], [-7, 12], [0, 7, 5, 12], [0, 12, 0, 12, 0, 12], [2**20, 2**21], [3, -(2**30), 12])


@left_to_full(lambda p: p["offsets"] not in OFFSETS[::3])
@needs_triton
@pytest.mark.parametrize("offsets", OFFSETS, ids=str)
def test_offsets_beyond_the_tokens(offsets):
    """Pooling gives NaN; attention, whose results belong to no text, stays within the batch and its list of tiles."""
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=ON_GPU)
    x = rows_between(12).to(ON_GPU)
    is_span = torch.tensor([0 <= a <= b <= 12 for a, b in pairwise(offsets)], device=ON_GPU)
    for mode in ("mean", "cls", "max"):
        pooled = ops.pooling(x, cu_seqlens, mode=mode, backend="triton")
        assert torch.equal(pooled.isnan().all(1), ~is_span) and pooled[is_span].abs().lt(100).all()
        long = rows_between(600, 8).to(ON_GPU)  # several programs share a sequence
        assert (
            ops.pooling(
                long,
                cu_seqlens * 0 + torch.arange(len(offsets), device=ON_GPU).int() * 601,
                mode=mode,
                backend="triton",
            )[0]
            .isnan()
            .all()
        )
    for num_keys in (None, cu_seqlens[1:] * 0 + 2**30, cu_seqlens[1:] * 0 - 7, cu_seqlens[1:]):
        tiles = torch.ops.fastbert.attention_tiles_triton(cu_seqlens, 12, 16, num_keys)
        first, end, begin, *ends = tiles[:, :5].unbind(1)
        assert ((first >= 0) & (first <= end) & (end <= 12) & (begin >= 0)).all()
        assert all(((begin <= last) & (last <= 12)).all() for last in ends)
    q = x.view(12, 2, 20)
    out = ops.attention(q, q, q, cu_seqlens, 12, backend="triton")
    assert out.shape == q.shape


@needs_triton
def test_the_list_of_tiles_ends_where_it_ends():
    """Sequences that overlap have more tiles than the batch has room for."""
    from fastbert.kernels import attention

    cu_seqlens = torch.tensor([0, 64, 0, 64, 0, 64], dtype=torch.int32, device=ON_GPU)
    room = 64 // 16 + 6
    tiles = torch.full((2 * room, 8), -9, dtype=torch.int32, device=ON_GPU)
    blocks = {"BLOCK_TILE": 16, "BLOCK_B": 16, "BLOCK_R": 128, "HAS_NUM_KEYS": False}
    attention._attention_tiles_kernel[(1,)](cu_seqlens, None, tiles, 5, 64, room, **blocks)
    assert (tiles[room:] == -9).all() and (tiles[:room] != -9).all()


def of_attention(offsets, backend=None, **options):
    q = torch.randn(12, 2, 16)
    return ops.attention(q, q, q, offsets, 12, backend=backend, **options)


TABLES = ops.Rotary(torch.ones(64, 8), torch.zeros(64, 8))
TAKE_OFFSETS = {
    "attention, torch": lambda offsets: of_attention(offsets, "torch"),
    "attention, cpu": lambda offsets: of_attention(offsets, "cpu"),
    "attention, window": lambda offsets: of_attention(offsets, "torch", window_size=(2, 1)),
    "attention, rotary": lambda offsets: of_attention(offsets, rotary=TABLES),
    "attention_probs": lambda offsets: ops.attention_probs(*torch.randn(2, 12, 2, 16), offsets, 12),
    "attention_probs, rotary": lambda o: ops.attention_probs(*torch.randn(2, 12, 2, 16), o, 12, rotary=TABLES),
    "mean": lambda offsets: ops.pooling(torch.randn(12, 4), offsets, mode="mean", backend="torch"),
    "cls": lambda offsets: ops.pooling(torch.randn(12, 4), offsets, mode="cls", backend="torch"),
    "max": lambda offsets: ops.pooling(torch.randn(12, 4), offsets, mode="max", backend="torch"),
    "loss": lambda o: ops.sequence_cross_entropy(torch.randn(12), o, torch.zeros(len(o) - 1, dtype=torch.long)),
}


@halved
@pytest.mark.parametrize("offsets", (*OFFSETS, [0, 5, 20], [1, 12]), ids=str)
@pytest.mark.parametrize("op", TAKE_OFFSETS)
def test_offsets_beyond_the_tokens_on_a_cpu(op, offsets):
    # The rotation comes first: it may meet a position that its tables do not have.
    message = "cu_seqlens|out of (range|bounds)" if "rotary" in op else "cu_seqlens"
    with pytest.raises((ValueError, RuntimeError, IndexError), match=message):
        TAKE_OFFSETS[op](torch.tensor(offsets))


@pytest.mark.parametrize("op", ("attention, window", "attention_probs"))
def test_a_sequence_longer_than_max_seqlen_on_a_cpu(op):
    """Where tokens are laid out in rows of max_seqlen, what is beyond would be left out."""
    q, offsets = torch.randn(12, 2, 16), torch.tensor([0, 3, 12])
    with pytest.raises(ValueError, match="max_seqlen is 8, but the longest sequence has 9 tokens"):
        if op == "attention_probs":
            ops.attention_probs(q, q, offsets, 8)
        else:
            ops.attention(q, q, q, offsets, 8, window_size=(2, 1), backend="torch")
