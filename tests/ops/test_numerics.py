"""The error rule itself: what it lets through, and everything that it must catch."""

from __future__ import annotations

import pytest
import torch
from attention_cases import make
from relative_cases import check, make_terms
from seeds import manual_seed

from fastbert.testing.cases import Lengths
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


@pytest.mark.parametrize("terms", ("key", "query"))
def test_relative_terms_of_equal_numbers_are_no_luck_of_the_baseline(terms):
    """Where all products of a sum are equal, its order alone says how it rounds: the baseline's is that of matrices."""
    for seed in range(4):
        manual_seed(seed)
        case = Lengths("", (20, 70))
        q, k, v = make(case, 2, 64, torch.float32)
        relative = make_terms(case, terms, "buckets", 2, 64, torch.float32)
        q, k = (q, _equal(k)) if terms == "query" else (_equal(q), k)
        relative = relative._replace(**{terms: 2 * _equal(getattr(relative, terms))})
        check("torch", case, (q, k, v), relative, softmax_scale=1.0)


def _equal(t: torch.Tensor) -> torch.Tensor:
    """With the first of each row's numbers everywhere in it."""
    return t[..., :1].expand_as(t).contiguous()
