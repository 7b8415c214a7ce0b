"""What a thread keeps of the memory that layers compute in, from call to call (csrc/ops/workspace.cpp)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from family_configs import make_config

import fastbert

LARGEST = 2000  # tokens


def held() -> int:
    """Megabytes of memory that no file stands behind."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("RssAnon:")[2].split()[0]) // 1024


@pytest.fixture
def encode():
    """Of so many tokens, in texts of ten."""
    model = fastbert.BertModel(make_config("bert", num_hidden_layers=1, hidden_size=256, intermediate_size=1024)).eval()

    def encode(tokens: int) -> None:
        cu_seqlens = torch.tensor([*range(0, tokens, 10), tokens], dtype=torch.int32)
        with torch.inference_mode():
            model.encode_packed(torch.ones(tokens, dtype=torch.int64), cu_seqlens, 10)

    return encode


def in_new_thread(call: Callable[[], int]) -> int:
    """A thread's memory goes with it."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_batches_that_grow_keep_what_the_largest_needs(encode):
    """Each was a little larger than all before, and what the smaller ones ran in was kept beside: 210 MB of MiniLM."""

    def grown(first: int) -> int:
        """By how much a new thread does, from a batch of so many tokens to the largest."""
        before = held()
        for tokens in (*range(first, LARGEST, 30), LARGEST, LARGEST):  # the second call has room for the first one's
            encode(tokens)
        return held() - before

    once, often = (in_new_thread(lambda first=first: grown(first)) for first in (LARGEST, LARGEST // 2))
    assert often <= 1.5 * once + 8, (often, once)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_shape_needs_more_than_the_largest(encode):
    """Each size of a buffer was kept beside the others, up to twice what the largest batch needs."""

    def grown() -> int:
        for tokens in (LARGEST, LARGEST, LARGEST):
            encode(tokens)
        before = held()
        for share in (2, 3, 4, 5, 7, 9, 20):
            encode(LARGEST // share + 30)
        return held() - before

    assert in_new_thread(grown) <= 1
