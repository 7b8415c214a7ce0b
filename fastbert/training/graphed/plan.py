"""The buckets of an epoch, chosen before its first step by what its steps consist of."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fastbert.cuda_graphs.buckets import Buckets, Sizes
from fastbert.data.batches import StepSampler
from fastbert.data.loader import dataset_of
from fastbert.packed_inputs import PackedInputs

SAMPLED_STEPS = 512  # steps of an epoch at most, from all of it


def plan_buckets(
    buckets: Buckets, collate: Any, examples: Any, sampler: StepSampler, max_length: int, texts: int
) -> PackedInputs:
    """Add to `buckets` what the batches of an epoch need; returns one of these batches.

    How many tokens have labels is known of what `collate` makes alone: of one batch, for all. texts: sequences of an
    example, max_length tokens each at most.
    """
    lengths, plan = sampler.steps.lengths, sampler.plan[sampler.start_step :]
    sampled = np.unique(np.linspace(0, len(plan) - 1, SAMPLED_STEPS).astype(int))
    batches = [part for i in sampled for part in sampler.batches_of(plan[i]) if len(part)]
    largest = max(batches, key=lambda part: int(lengths[part].sum()))
    dataset = dataset_of(examples, sampler, collate)
    example: PackedInputs = collate([dataset[i] for i in largest.tolist()])
    batch = example["batch"]
    share = None if batch.labelled is None else batch.labelled.numel() / batch.total_tokens
    sizes = set[Sizes]()
    for part in batches:
        tokens = int(lengths[part].sum())
        longest = int(lengths[part].max()) if texts == 1 else max_length
        labelled = None if share is None else math.ceil(share * tokens)
        sizes.add(Sizes(tokens, len(part) * texts, longest, labelled))
    buckets.plan(list(sizes), example.get("num_choices", 1))
    return example
