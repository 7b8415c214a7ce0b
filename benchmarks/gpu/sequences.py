"""Ops over sequences on their own device: attention, pooling, pack and unpack.

What the tests check in the interpreter, and the sizes that it cannot do. An op without a kernel for GPUs is checked in
torch, as a GPU runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from benchmarks.gpu.checks import (
    Checks,
    Tensors,
    Where,
    assert_keep_rate,
    compare,
    differentiate,
    has_kernel,
    repeats,
    same_bits,
)
from fastbert import ops
from fastbert.testing import reference
from fastbert.testing.cases import LENGTHS, Lengths

# --------------------------------------------------------------------------------------------------------------------
# attention


FEW = Lengths("few", (3, 41))  # for the interpreter: more than one tile


def _even(length: int, total: int) -> Lengths:
    return Lengths(f"{total // length}x{length}", (length,) * (total // length))


def _ragged(total: int, longest: int) -> Lengths:
    """Lengths that differ by 37 modulo the longest, from 1 to `longest`, with slack up to `total`."""
    lengths: list[int] = []
    length = longest
    while sum(lengths) + length <= total:
        lengths.append(length)
        length = (length + 37 * len(lengths)) % longest + 1
    return Lengths(f"ragged-{longest}-{total}", tuple(lengths), padding_rows=total - sum(lengths))


def _ours(where: Where, case: Lengths, qkv: torch.Tensor, seed: int = 0, **options) -> torch.Tensor:
    """attention of stacked q, k, v: dq and dk are differences that cancel, their scale is that of all three."""
    torch.manual_seed(seed)
    cu_seqlens, longest = case.cu_seqlens.to(where.device), max(case.lengths)
    q, k, v = qkv.unbind()
    return ops.attention(q, k, v, cu_seqlens, longest, backend=where.backend, **options)


def _literal(case: Lengths, qkv: torch.Tensor, **options) -> torch.Tensor:
    q, k, v = qkv.unbind()
    out: torch.Tensor = reference.attention(q, k, v, case.cu_seqlens, **options)
    return out


def against_oracle(where: Where, case: Lengths, heads: int, head_dim: int, scale: float = 1.0, **options) -> None:
    qkv = where.randn(3, case.total_tokens, heads, head_dim)
    qkv[:2] *= scale
    compare(partial(_ours, where, case, **options), partial(_literal, case, **options), {"qkv": qkv})


def small(head_dim: int, where: Where) -> Checks:
    """Lengths around the smallest tiles, empty sequences, slack: a kernel for each, hence a job a head size."""
    for case in where.choose((LENGTHS[5] if head_dim == 16 else FEW,), LENGTHS):
        yield case.id, partial(against_oracle, where, case, where.choose(1, 3), head_dim)


def wide(where: Where) -> Checks:
    """Heads of 96 and 128, whose kernels take the compiler the longest."""
    for head_dim in where.choose((40,), (96, 128)):
        for case in where.choose((LENGTHS[5],), (_ragged(8192, 1500), _ragged(2048, 30))):
            yield f"{case.id} d{head_dim}", partial(against_oracle, where, case, 2, head_dim)


def large(where: Where) -> Checks:
    """Tiles of 64 and 128 tokens and many of them."""
    cases = where.choose(
        ((Lengths("65,40", (65, 40)), 1, 32),),
        (
            (Lengths("tile-edges-128", (127, 128, 129, 255, 256, 257)), 3, 64),
            (_even(512, 65536), 2, 64),
            (_ragged(65536, 700), 2, 64),
            (_ragged(8192, 160), 12, 32),
            (_even(8192, 16384), 1, 64),
            (Lengths("long-among-short", (4096, *(9,) * 300)), 2, 64),
        ),
    )
    for case, heads, head_dim in cases:
        yield f"{case.id} h{heads} d{head_dim}", partial(against_oracle, where, case, heads, head_dim)
    if not where.smoke and where.dtype is not torch.float32:
        yield "beyond 2^31 elements", partial(beyond_int32, where)


def features(where: Where) -> Checks:
    case = where.choose(LENGTHS[5], _ragged(2048, 700))
    for window in where.choose(((3, 3),), ((64, 64), (0, 0), (-1, 100), (130, -1))):
        yield f"window {window}", partial(against_oracle, where, case, 2, 64, window_size=window)
    rotary = _rotary_tables(where, max(case.lengths), 64)
    for window in where.choose(((3, 3),), ((-1, -1), (3, 3))):
        yield f"rotary, window {window}", partial(against_oracle, where, case, 2, 64, rotary=rotary, window_size=window)
    longer = where.choose(FEW, case)  # where saturated softmaxes are not all that there is
    yield "large logits", partial(against_oracle, where, longer, 2, 64, scale=30.0)
    yield "negative scale", partial(against_oracle, where, case, 2, 64, softmax_scale=-0.3)
    yield "same bits", partial(same_bits_twice, where, case)
    yield "isolation", partial(isolation, where)
    yield "slices of a fused projection", partial(slices, where, case)
    yield "dropout", partial(dropout, where)


def _rotary_tables(where: Where, positions: int, head_dim: int) -> ops.Rotary:
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, device=where.device) / head_dim)
    angles = torch.arange(positions, device=where.device)[:, None] * frequencies
    return ops.Rotary(angles.cos(), angles.sin())


def kinds(where: Where) -> Checks:
    """What only some families have: query heads that share a key head, windows by given positions, rows of the rotary
    tables by token, pairs of neighbours."""
    case = where.choose(LENGTHS[5], _ragged(2048, 700))
    positions = torch.cat([torch.arange(n) for n in (*case.lengths, case.padding_rows)])
    positions = (positions + positions // 3).to(where.device, torch.int32)  # a gap after every third token
    window: dict[str, Any] = {"window_size": where.choose((3, 3), (64, 64)), "window_positions": positions}
    tables = _rotary_tables(where, max(*case.lengths, 2 * case.total_tokens), 64)
    by_token = ops.Rotary(*(t[positions.long()].contiguous() for t in tables[:2]), by_token=True)
    options: dict[str, dict[str, Any]] = {
        "grouped": {},
        "positions": window,
        "rotary, interleaved": {"rotary": tables._replace(interleaved=True)},
        "rotary, by token": {"rotary": by_token},
        "all": {**window, "rotary": by_token._replace(interleaved=True)},
    }
    for name, given in options.items():
        group = 3 if name in ("grouped", "all") else 1
        yield name, partial(_kind_against_oracle, where, case, group, given)
    for head_dim in where.choose((), (64, 128)):
        longer = _ragged(8192, 1500)
        yield f"grouped, d{head_dim}", partial(_kind_against_oracle, where, longer, 4, {}, head_dim)
    yield "grouped, same bits", partial(_kind_repeats, where, case)


def _kind_heads(where: Where, case: Lengths, group: int, head_dim: int = 64) -> torch.Tensor:
    """(tokens, heads, head_dim): `group` query heads for each of two of k, then k and v, whose gradients share a scale
    as in `_ours`."""
    return where.randn(case.total_tokens, 2 * group + 4, head_dim)


def _kind(where: Where, case: Lengths, group: int, given: dict[str, Any], heads: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    q, k, v = heads.split((2 * group, 2, 2), 1)
    cu_seqlens, longest = case.cu_seqlens.to(where.device), max(case.lengths)
    return ops.attention(q, k, v, cu_seqlens, longest, backend=where.backend, **given)


def _kind_against_oracle(where: Where, case: Lengths, group: int, given: dict[str, Any], head_dim: int = 64) -> None:
    def literal(heads: torch.Tensor) -> torch.Tensor:
        q, k, v = heads.split((2 * group, 2, 2), 1)
        out: torch.Tensor = reference.attention(q, k, v, case.cu_seqlens, **given)
        return out

    compare(partial(_kind, where, case, group, given), literal, {"heads": _kind_heads(where, case, group, head_dim)})


def _kind_repeats(where: Where, case: Lengths) -> None:
    for dropout_p in (0.0, 0.1):
        repeats(partial(_kind, where, case, 3, {"dropout_p": dropout_p}), {"heads": _kind_heads(where, case, 3)})


RELATIVE_HEADS, RELATIVE_SPAN = 2, 16
RELATIVE_TERMS = {"content and position": ("key", "query"), "bias": ("bias",), "all terms": ("key", "query", "bias")}


def _relative_operands(where: Where, case: Lengths, terms: tuple[str, ...], head_dim: int) -> Tensors:
    tensors = {"qkv": where.randn(case.total_tokens, 3 * RELATIVE_HEADS, head_dim)}
    for seed, name in enumerate(terms, 1):
        width = () if name == "bias" else (head_dim,)
        tensors[name] = where.randn(2 * RELATIVE_SPAN, RELATIVE_HEADS, *width, seed=seed)
    return tensors


def _relative(places: torch.Tensor | None, longest: int, device: torch.device, **tables: torch.Tensor) -> ops.Relative:
    """A row for each distance up to a span, and the ends' for those beyond, as DeBERTa's first version has them."""
    rows = (
        torch.arange(1 - longest, longest, device=device).clamp(-RELATIVE_SPAN, RELATIVE_SPAN - 1) + RELATIVE_SPAN
    ).int()
    return ops.Relative(rows, **tables, positions=places)


def _relative_called(
    where: Where | None, case: Lengths, has_holes: bool, qkv: torch.Tensor, options: dict[str, Any], **tables
):
    """The op where a backend is given, else the formula. Holes: each fourth token has one behind it."""
    places = (torch.arange(case.total_tokens, device=qkv.device) * 5 // 4).int() if has_holes else None
    relative = _relative(places, 2 * max(case.lengths) + 1, qkv.device, **tables)
    q, k, v = qkv.split(RELATIVE_HEADS, 1)
    if where is None:
        return reference.attention(q, k, v, case.cu_seqlens, relative=relative, **options)
    torch.manual_seed(0)
    given = {"relative": relative, "backend": where.backend, **options}
    return ops.attention(q, k, v, case.cu_seqlens.to(where.device), max(case.lengths), **given)


def _relative_against_oracle(
    where: Where, case: Lengths, terms: tuple[str, ...], head_dim: int, holes: bool, **options
) -> None:
    def function(backend: Where | None, qkv: torch.Tensor, **tables: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _relative_called(backend, case, holes, qkv, options, **tables)
        return out

    compare(partial(function, where), partial(function, None), _relative_operands(where, case, terms, head_dim))


def _relative_repeats(where: Where, case: Lengths, holes: bool) -> None:
    """Of the tables' gradients, too, which are sums over all sequences."""
    for dropout_p in (0.0, 0.1):
        function = partial(_relative_called, where, case, holes, options={"dropout_p": dropout_p})
        repeats(function, _relative_operands(where, case, RELATIVE_TERMS["all terms"], 64))


