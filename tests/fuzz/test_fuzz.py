"""A few cases of each fuzzer, always the same ones: that they run at all, and find nothing, from commit to commit."""

from __future__ import annotations

import fuzz_files
import fuzz_models
import fuzz_ops
import pytest
from fuzz_driver import run_round

CASES = {fuzz_files.FUZZER: 30, fuzz_models.FUZZER: 6, fuzz_ops.FUZZER: 40}


@pytest.mark.parametrize("fuzzer", CASES, ids=lambda fuzzer: fuzzer.name)
def test_a_few_cases(fuzzer):
    done = run_round(
        fuzzer, seed=0, cases=CASES[fuzzer], without=("compiled",)
    )  # torch's compiler takes seconds to import
    assert done.finding is None, done.finding.text
    assert done.cases >= CASES[fuzzer]
