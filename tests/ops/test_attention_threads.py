"""attention on the CPU in several threads: of its own, and of Python's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import test_attention
import torch
from isas import OF_FLOATS
from seeds import manual_seed
from test_attention import RAGGED, differentiate, each_dtype, make

from fastbert.ops.attention import attention
from fastbert.testing.cases import Lengths

backend = test_attention.backend  # the fixture


@pytest.mark.parametrize("num_heads,lengths", ((1, (700, 3, 190)), (4, (20, 31) * 12)), ids=("long", "short"))
@each_dtype
@pytest.mark.parametrize("backend", OF_FLOATS, indirect=True)
def test_threads_do_not_change_bits(backend, dtype, num_heads, lengths):
    """Long sequences are cut into tasks, by queries and by keys, where threads would idle; short ones are joined."""
    case, before = Lengths("", lengths), torch.get_num_threads()
    qkv = make(case, num_heads, 64, dtype)

    def f(q, k, v):
        manual_seed(1)
        return attention(q, k, v, case.cu_seqlens, max(lengths), dropout_p=0.1, backend=backend)

    results = []
    for threads in (1, 2, 3, 4, 1):
        torch.set_num_threads(threads)
        results.append(differentiate(f, qkv, qkv[0]))
    torch.set_num_threads(before)
    assert all(torch.equal(*pair) for other in results[1:] for pair in zip(results[0], other, strict=True))


@pytest.mark.parametrize("backend", ("cpu",), indirect=True)
def test_python_threads_share_the_kernels(backend):
    qkv = [make(RAGGED, 4, 64) for _ in range(4)]

    def run(x):
        with torch.no_grad():
            return [attention(*x, RAGGED.cu_seqlens, 41, backend=backend) for _ in range(20)]

    with ThreadPoolExecutor(4) as pool:
        for found, x in zip(pool.map(run, qkv), qkv, strict=True):
            assert all(map(torch.equal, found, run(x)))