def relative(where: Where) -> Checks:
    few = where.choose(Lengths("", (3, 41)), Lengths("", (1, 15, 16, 17, 64, 65, 130), padding_rows=3))
    long = where.choose(few, Lengths("", (1000, 333)))
    heads = where.choose((16,), (64, 32, 48) if where.dtype is torch.float32 else (64, 32, 80, 128))
    for head_dim in heads:
        for name, terms in RELATIVE_TERMS.items():
            yield f"{name}, head_dim {head_dim}", partial(_relative_against_oracle, where, few, terms, head_dim, False)
    terms = RELATIVE_TERMS["content and position"]
    yield "far beyond the last bucket", partial(_relative_against_oracle, where, long, terms, 64, False)
    yield "holes", partial(_relative_against_oracle, where, few, RELATIVE_TERMS["all terms"], 64, True)
    window = {"window_size": (5, 20)}
    yield "a window", partial(_relative_against_oracle, where, few, terms, 64, False, **window)
    yield "a window by tokens with holes", partial(_relative_against_oracle, where, few, terms, 64, True, **window)
    if has_kernel(where):
        for holes in (False, True):
            yield f"same bits, holes {holes}", partial(_relative_repeats, where, few, holes)


def same_bits_twice(where: Where, case: Lengths) -> None:
    qkv = where.randn(3, case.total_tokens, where.choose(2, 4), where.choose(16, 64))
    for dropout_p in (0.0, 0.1):
        repeats(partial(_ours, where, case, dropout_p=dropout_p), {"qkv": qkv})


