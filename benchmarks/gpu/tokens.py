"""embed_layer_norm, pooling and dropout on their own device; in torch where they have no kernel, as a GPU runs them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.checks import (
    Checks,
    Tensors,
    Where,
    assert_keep_rate,
    compare,
    differentiate,
    repeats,
    same_bits,
)
from fastbert import ops
from fastbert.testing import reference
from fastbert.testing.cases import LENGTHS, Lengths

WORDS, POSITIONS = 3000, 512


def _has_kernel(where: Where) -> bool:
    return where.backend != "torch"  # whose sums by index are in no fixed order on a GPU


# --------------------------------------------------------------------------------------------------------------------
# embed_layer_norm


def _embed_operands(where: Where, width: int) -> Tensors:
    tables = {"word": WORDS, "position": POSITIONS, "token_type": 2}
    matrices = {name: where.randn(rows, width, seed=rows) for name, rows in tables.items()}
    return {**matrices, "weight": where.randn(width, seed=1), "bias": where.randn(width, seed=5)}


def _embed_case(where: Where, rows: int, width: int) -> None:
    """With and without token types and LayerNorm."""
    ids, positions = where.integers(WORDS, rows), where.integers(POSITIONS, rows, seed=1)
    tensors = _embed_operands(where, width)
    variants: tuple[tuple[torch.Tensor | None, tuple[str, ...]], ...] = (
        (where.integers(2, rows), ()),
        (None, ("token_type",)),
        (None, ()),
        (where.integers(2, rows), ("weight", "bias")),
    )
    for types, absent in variants:
        given: dict[str, Any] = dict.fromkeys(absent)
        present = {name: t for name, t in tensors.items() if name not in absent}
        ours = partial(ops.embed_layer_norm, ids, positions, types, eps=1e-5, backend=where.backend, **given)
        literal = partial(reference.embed_layer_norm, ids, positions, types, eps=1e-5, **given)
        compare(ours, literal, present)
        if _has_kernel(where) and types is not None and not absent:
            repeats(ours, present)


def _embed_padding(where: Where) -> None:
    """The padding row takes no gradient, the others take theirs."""
    ids = torch.arange(6, device=where.device).repeat(20)
    tensors = _embed_operands(where, where.choose(16, 768))
    ours = partial(ops.embed_layer_norm, ids, ids, None, eps=1e-5, backend=where.backend)
    free, padded = (differentiate(partial(ours, padding_idx=row), tensors)["dword"] for row in (None, 3))
    assert free[3].any() and not padded[3].any(), "row padding_idx has a gradient"
    free[3] = 0
    assert torch.equal(free, padded) or not _has_kernel(where), "padding_idx changes other rows' gradients"


def embed_layer_norm(where: Where) -> Checks:
    for rows, width in where.choose(((9, 48),), ((1, 64), (4097, 384), (16384, 768), (16384, 1024))):
        yield f"{rows}x{width}", partial(_embed_case, where, rows, width)
    yield "padding_idx", partial(_embed_padding, where)


# --------------------------------------------------------------------------------------------------------------------
# pooling


def _pooling_case(where: Where, case: Lengths, width: int, mode: str) -> None:
    cu_seqlens = case.cu_seqlens.to(where.device)
    tensors = {"hidden_states": where.randn(case.total_tokens, width)}
    ours = partial(ops.pooling, cu_seqlens=cu_seqlens, mode=mode, backend=where.backend)
    compare(ours, partial(reference.pooling, cu_seqlens=case.cu_seqlens, mode=mode), tensors)
    if _has_kernel(where):
        repeats(ours, tensors)


def _pooling_isolation(where: Where, mode: str) -> None:
    case = Lengths("", where.choose((7, 18, 9), (200, 333, 129)), slack=5)
    first, last, end = case.cu_seqlens[1:].tolist()
    clean = where.randn(case.total_tokens, where.choose(32, 768))
    spoiled = clean.clone()
    spoiled[first:last] = spoiled[end:] = float("nan")
    function = partial(ops.pooling, cu_seqlens=case.cu_seqlens.to(where.device), mode=mode, backend=where.backend)
    one, other = (differentiate(function, {"hidden_states": t}) for t in (clean, spoiled))
    assert torch.equal(one["out"][::2], other["out"][::2]), "a sequence's vector changed with another's input"


def pooling(where: Where) -> Checks:
    large = (Lengths("128x512", (512,) * 128), Lengths("ragged", tuple(range(1, 300, 3)), slack=5))
    for mode in ("mean", "cls", "max"):
        for case in (LENGTHS[3], LENGTHS[5], *where.choose((), large)):
            yield f"{case.id} {mode}", partial(_pooling_case, where, case, where.choose(32, 768), mode)
        yield f"isolation {mode}", partial(_pooling_isolation, where, mode)


# --------------------------------------------------------------------------------------------------------------------
# dropout


def _dropout_case(where: Where, rows: int, width: int, dropout_p: float) -> None:
    """The keep rate, the scale, the same mask in backward, one mask a seed."""
    x = where.randn(rows, width).abs() + 1

    def run(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = x.clone().requires_grad_()
        torch.manual_seed(seed)
        out = ops.dropout(leaf, dropout_p, backend=where.backend)
        return out.detach(), torch.autograd.grad(out, leaf, x)[0]

    out, gradient = run(3)
    assert torch.equal(out, gradient), "backward has another mask than forward"
    assert torch.equal(out, run(3)[0]) and not torch.equal(out, run(4)[0]), "masks do not follow the seed"
    assert_keep_rate(out != 0, dropout_p)
    expected = (x.double() / (1 - dropout_p))[out != 0]
    error = (out.double()[out != 0] - expected).abs() / expected
    assert error.max() <= 2 * torch.finfo(where.dtype).eps, "what is kept is not divided by the keep rate"


def dropout(where: Where) -> Checks:
    for dropout_p in (0.1, 0.5):
        rows, width = where.choose((33, 80), (16384, 768))
        yield f"{rows}x{width} p {dropout_p}", partial(_dropout_case, where, rows, width, dropout_p)


# --------------------------------------------------------------------------------------------------------------------
# pack, unpack


def _packing_case(where: Where, op: str, batch_size: int, seqlen: int, width: int) -> None:
    """The bits of plain indexing, both ways; widths with loads of 16, 4 and 2 bytes."""
    num_rows = batch_size * seqlen
    indices = (where.integers(10, num_rows) < 7).nonzero().flatten()
    if op == "pack":
        ours = partial(ops.pack, indices=indices, backend=where.backend)
        found, literal = (
            differentiate(f, {"x": where.randn(num_rows, width)}) for f in (ours, lambda x: x.index_select(0, indices))
        )
    else:
        ours = partial(ops.unpack, indices=indices, num_rows=num_rows, backend=where.backend)
        found, literal = (
            differentiate(f, {"packed": where.randn(indices.numel(), width)})
            for f in (ours, lambda packed: packed.new_zeros(num_rows, width).index_copy(0, indices, packed))
        )
    same_bits(found, literal)


def packing(op: str, where: Where) -> Checks:
    for batch_size, seqlen, width in where.choose(
        ((3, 17, 24), (2, 9, 15)), ((128, 512, 768), (8, 512, 30522), (8, 512, 50265))
    ):
        yield f"{batch_size}x{seqlen}x{width}", partial(_packing_case, where, op, batch_size, seqlen, width)


CHECKS: dict[str, Callable[[Where], Checks]] = {
    "embed_layer_norm": embed_layer_norm,
    "pooling": pooling,
    "dropout": dropout,
    "pack": partial(packing, "pack"),
    "unpack": partial(packing, "unpack"),
}
