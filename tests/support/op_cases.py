"""The table of ops: how a case of each is made, what it is called with, and its literal formula.

A new op is one function here and its line in OPS. The function draws shapes and options, and returns the case, and
which rows of the output and of the inputs belong together: what is not finite in one group stays there (None: all is
one). tests/ops/test_contract.py runs what every op promises over it, and the fuzzer runs it with odd operands.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from draw import Draw
from isas import OF_FLOATS, WITHOUT_PRODUCTS
from op_case import LAYOUTS, Case, draw_lengths
from relative_cases import relative_attention

from fastbert import ops
from fastbert.testing import reference
from fastbert.testing.cases import Lengths

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "tanh", "silu")
SIZES = (8, 1, 2, 3, 16, 17, 33, 48, 64, 80, 100)
# Of LayerNorm. Of one column it is its bias, of two its bias and plus or minus its weight, whatever x is: the gradient
# of x is then what rounding has left, and twice another formula's is no fault.
WIDTHS = tuple(size for size in SIZES if size > 2)


def groups_of(lengths: Lengths) -> torch.Tensor:
    """The sequence of each row; slack is one more."""
    parts = [torch.full((n,), i) for i, n in enumerate((*lengths.lengths, lengths.padding_rows))]
    return torch.cat(parts)


def norms_means(backend: str) -> bool:
    """Where a mean is 1,000 deviations, torch's own LayerNorm has 3 to 6 times the formula's error in the gradient."""
    return backend != "torch"


def add_norm(draw: Draw, backend: str, dtype: torch.dtype):
    rows, width = draw.choice((1, 0, 2, 3, 17, 33)), draw.choice(WIDTHS)
    name = draw.choice(("add_layer_norm", "add_rms_norm"))
    shapes = {"x": (rows, width), "residual": (rows, width), "weight": (width,), "bias": (width,), "x_bias": (width,)}
    for absent in ("residual", "bias", "x_bias"):
        if draw.flag(3) or (absent == "bias" and name == "add_rms_norm"):
            del shapes[absent]
    eps, prenorm = draw.choice((1e-12, 1e-5, 1e-2)), draw.flag()
    draw.note(f"{name}, eps {eps}, prenorm {prenorm}")

    def run(function, x, weight, residual=None, bias=None, x_bias=None):
        given = (x, residual, weight) if name == "add_rms_norm" else (x, residual, weight, bias)
        return function(*given, x_bias=x_bias, eps=eps)

    def op(**tensors):
        out = run(partial(getattr(ops, name), prenorm=prenorm, backend=backend), **tensors)
        return torch.cat(out) if prenorm else out

    def formula(**tensors):
        out = run(getattr(reference, name), **tensors)
        return torch.cat(out) if prenorm else out[0]

    groups = torch.arange(rows)
    case = Case(op, formula, shapes, dtype, has_means=name == "add_rms_norm" or norms_means(backend))
    return case, torch.cat([groups, groups]) if prenorm else groups, groups


def attention(draw: Draw, backend: str, dtype: torch.dtype):
    lengths = draw_lengths(draw, 20 if backend == "triton" else 70)
    heads, head_dim = draw.integer(1, 3), draw.choice((16, 2, 3, 8, 24, 32, 33, 64, 80))
    group = draw.integer(2, 3) if draw.flag(3) else 1
    tokens, generator = lengths.total_tokens, torch.Generator().manual_seed(draw.seed())
    options: dict = {}
    if draw.flag(3):
        options["softmax_scale"] = draw.choice((0.0, -0.3, 1.0, 30.0))
    if draw.flag(3):
        options["window_size"] = (draw.integer(-1, 6), draw.integer(-1, 6))
        if draw.flag():  # with holes
            options["window_positions"] = torch.randint(1, 5, (tokens,), generator=generator).cumsum(0).int()
    longest = max(lengths.lengths) + draw.integer(0, 3)
    layout = (draw.flag(), draw.flag()) if draw.flag(3) and head_dim % 2 == 0 else None
    draw.note(
        f"{lengths.lengths} + {lengths.padding_rows}, max_seqlen {longest}, {group} heads a key's, {options}, {layout}"
    )
    if layout is not None:
        angles = 6 * torch.rand(tokens if layout[1] else longest + 2, head_dim // 2, generator=generator)
        options["rotary"] = ops.Rotary(angles.cos(), angles.sin(), *layout)
    cu_seqlens = lengths.cu_seqlens.long() if draw.flag(4) else lengths.cu_seqlens
    shape = (tokens, heads, head_dim)
    op = partial(ops.attention, cu_seqlens=cu_seqlens, max_seqlen=longest, backend=backend, **options)
    formula = partial(reference.attention, cu_seqlens=cu_seqlens, **options)
    case = Case(op, formula, {"q": (tokens, heads * group, head_dim), "k": shape, "v": shape}, dtype, joint=True)
    case.has_means = False  # it cancels in dq, and what is left is what the output's rounding left
    return case, groups_of(lengths), groups_of(lengths)


def feed_forward(draw: Draw, backend: str, dtype: torch.dtype):
    rows, width, inner = draw.choice((1, 0, 2, 17, 33, 50)), draw.choice(SIZES), draw.choice(SIZES)
    name, form = draw.choice(ACTIVATIONS), draw.choice(("plain", "merged", "apart"))
    draw.note(f"{name}, {form}")
    up = inner * (2 if form == "merged" else 1)
    shapes = {"x": (rows, width), "up_weight": (up, width), "up_bias": (up,), "down_weight": (width, inner)}
    if form == "apart":
        shapes |= {"gate_weight": (inner, width), "gate_bias": (inner,)}
    for bias in ("up_bias", "gate_bias"):
        if draw.flag(3):
            shapes.pop(bias, None)
    options = {"up_bias": None, "gated": form != "plain"}
    op = partial(ops.feed_forward, **options, activation=name, backend=backend)
    formula = partial(reference.feed_forward, **options, name=name)
    scales = {"up_weight": width**-0.5, "gate_weight": width**-0.5, "down_weight": inner**-0.5}
    case = Case(op, formula, shapes, dtype, {n: scale for n, scale in scales.items() if n in shapes})
    return case, torch.arange(rows), torch.arange(rows)


def linears(draw: Draw, backend: str, dtype: torch.dtype):
    rows, width = draw.choice((1, 0, 2, 17, 33, 50)), draw.choice((*SIZES, 384))
    sizes = [draw.choice(SIZES) for _ in range(draw.integer(1, 3))]
    has_bias = [not draw.flag(3) for _ in sizes]
    name = draw.choice(("none", *ACTIVATIONS))
    draw.note(f"{sizes}, biases {has_bias}, {name}")
    shapes = {"x": (rows, width), **{f"w{i}": (n, width) for i, n in enumerate(sizes)}}
    shapes |= {f"b{i}": (n,) for i, n in enumerate(sizes) if has_bias[i]}

    def op(x, **t):
        weights, biases = ([t.get(f"{kind}{i}") for i in range(len(sizes))] for kind in "wb")
        return torch.cat(ops.linears(x, weights, biases, activation=name, backend=backend), 1)

    def formula(x, **t):
        made = [reference.linear(x, t[f"w{i}"], t.get(f"b{i}"), name) for i in range(len(sizes))]
        return torch.cat(made, 1)

    case = Case(op, formula, shapes, dtype, {f"w{i}": width**-0.5 for i in range(len(sizes))})
    return case, torch.arange(rows), torch.arange(rows)


def embed_layer_norm(draw: Draw, backend: str, dtype: torch.dtype):
    tokens, width = draw.choice((1, 0, 2, 17, 40)), draw.choice(WIDTHS)
    generator = torch.Generator().manual_seed(draw.seed())
    rows = {"word": draw.integer(1, 40), "position": draw.integer(1, 20), "token_type": draw.integer(1, 2)}
    ids = {name: torch.randint(n, (tokens,), generator=generator) for name, n in rows.items()}
    shapes: dict = {name: (n, width) for name, n in rows.items()}
    if draw.flag(4):
        del shapes["token_type"]
    if draw.flag(4):
        del shapes["position"]
    types = None if draw.flag(4) else ids["token_type"]
    if not draw.flag(4):
        shapes |= {"weight": (width,), "bias": (width,)}
    draw.note(f"{tokens} tokens, types {types is not None}")

    def run(function, word, position=None, token_type=None, weight=None, bias=None):
        given = (ids["word"], ids["position"], types, word, position, token_type, weight, bias)
        return function(*given, eps=1e-5)

    op = partial(run, partial(ops.embed_layer_norm, backend=backend))
    case = Case(op, partial(run, reference.embed_layer_norm), shapes, dtype, has_means=norms_means(backend))
    return case, ids["word"], torch.arange(rows["word"])


def cross_entropy(draw: Draw, backend: str, dtype: torch.dtype):
    rows, width, classes = draw.choice((1, 0, 2, 12, 33)), draw.choice(SIZES), draw.choice((2, 1, 30, 101))
    generator = torch.Generator().manual_seed(draw.seed())
    labels = torch.randint(classes, (rows,), generator=generator)
    labels[torch.rand(rows, generator=generator) < draw.choice((0.0, 0.5, 1.0))] = -100
    options = {}
    if draw.flag(4):
        options["label_smoothing"] = 0.1
    if classes > 1 and draw.flag(4):  # of one class the gradient is this loss's alone: float64 loses it beside 1 - 1
        options["z_loss"] = 0.01
    draw.note(f"labels {labels.tolist()}, {options}")
    shapes = {"x": (rows, width), "weight": (classes, width), "bias": (classes,)}
    if draw.flag(3):
        del shapes["bias"]

    def run(function, x, weight, bias=None):
        return function(x, weight, bias, labels, **options)

    op = partial(run, partial(ops.cross_entropy, backend=backend))
    case = Case(op, partial(run, reference.cross_entropy), shapes, dtype, {"weight": width**-0.5})
    case.addends = int((labels != -100).sum())
    if rows:
        case.differs = lambda x, weight, bias=0.0: x @ weight.T + bias  # a loss is of logits that are rounded
    return case, None, None


def sequence_cross_entropy(draw: Draw, backend: str, dtype: torch.dtype):
    lengths = draw_lengths(draw, padding_rows=False)
    targets = torch.tensor([draw.integer(-1, n) for n in lengths.lengths])
    draw.note(f"{lengths.lengths}, targets {targets.tolist()}")
    options = {"cu_seqlens": lengths.cu_seqlens, "targets": targets}
    op = partial(ops.sequence_cross_entropy, **options)
    formula = partial(reference.sequence_cross_entropy, **options)
    return Case(op, formula, {"logits": (lengths.total_tokens,)}, dtype, addends=len(targets)), None, None


def pooling(draw: Draw, backend: str, dtype: torch.dtype):
    lengths, width, mode = draw_lengths(draw), draw.choice(SIZES), draw.choice(("mean", "cls", "max"))
    draw.note(f"{mode} of {lengths.lengths} + {lengths.padding_rows}")
    options = {"cu_seqlens": lengths.cu_seqlens, "mode": mode}
    op = partial(ops.pooling, backend=backend, **options)
    case = Case(op, partial(reference.pooling, **options), {"hidden_states": (lengths.total_tokens, width)}, dtype)
    return case, torch.arange(len(lengths.lengths)), groups_of(lengths)


def maxsim(draw: Draw, backend: str, dtype: torch.dtype):
    of_queries, of_documents, width = draw_lengths(draw, 40), draw_lengths(draw), draw.choice(SIZES)
    if backend == "triton":  # whose interpreter takes pairs one by one
        of_queries, of_documents = draw_lengths(draw, 20), draw_lengths(draw, 40)
    offsets = (of_queries.cu_seqlens, of_documents.cu_seqlens)
    counts, pairs = (len(of_queries.lengths), len(of_documents.lengths)), None
    if draw.flag():
        chosen = [[draw.integer(0, n - 1) for n in counts] for _ in range(draw.integer(0, 5))]
        pairs = torch.tensor(chosen, dtype=torch.int64).reshape(-1, 2).T
    draw.note(f"{of_queries}, {of_documents}, pairs {pairs}")

    def op(queries, documents):
        return ops.maxsim(queries, offsets[0], documents, offsets[1], pairs=pairs, backend=backend)

    def formula(queries, documents):
        scores = reference.maxsim(queries, offsets[0], documents, offsets[1])
        return scores if pairs is None else scores[pairs[0], pairs[1]]

    shapes = {"queries": (of_queries.total_tokens, width), "documents": (of_documents.total_tokens, width)}
    # Where products are equal but for rounding, which one is the largest is chance, and with it whose is the gradient.
    return Case(op, formula, shapes, dtype, has_means=False), None, None


def normalize(draw: Draw, backend: str, dtype: torch.dtype):
    rows, width = draw.choice((1, 0, 2, 3, 17, 33)), draw.choice(SIZES)
    groups = torch.arange(rows)
    op = partial(ops.normalize, backend=backend)
    return Case(op, reference.normalize, {"x": (rows, width)}, dtype), groups, groups


def pack_and_unpack(draw: Draw, backend: str, dtype: torch.dtype):
    rows, width = draw.integer(0, 40), draw.choice(SIZES)
    generator = torch.Generator().manual_seed(draw.seed())
    indices = (torch.rand(rows, generator=generator) < draw.choice((0.5, 0.0, 1.0))).nonzero().flatten()
    draw.note(f"{len(indices)} of {rows} rows")

    def op(x):
        return ops.unpack(ops.pack(x, indices, backend=backend), indices, rows, backend=backend)

    def formula(x):
        return torch.zeros_like(x).index_copy(0, indices, x[indices])

    groups = torch.arange(rows)
    return Case(op, formula, {"x": (rows, width)}, dtype), groups, groups


def dropout(draw: Draw, backend: str, dtype: torch.dtype):
    """The mask is what the same seed makes of ones, laid out alike; backward's is forward's."""
    rows, width, p = draw.choice((1, 0, 3, 17)), draw.choice(SIZES), draw.choice((0.1, 0.0, 0.5, 0.9))
    seed = draw.seed()
    draw.note(f"p {p}")

    def op(x):
        torch.manual_seed(seed)
        return ops.dropout(x, p, backend=backend)

    def formula(x):
        return torch.where(op(ones_like_x(case, x)) != 0, x / (1 - p), torch.zeros_like(x))

    case = Case(op, formula, {"x": (rows, width)}, dtype)
    return case, torch.arange(rows), torch.arange(rows)


def ones_like_x(case: Case, x: torch.Tensor) -> torch.Tensor:
    """In the op's dtype and layout: torch's own dropout draws in the order of memory."""
    return LAYOUTS[case.layouts.get("x", "contiguous")](torch.ones(x.shape, dtype=case.dtype), 1.0)


def add_layer_norm_dropout(draw: Draw, backend: str, dtype: torch.dtype):
    rows, width, p, seed = draw.choice((1, 2, 17)), draw.choice(WIDTHS), draw.choice((0.1, 0.6)), draw.seed()
    draw.note(f"p {p}")

    def run(x, residual, weight, x_bias):
        torch.manual_seed(seed)
        options = {"x_bias": x_bias, "dropout_p": p, "eps": 1e-5, "prenorm": True, "backend": backend}
        return torch.cat(ops.add_layer_norm(x, residual, weight, None, **options))

    def formula(x, residual, weight, x_bias):
        ones = ones_like_x(case, x)
        with torch.no_grad():
            keep = run(ones, None, ones[0], None)[rows:] != 0
        return torch.cat(reference.add_layer_norm(x, residual, weight, None, x_bias, 1e-5, keep, p))

    shapes = {"x": (rows, width), "residual": (rows, width), "weight": (width,), "x_bias": (width,)}
    groups, case = torch.arange(rows), Case(run, formula, shapes, dtype, has_means=norms_means(backend))
    return case, torch.cat([groups, groups]), groups


class Op(NamedTuple):
    """make: (draw, backend, dtype) -> case, groups of the output's rows, groups of the inputs'. backends: that have
    kernels for it, as tests/support/isas.py names them.
    """

    make: Callable[[Draw, str, torch.dtype], tuple[Case, torch.Tensor | None, torch.Tensor | None]]
    backends: tuple[str, ...] = ()


OPS = {
    "add_norm": Op(add_norm, (*WITHOUT_PRODUCTS, "triton")),
    "attention": Op(attention, (*OF_FLOATS, "triton")),
    "feed_forward": Op(feed_forward, (*OF_FLOATS, "triton")),
    "linears": Op(linears, OF_FLOATS),
    "embed_layer_norm": Op(embed_layer_norm, (*WITHOUT_PRODUCTS, "triton")),
    "cross_entropy": Op(cross_entropy, (*OF_FLOATS, "triton")),
    "sequence_cross_entropy": Op(sequence_cross_entropy),
    "pooling": Op(pooling, (*WITHOUT_PRODUCTS, "triton")),
    "maxsim": Op(maxsim, (*OF_FLOATS, "triton")),
    "normalize": Op(normalize),
    "pack_and_unpack": Op(pack_and_unpack, ("triton",)),
    "dropout": Op(dropout, (*WITHOUT_PRODUCTS, "triton")),
    "add_layer_norm_dropout": Op(add_layer_norm_dropout, (*WITHOUT_PRODUCTS, "triton")),
    "relative_attention": Op(relative_attention, (*OF_FLOATS, "triton")),
}
