"""Launches as they happen on a GPU, up to the GPU itself: tests/support/dry_launches.py, once an architecture."""

from __future__ import annotations

from pathlib import Path

import pytest
from aot_cases import SHARED_LIMIT
from built import ROOT
from test_aot import all_kernels
from triton_programs import facts_of

pytestmark = pytest.mark.dear_to_set_up
PROGRAM = Path(__file__).parents[1] / "support" / "dry_launches.py"
CAPABILITIES = [pytest.param(c, marks=[pytest.mark.full] if c != 90 else [], id=f"sm_{c}") for c in SHARED_LIMIT]


@pytest.fixture(scope="module", params=CAPABILITIES)
def facts(request):
    return facts_of(PROGRAM, (str(request.param),), [*ROOT.glob("fastbert/**/*.py"), *ROOT.glob("benchmarks/gpu/*.py")])


def test_every_kernel_was_launched(facts):
    assert facts["kernels"] == sorted(name.split(".")[1] for name in all_kernels())


def test_nothing_that_a_launch_compiles_spills(facts):
    assert facts["spilling"] == []


def test_a_new_batch_compiles_nothing(facts):
    """Once there has been a batch of each class of lengths: only first steps may wait for the compiler."""
    assert facts["compiled again"] == {}


def test_launches_of_a_layer(facts):
    """Beside the products, which are the library's."""
    forward = {"_attention_fwd_kernel": 1, "_add_layer_norm_fwd_kernel": 2, "_activation_fwd_kernel": 1}
    assert facts["inference"] == forward
    attention = {"_attention_records_kernel": 1, "_attention_dkdv_kernel": 1, "_attention_dq_kernel": 1}
    norms = {"_add_layer_norm_bwd_kernel": 2, "_add_shares_kernel": 2}
    assert facts["training"] == {**forward, **attention, **norms, "_activation_bwd_kernel": 1}


def test_torch_compile_makes_few_graphs(facts):
    """One for the first call's length, and one a tile: not one a batch."""
    assert facts["graphs"] <= 3
