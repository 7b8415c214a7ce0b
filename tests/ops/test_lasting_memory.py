"""Memory that lasts: packed copies share huge pages, none lies in another, and what is freed goes to the system."""

from __future__ import annotations

import random
import resource
import sys

import pytest
import torch
from isas import packs
from seeds import shifted

from fastbert import _C, ops
from fastbert.native.availability import extension_error

if extension_error() is not None:
    pytest.skip(extension_error(), allow_module_level=True)

ROWS = _C.most_rows_without_copy + 1
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def product(weight: torch.Tensor) -> torch.Tensor:
    return ops.linear(torch.ones(ROWS, weight.shape[1]), weight, None, backend="cpu")


def packed(weight: torch.Tensor) -> torch.Tensor:
    """The second product keeps a copy."""
    product(weight)
    return product(weight)


@pytest.mark.filterwarnings("error")  # a copy that another has written to would be found, and packed again
def test_copies_of_any_size_come_and_go():
    draw = random.Random(shifted(0))
    before, kept = _C.packed_bytes(), []
    for _ in range(150):
        weight = torch.randn(draw.choice([1, 64, 65, 200, 700]), draw.choice([3, 64, 384, 1500]))
        kept.append((weight, packed(weight)))
        while len(kept) > draw.randint(1, 40):
            kept.pop(draw.randrange(len(kept)))
        weight, result = draw.choice(kept)
        assert torch.equal(product(weight), result)
    for weight, result in kept:
        assert torch.equal(product(weight), result)
    del weight
    kept.clear()
    assert _C.packed_bytes() == before


@packs
@pytest.mark.parametrize("rows", [128, 4096], ids=["in a page with others", "more than a page"])
def test_what_is_freed_goes_back_to_the_system(rows):
    weights = [torch.randn(rows, 1024) for _ in range(2**25 // (rows * 1024))]
    total = sum(weight.nbytes for weight in weights)  # 128 MB
    for weight in weights:
        packed(weight)
    full = resident()
    ops.repack(weights[::2])
    ops.repack(weights[1::2])
    assert total * 0.95 < full - resident() < total * 1.05
