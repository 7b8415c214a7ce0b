"""The error rule itself: what it lets through, and everything that it must catch."""

from __future__ import annotations

import pytest
import torch

from fastbert.testing.numerics import assert_close_to_reference

ORACLE = torch.linspace(-4, 4, 1000, dtype=torch.float64).view(10, 100)
BASELINE = ORACLE.bfloat16()


def test_the_baseline_itself_passes():
    assert_close_to_reference(BASELINE, ORACLE, BASELINE)
    assert_close_to_reference(ORACLE.float(), ORACLE, ORACLE.float())


def test_an_error_of_twice_the_baselines_passes_and_of_five_times_fails():
    bound = (BASELINE.double() - ORACLE).abs().max() + torch.finfo(torch.bfloat16).eps * 4
    for factor, passes in ((1.9, True), (5.0, False)):
        actual = ORACLE.float()
        actual[3, 7] += factor * bound.float()
        if passes:
            assert_close_to_reference(actual.bfloat16(), ORACLE, BASELINE)
        else:
            with pytest.raises(AssertionError, match=r"max error .* worst at \(3, 7\)"):
                assert_close_to_reference(actual.bfloat16(), ORACLE, BASELINE)


def test_a_wrong_minority_below_the_max_fails_by_the_mean():
    actual = ORACLE.float() + 0.02  # under the max bound of 0.09 everywhere
    with pytest.raises(AssertionError, match="mean error"):
        assert_close_to_reference(actual, ORACLE, ORACLE.float() + 0.02 * (torch.arange(1000).view(10, 100) == 5))


@pytest.mark.parametrize("bad", (float("nan"), float("inf")))
def test_what_is_not_finite_fails(bad):
    actual = BASELINE.clone()
    actual[0, 0] = bad
    with pytest.raises(AssertionError, match="1 elements are not finite"):
        assert_close_to_reference(actual, ORACLE, BASELINE)


def test_shape_and_dtype_must_agree():
    with pytest.raises(AssertionError, match="shapes"):
        assert_close_to_reference(BASELINE[:5], ORACLE, BASELINE)
    with pytest.raises(AssertionError, match="dtype"):
        assert_close_to_reference(BASELINE.float(), ORACLE, BASELINE)
    with pytest.raises(AssertionError, match="float64"):
        assert_close_to_reference(BASELINE, ORACLE.float(), BASELINE)
