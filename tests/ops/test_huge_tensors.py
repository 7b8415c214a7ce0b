"""Offsets beyond 2^31 elements, in a file that is all hole: only what is touched takes memory.

Of Triton's kernels, those whose row is no loop's variable: the interpreter counts every loop in 32 bits, where the
compiler takes the width of its bounds.
"""

from __future__ import annotations

import pytest
import torch
from full import left_to_full
from isas import backend_with_isa, device_of
from seeds import manual_seed

from fastbert import ops

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU cannot read a file; the kernels run elsewhere")

ELEMENTS = 2**31 + 2**26  # of 2 bytes


@pytest.fixture
def huge(tmp_path):
    """bfloat16 (ELEMENTS,), zeros."""
    return torch.from_file(str(tmp_path / "huge"), shared=True, size=ELEMENTS, dtype=torch.bfloat16)


@pytest.fixture(params=("torch", "cpu-generic", "triton"))
def backend(request):
    assert device_of(request.param) == "cpu"
    with backend_with_isa(request.param) as name:
        yield name


# torch's offsets are its own, and Triton's interpreter takes seconds here.
@left_to_full(lambda p: p["backend"] != "cpu-generic")
def test_attention_of_tokens_that_lie_far_apart(backend, huge):
    """q, k, v and the gradient that comes in, read where they are: 2^24 elements from token to token."""
    lengths, stride = (9, 16, 1, 0, 7) * 4, 2**24
    total_tokens = sum(lengths)
    assert (total_tokens - 1) * stride > 2**31
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    results = []
    for is_far in (False, True):
        manual_seed(0)
        tensors = []
        for i in range(4):
            t = torch.randn(total_tokens, 2, 16, dtype=torch.bfloat16)
            if is_far:
                far = huge.as_strided(t.shape, (stride, 16, 1), 64 * i)
                t = far.copy_(t)
            tensors.append(t)
        *qkv, dout = tensors
        qkv = [t.detach().requires_grad_() for t in qkv]
        out = ops.attention(*qkv, cu_seqlens, 16, backend=backend)
        results.append((out, *torch.autograd.grad(out, qkv, dout)))
    assert all(map(torch.equal, *results))


def test_embedding_of_a_last_row(backend, huge):
    table = huge[: ELEMENTS // 64 * 64].view(-1, 64)
    table[0], table[-1] = torch.randn(2, 64).bfloat16()
    ids, zeros = torch.tensor([0, len(table) - 1]), torch.zeros(2, dtype=torch.int64)
    small = torch.zeros(1, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        for input_ids, position_ids, word, position in ((ids, zeros, table, small), (zeros, ids, small, table)):
            out = ops.embed_layer_norm(input_ids, position_ids, None, word, position, None, None, None, backend=backend)
            assert torch.equal(out, table[ids])


def test_packing_of_the_last_rows(backend, huge):
    if backend == "cpu":
        backend = "torch"  # there is no cpu kernel
    rows = huge[: ELEMENTS // 64 * 64].view(-1, 64)
    rows[0], rows[-1] = torch.randn(2, 64).bfloat16()
    indices = torch.tensor([0, len(rows) - 1])
    assert torch.equal(ops.pack(rows, indices, backend=backend), rows[indices])


@pytest.mark.parametrize("backend", ("triton",), indirect=True)
def test_unpacking_to_the_last_rows(backend, tmp_path):
    """One program out of very many: the first rows and columns of rows so long that the third begins beyond 2^31."""
    from fastbert.kernels.packing import _unpack_kernel

    width = 2**30 + 16
    elements = torch.from_file(str(tmp_path / "rows"), shared=True, size=4 * width, dtype=torch.int16)
    *rows, token = elements.view(4, width)
    token[:16] = torch.arange(1, 17)
    _unpack_kernel[(1,)](token, torch.tensor([2]), elements, 3, 1, width, 1, BLOCK_M=16, BLOCK_N=16, num_warps=4)
    assert torch.equal(rows[2][:16], token[:16]) and not any(row[:16].any() for row in rows[:2])
