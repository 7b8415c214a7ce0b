"""What a thread keeps of the memory that layers compute in, from call to call (csrc/ops/workspace.cpp)."""

from __future__ import annotations

import sys
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


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_batches_that_grow_keep_what_the_largest_needs():
    """Each was a little larger than all before, and what the smaller ones ran in was kept beside: 210 MB of MiniLM."""
    model = fastbert.BertModel(make_config("bert", num_hidden_layers=1, hidden_size=256, intermediate_size=1024)).eval()

    def grown(first: int) -> int:
        """By how much a new thread does, from a batch of so many tokens to the largest."""
        before = held()
        for tokens in (*range(first, LARGEST, 30), LARGEST):
            cu_seqlens = torch.tensor([*range(0, tokens, 10), tokens], dtype=torch.int32)
            with torch.inference_mode():
                model.encode_packed(torch.ones(tokens, dtype=torch.int64), cu_seqlens, 10)
        return held() - before

    with ThreadPoolExecutor(1) as pool:  # a thread's memory goes with it
        once = pool.submit(grown, LARGEST).result()
    with ThreadPoolExecutor(1) as pool:
        often = pool.submit(grown, LARGEST // 2).result()
    assert often <= 1.5 * once + 8, (often, once)
