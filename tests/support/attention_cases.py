"""Operands of attention of every kind, and the comparison with the float64 oracle."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from attention_terms import assert_close_in_units, attention_terms
from isas import OF_FLOATS, backend_with_isa
from remembered import remembered
from seeds import manual_seed

from fastbert.native.availability import extension_error, triton_error
from fastbert.ops import Rotary, attention
from fastbert.testing import reference
from fastbert.testing.cases import DTYPES, LENGTHS, Lengths
from fastbert.testing.numerics import GRADIENT_FACTOR, OUTPUT_FACTOR, assert_close_to_reference

OF_BFLOAT16 = ("cpu-avx512_bf16", "cpu-amx")
RAGGED, SLACK = LENGTHS[3], LENGTHS[5]
FEW = Lengths("few", (5, 33, 1))
# Before and after the CPU's blocks of 16, 32 and 64 queries; more than one tile of 128 of the Triton kernels.
EDGES = Lengths("edges", (1, 15, 16, 17, 63, 64, 65, 0, 129))
LONG = Lengths("long", (130, 1))
# Of rotary embedding: (interleaved, by_token).
KINDS = {
    "halves": (False, False),
    "pairs": (True, False),
    "halves-by-token": (False, True),
    "pairs-by-token": (True, True),
}
Tensors = tuple[torch.Tensor, ...]


@pytest.fixture
def backend(request) -> Iterator[str]:
    error = {"cpu": extension_error, "triton": triton_error}.get(request.param, lambda: None)()
    if error is not None:
        pytest.skip(error)
    with backend_with_isa(request.param) as name:
        yield name


def backends(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("backend", names, indirect=True)


each_backend = backends("torch", *OF_FLOATS, "triton")
each_kernel = backends(*OF_FLOATS, "triton")
each_isa = backends(*OF_FLOATS)
in_torch_cpu_and_triton = backends("torch", "cpu", "triton")
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
each_kind = pytest.mark.parametrize("kind", KINDS)
needs_extension = pytest.mark.skipif(extension_error() is not None, reason=str(extension_error()))
needs_triton = pytest.mark.skipif(triton_error() is not None, reason=str(triton_error()))


def is_interpreted_in_16_bits(p) -> bool:
    """Whose path is that of 32 bits but for the rounding: one case of a test is enough for `make test`."""
    return p["backend"] == "triton" and p["dtype"] is torch.bfloat16


def is_met_in_the_other_dtype(p, place: int) -> bool:
    """Of the CPU's kernels, which a dtype changes in loads and stores alone: the value at this place of an axis meets
    each instruction set in one of them. Where products of bfloat16 have instructions of their own, it meets these.
    """
    if p["backend"] == "triton" or (p["backend"] in OF_BFLOAT16 and p["dtype"] is torch.bfloat16):
        return False
    return (("torch", *OF_FLOATS).index(p["backend"]) + DTYPES.index(p["dtype"]) + place) % 2 != 0


def make(case: Lengths, heads: int | tuple[int, int] = 3, head_dim: int = 32, dtype=torch.float32) -> Tensors:
    """q, k and v. heads: of all of them, or of q and of k and v."""
    of_q, of_k = heads if isinstance(heads, tuple) else (heads, heads)
    return tuple(torch.randn(case.total_tokens, n, head_dim).to(dtype) for n in (of_q, of_k, of_k))


def tables(rows: int, head_dim: int, interleaved: bool = False, by_token: bool = False) -> Rotary:
    """cos and sin of row * 100^-(0 to 1) (Su et al. 2021, section 3.3, with a smaller base: every pair turns)."""
    frequencies = 100.0 ** -torch.linspace(0, 1, head_dim // 2, dtype=torch.float64)
    angles = torch.arange(rows, dtype=torch.float64)[:, None] * frequencies
    return Rotary(angles.cos().float(), angles.sin().float(), interleaved, by_token)


def rotary_of(case: Lengths, head_dim: int, kind: str = "halves") -> Rotary:
    """A row for each position, or for each token of the batch: then no two sequences begin alike."""
    interleaved, by_token = KINDS[kind]
    return tables(case.total_tokens if by_token else max(case.lengths) + 5, head_dim, interleaved, by_token)


def positions(case: Lengths, largest_step: int = 4) -> torch.Tensor:
    """Those of padded columns, where a mask has holes; slack has any."""
    pieces = [torch.randint(1, largest_step + 1, (n,)).cumsum(0) - 1 for n in case.lengths]
    return torch.cat([*pieces, torch.randint(-9, 9, (case.padding_rows,))]).int()


def differentiate(f, tensors: Tensors, dout: torch.Tensor) -> Tensors:
    """The output, and the gradients of q, k and v."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = f(*leaves)
    if not out.requires_grad:  # the formula of nothing at all has no graph
        return out, *map(torch.zeros_like, leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))


