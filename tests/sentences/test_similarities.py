"""Similarities of vectors of any dtypes, against sentence-transformers', which compares halves in float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from precise import assert_close_to_theirs
from seeds import manual_seed

from fastbert.errors import InputError
from fastbert.sentences.similarity import SIMILARITIES, in_precision, similarity, similarity_pairwise

HALVES = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("other", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", SIMILARITIES)
def test_halves(name, dtype, other):
    functions = pytest.importorskip("sentence_transformers.util").SimilarityFunction
    manual_seed(0)
    a, b = torch.randn(3, 9).to(dtype), torch.randn(3, 9).to(other)
    for ours, theirs in (
        (similarity, functions.to_similarity_fn(name)),
        (similarity_pairwise, functions.to_similarity_pairwise_fn(name)),
    ):
        for one, two in ((a, b), (b, a), (list(a), b)):
            found = ours(one, two, name)
            exact = theirs(*(torch.stack(list(t)).double() for t in (one, two)))
            assert_close_to_theirs(found, theirs(one, two), exact)


@pytest.mark.parametrize("name", SIMILARITIES)
def test_the_wider_dtype_holds(name):
    """float64 beside float32, where sentence-transformers raises torch's error, is compared in float64."""
    manual_seed(0)
    a, b = torch.randn(3, 9).double(), torch.randn(3, 9)
    assert torch.equal(similarity(a, b, name), similarity(a, b.double(), name))
    assert torch.equal(similarity_pairwise(b, a, name), similarity_pairwise(b.double(), a, name))


@pytest.mark.parametrize("precision", ("int8", "uint8", "binary", "ubinary"))
def test_no_integers_for_what_is_not_finite(precision):
    vectors = np.ones((3, 8), np.float32)
    vectors[1, 2] = np.nan
    with pytest.raises(InputError, match=f"vector 1 is not finite: no {precision} stands for it"):
        in_precision(vectors, precision)
    assert in_precision(vectors, "float32") is vectors
