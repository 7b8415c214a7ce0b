"""The facts of GPU kernels that are kept are those that the compilers make today."""

from __future__ import annotations

import pytest
from facts import KINDS, kept


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_facts_made_anew_are_those_that_are_kept(kind):
    if KINDS[kind].compiler() is None:
        pytest.skip("the compiler is not here")
    made = KINDS[kind].make()
    for name, fact in kept(kind).items():
        assert made.pop(name) == fact, f"{name}: run `make facts`"
    assert not made, "run `make facts`"