def isolation(where: Where) -> None:
    """NaN and infinity in one sequence, and in slack, reach nothing else."""
    case = where.choose(Lengths("", (7, 18, 9), padding_rows=4), Lengths("", (200, 333, 129), padding_rows=77))
    first, last, end = case.cu_seqlens[1:].tolist()
    qkv = where.randn(3, case.total_tokens, 2, 64)
    spoiled = qkv.clone()
    spoiled[:, first:last] = torch.tensor([float("nan"), float("inf")], device=where.device).repeat(32)
    spoiled[:, end:] = float("nan")
    clean, dirty = (differentiate(partial(_ours, where, case), {"qkv": t}) for t in (qkv, spoiled))
    for kept in (slice(0, first), slice(last, case.total_tokens)):
        assert torch.equal(clean["out"][kept], dirty["out"][kept]), "a sequence's output changed with another's input"
        assert torch.equal(clean["dqkv"][:, kept], dirty["dqkv"][:, kept]), "a gradient changed with another's input"
    assert not dirty["out"][end:].any() and not dirty["dqkv"][:, end:].any(), "slack rows are not zero"


def slices(where: Where, case: Lengths) -> None:
    qkv = where.randn(case.total_tokens, 3, 2, 64)
    whole = differentiate(partial(_ours, where, case), {"qkv": qkv.transpose(0, 1).contiguous()})
    sliced = differentiate(lambda qkv: _ours(where, case, qkv.transpose(0, 1)), {"qkv": qkv})
    same_bits(whole, {"out": sliced["out"], "dqkv": sliced["dqkv"].transpose(0, 1)})


