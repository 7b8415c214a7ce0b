"""What was freed before a model was loaded or quantised goes back to the system, even from between what is in use."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch

from fastbert import BertModel
from fastbert.native import memory
from fastbert.quantization import quantize

BLOCK, BLOCKS = 1 << 16, 1024  # too small to be mapped alone

pytestmark = pytest.mark.skipif(memory._trim is None, reason="malloc_trim is glibc's")


def resident() -> int:
    """Bytes of this process that no file has."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) << 10


def free_much() -> list[torch.Tensor]:
    """64 MiB are freed, but below what is returned."""
    blocks = [torch.ones(BLOCK, dtype=torch.uint8) for _ in range(BLOCKS)]
    return blocks[-1:]


def test_loading(tmp_path):
    folder = tiny.write_model(tmp_path)
    kept = free_much()
    before = resident()
    model = BertModel.from_pretrained(folder)
    assert resident() < before - BLOCK * BLOCKS // 2
    del model, kept


def test_quantising(tmp_path):
    model = BertModel.from_pretrained(tiny.write_model(tmp_path))
    kept = free_much()
    before = resident()
    quantize(model)
    assert resident() < before - BLOCK * BLOCKS // 2
    del kept
