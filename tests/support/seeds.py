"""Every number that the tests draw goes by one seed: a rule that holds by the luck of a draw is a fault.

FASTBERT_TEST_SEED=17 makes all tests draw other numbers; without it they draw the same ones each time. `make test-full`
takes a new seed in every run and prints it.
"""

from __future__ import annotations

import os
import random

import numpy as np
import torch

SEED = int(os.environ.get("FASTBERT_TEST_SEED", "0"))


def shifted(seed: int) -> int:
    """The seed to use in place of `seed`: another one for every FASTBERT_TEST_SEED, the same one without."""
    return seed + 1_000_003 * SEED  # a prime far above the seeds in tests: no two of them meet


def manual_seed(seed: int) -> torch.Generator:
    return torch.manual_seed(shifted(seed))


def torch_generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(shifted(seed))


def numpy_generator(seed: int) -> np.random.Generator:
    return np.random.default_rng(shifted(seed))


def python_random(seed: int) -> random.Random:
    return random.Random(shifted(seed))