def _kept(where: Where, case: Lengths, heads: int, dropout_p: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What is left of equal probabilities (query, head, key), in forward and in backward."""
    width = max(case.lengths)
    position = torch.cat([torch.arange(n) for n in case.lengths]).to(where.device)
    identity = torch.nn.functional.one_hot(position, width)[:, None].expand(-1, heads, -1).to(where.dtype)
    zeros, value = torch.zeros_like(identity), identity.clone().requires_grad_()
    torch.manual_seed(seed)
    cu_seqlens = case.cu_seqlens.to(where.device)
    out = ops.attention(zeros, zeros, value, cu_seqlens, width, dropout_p=dropout_p, backend=where.backend)
    (dvalue,) = torch.autograd.grad(out, value, identity)  # (key, head, query)
    backward = torch.zeros_like(out)
    offsets = case.cu_seqlens.tolist()
    for start, stop in pairwise(offsets):
        backward[start:stop, :, : stop - start] = dvalue[start:stop, :, : stop - start].transpose(0, 2)
    return out.detach(), backward


def dropout(where: Where) -> None:
    """The keep rate, the same mask in backward, the same mask for the same seed, and the values by the oracle."""
    case, heads = Lengths("", where.choose((17, 3), (128, 3, 0, 70))), where.choose(2, 8)
    for dropout_p in where.choose((0.5,), (0.1, 0.5)):
        forward, backward = _kept(where, case, heads, dropout_p, 3)
        assert torch.equal(forward, backward), "backward has another dropout mask than forward"
        assert torch.equal(forward, _kept(where, case, heads, dropout_p, 3)[0]), "one seed gave two masks"
        assert not torch.equal(forward, _kept(where, case, heads, dropout_p, 4)[0]), "two seeds gave one mask"
        offsets = case.cu_seqlens.tolist()
        kept = [forward[a:b, :, : b - a] != 0 for a, b in pairwise(offsets)]
        assert_keep_rate(torch.cat([k.flatten() for k in kept]), dropout_p)
    keep = _kept(where, case, 2, 0.25, 5)[0] != 0
    qkv = where.randn(3, case.total_tokens, 2, max(case.lengths))
    ours = partial(_ours, where, case, seed=5, dropout_p=0.25)
    compare(ours, partial(_literal, case, keep=keep, dropout_p=0.25), {"qkv": qkv})


def beyond_int32(where: Where) -> None:
    """The last sequences of a batch of more than 2^31 elements have the bits that they have alone."""
    heads, head_dim, length = 16, 64, 512
    case, alone = _even(length, 2**31 // (heads * head_dim) + 2 * length), _even(length, length)
    qkv = where.randn(1, case.total_tokens, heads, head_dim).expand(3, -1, -1, -1)
    dout = qkv[0]

    def both(qkv: torch.Tensor, dout: torch.Tensor, which: Lengths) -> tuple[torch.Tensor, ...]:
        q, k, v = (t.detach().requires_grad_() for t in qkv.unbind())
        cu_seqlens = which.cu_seqlens.to(where.device)
        out = ops.attention(q, k, v, cu_seqlens, length, backend=where.backend)
        return out.detach()[-length:], *(g[-length:] for g in torch.autograd.grad(out, (q, k, v), dout))

    whole = both(qkv, dout, case)
    single = both(qkv[:, -length:].contiguous(), dout[-length:].contiguous(), alone)
    assert all(map(torch.equal, whole, single)), "the last sequence's bits depend on how many come before it"


# --------------------------------------------------------------------------------------------------------------------
# pooling


def _pooling_case(where: Where, case: Lengths, width: int, mode: str) -> None:
    cu_seqlens = case.cu_seqlens.to(where.device)
    tensors = {"hidden_states": where.randn(case.total_tokens, width)}
    ours = partial(ops.pooling, cu_seqlens=cu_seqlens, mode=mode, backend=where.backend)
    compare(ours, partial(reference.pooling, cu_seqlens=case.cu_seqlens, mode=mode), tensors)
    if has_kernel(where):
        repeats(ours, tensors)


def _pooling_isolation(where: Where, mode: str) -> None:
    case = Lengths("", where.choose((7, 18, 9), (200, 333, 129)), padding_rows=5)
    first, last, end = case.cu_seqlens[1:].tolist()
    clean = where.randn(case.total_tokens, where.choose(32, 768))
    spoiled = clean.clone()
    spoiled[first:last] = spoiled[end:] = float("nan")
    function = partial(ops.pooling, cu_seqlens=case.cu_seqlens.to(where.device), mode=mode, backend=where.backend)
    one, other = (differentiate(function, {"hidden_states": t}) for t in (clean, spoiled))
    assert torch.equal(one["out"][::2], other["out"][::2]), "a sequence's vector changed with another's input"


def pooling(where: Where) -> Checks:
    large = (Lengths("128x512", (512,) * 128), Lengths("ragged", tuple(range(1, 300, 3)), padding_rows=5))
    for mode in ("mean", "cls", "max"):
        for case in where.choose((LENGTHS[5],), (LENGTHS[3], LENGTHS[5], *large)):
            yield f"{case.id} {mode}", partial(_pooling_case, where, case, where.choose(32, 768), mode)
        yield f"isolation {mode}", partial(_pooling_isolation, where, mode)


# --------------------------------------------------------------------------------------------------------------------
# maxsim


def _maxsim_case(where: Where, of_queries: Lengths, of_documents: Lengths, width: int) -> None:
    offsets = of_queries.cu_seqlens, of_documents.cu_seqlens
    tensors = {
        "queries": where.randn(of_queries.total_tokens, width),
        "documents": where.randn(of_documents.total_tokens, width),
    }
    ours = partial(_maxsim, ops.maxsim, *(t.to(where.device) for t in offsets), backend=where.backend)
    compare(ours, partial(_maxsim, reference.maxsim, *offsets), tensors)
    if has_kernel(where):
        repeats(ours, tensors)


def _maxsim(function: Callable[..., Any], of_q: Any, of_d: Any, *, queries: Any, documents: Any, **options: Any) -> Any:
    return function(queries, of_q, documents, of_d, **options)


def maxsim(where: Where) -> Checks:
    for queries, documents, width in where.choose(
        (((3, 7), (9, 1, 20), 32),), (((32,) * 64, (300, 30, 512, 1) * 16, 128), ((32, 1), (8192, 70), 96))
    ):
        case = partial(_maxsim_case, where, Lengths("", queries), Lengths("", documents), width)
        yield f"{len(queries)} with {len(documents)} of {width}", case


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
    **{f"attention/small-{head_dim}": partial(small, head_dim) for head_dim in (16, 64, 80)},
    "attention/large": large,
    "attention/wide": wide,
    "attention/features": features,
    "attention/kinds": kinds,
    "attention/relative": relative,
    "pooling": pooling,
    "maxsim": maxsim,
    "pack": partial(packing, "pack"),
    "unpack": partial(packing, "unpack"),
}