def results_of(backend: str, case: Lengths, tensors: Tensors, dout: torch.Tensor, keep=None, seed=0, **options):
    """`differentiate` of the backend, of the oracle and of the formula; `keep` is the mask that `seed` gives."""

    def ours(q, k, v):
        manual_seed(seed)
        upper_bound = max(case.lengths) + 5
        return attention(q, k, v, case.cu_seqlens, upper_bound, backend=backend, **options)

    oracle, baseline = remembered(_literal, tensors, dout, cu_seqlens=case.cu_seqlens, keep=keep, **options)
    return differentiate(ours, tensors, dout), oracle, baseline


def _literal(tensors: Tensors, dout: torch.Tensor, **options) -> tuple[Tensors, Tensors]:
    """In float64, and in the tensors' own dtype."""
    formula = partial(reference.attention, **options)
    return differentiate(formula, tuple(t.double() for t in tensors), dout), differentiate(formula, tensors, dout)


def check(backend: str, case: Lengths, tensors: Tensors, keep=None, seed=0, in_units=False, **options) -> Tensors:
    """By the error rule, and what the backend found. Gradients count together: dq and dk are differences that cancel.

    in_units: each error counts by the terms of its element, where few elements would have nearly all of the error.
    """
    dout = torch.randn_like(tensors[0])
    found = results_of(backend, case, tensors, dout, keep, seed, **options)
    compared = list(zip(*map(_joint, found), strict=True))
    if in_units:
        doubles = (t.double() for t in (*tensors, dout))
        terms = remembered(attention_terms, *doubles, case.cu_seqlens, keep=keep, **options)
        of_elements = _joint(tuple(terms[name] for name in ("out", "dq", "dk", "dv")))
        for each, unit, factor in zip(compared, of_elements, (OUTPUT_FACTOR, GRADIENT_FACTOR), strict=True):
            assert_close_in_units(*each, unit, factor)
    else:
        for each, name, factor in zip(compared, ("out", "dqkv"), (OUTPUT_FACTOR, GRADIENT_FACTOR), strict=True):
            assert_close_to_reference(*each, factor, name)
    return found[0]


def _joint(results: Tensors) -> Tensors:
    return results[0], torch.cat([t.flatten() for t in results[1:]])


def dropped_probabilities(backend, case: Lengths, num_heads: int, dropout_p, seed, dtype=torch.float32) -> torch.Tensor:
    """What is left of the probabilities, and the same from backward: (2, query, head, key), all keys alike before."""
    width = max(case.lengths)
    position = torch.cat([torch.arange(n) for n in case.lengths])
    identity = torch.nn.functional.one_hot(position, width)[:, None].expand(-1, num_heads, -1).to(dtype)
    q, v = torch.zeros_like(identity), identity.clone().requires_grad_()
    manual_seed(seed)
    out = attention(q, q, v, case.cu_seqlens, width, dropout_p=dropout_p, backend=backend)
    (dv,) = torch.autograd.grad(out, v, identity)  # (key, head, query)
    backward = torch.zeros_like(out)
    for start, stop in zip(case.cu_seqlens[:-1], case.cu_seqlens[1:], strict=True):
        backward[start:stop, :, : stop - start] = dv[start:stop, :, : stop - start].transpose(0, 2)
    return torch.stack([out.detach(), backward])


def kept(backend, case: Lengths, num_heads: int, dropout_p, seed, dtype=torch.float32) -> torch.Tensor:
    """(query, head, key): whether `seed` keeps a probability, where every query sees every key."""
    return dropped_probabilities(backend, case, num_heads, dropout_p, seed, dtype)[0] != 0
