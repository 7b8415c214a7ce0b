"""Launches as they happen on a GPU, up to the GPU itself: tests/support/dry_launches.py, once an architecture.

What is checked are the facts that `make facts` has written down (tests/support/facts.py).
"""

from __future__ import annotations

import pytest
from aot_cases import SHARED_LIMIT
from compiled_kernels import all_kernels
from facts import kept


@pytest.fixture(scope="module", params=SHARED_LIMIT, ids="sm_{}".format)
def facts(request):
    return kept("launches")[str(request.param)]


def test_every_kernel_was_launched(facts):
    pytest.importorskip("triton", reason="Triton is not installed")
    assert facts["kernels"] == sorted(name.split(".")[1] for name in all_kernels())


def test_nothing_that_a_launch_compiles_spills(facts):
    assert facts["spilling"] == []


def test_a_new_batch_compiles_nothing(facts):
    """Once there has been a batch of each class of lengths: only first steps may wait for the compiler."""
    assert facts["compiled again"] == {}


FORWARD = {"_attention_fwd_kernel": 1, "_add_layer_norm_fwd_kernel": 2, "_activation_fwd_kernel": 1}
BACKWARD = {
    "_attention_records_kernel": 1,
    "_attention_dkdv_kernel": 1,
    "_attention_dq_kernel": 1,
    "_add_layer_norm_bwd_kernel": 2,
    "_add_shares_kernel": 2,
    "_activation_bwd_kernel": 1,
}


def test_launches_of_a_layer(facts):
    """Beside the products, which are the library's. Training is one op for all layers."""
    assert facts["inference"] == FORWARD
    assert facts["training"] == facts["training op by op"] == {**FORWARD, **BACKWARD}


def test_launches_of_a_layer_that_is_made_again(facts):
    """Up to its wide matrix: attention and its norm, and the norm before the layer."""
    again = {"_attention_fwd_kernel": 2, "_add_layer_norm_fwd_kernel": 4}
    assert facts["training recomputing"] == {**FORWARD, **BACKWARD, **again}


def test_torch_compile_makes_few_graphs(facts):
    """One for the first call's length, and one a tile: not one a batch."""
    assert facts["graphs"] <= 3
