"""All layers as one op launches by addresses what it launches by tensors: what the interpreter's numbers prove of the
latter (tests/ops/test_encoder_layers_gpu.py) holds for the former.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from facts import printed

pytestmark = pytest.mark.dear_to_set_up


@pytest.fixture(scope="module")
def cases():
    return printed("by_address.py")


def test_both_ways_launch_the_same_on_the_same_memory(cases):
    assert {name: case for name, case in cases.items() if case["differences"] or case["unknown"]} == {}


def test_every_kind_of_a_stack_is_there(cases):
    """Both ops, dropouts, and precisions, and as many launches as layers have at least: 8 forward and 18 backward."""
    assert len(cases) == 96 and all(case["launches"] >= 26 for case in cases.values())
