"""ops.maxsim beside sentence-transformers' own scores."""

from __future__ import annotations

import itertools

import pytest
import torch

from fastbert import ops


def packed(lengths, width, seed=0):
    rows = torch.randn(sum(lengths), width, generator=torch.Generator().manual_seed(seed))
    offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    return torch.nn.functional.normalize(rows, dim=-1), offsets


@pytest.mark.parametrize("length_normalize", (False, True))
def test_scores_are_those_of_sentence_transformers(length_normalize):
    similarity = pytest.importorskip("sentence_transformers.util.similarity")
    q_lengths, d_lengths = (32, 1, 7, 64), (30, 512, 1, 100, 3)
    (queries, of_q), (documents, of_d) = packed(q_lengths, 96), packed(d_lengths, 96, seed=1)
    lists = [list(rows.split(lengths)) for rows, lengths in ((queries, q_lengths), (documents, d_lengths))]
    expected = similarity.maxsim(*lists, length_normalize=length_normalize)
    actual = ops.maxsim(queries, of_q, documents, of_d, length_normalize=length_normalize)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-5)
    pairs = torch.tensor([[0, 3, 3, 1], [4, 0, 1, 2]])
    chosen = [[side[i] for i in index.tolist()] for side, index in zip(lists, pairs, strict=True)]
    expected = similarity.maxsim_pairwise(*chosen, length_normalize=length_normalize)
    actual = ops.maxsim(queries, of_q, documents, of_d, pairs=pairs, length_normalize=length_normalize)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-5)
