"""Every number that the tests draw goes by one seed: a rule that holds by the luck of a draw is a fault.

FASTBERT_TEST_SEED=17 makes all tests draw other numbers; without it they draw the same ones each time. `make test-full`
takes a new seed in every run and prints it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

SEED = int(os.environ.get("FASTBERT_TEST_SEED", "0"))
_IS_CPU_ALONE = not torch.accelerator.is_available()


def shifted(seed: int) -> int:
    """The seed to use in place of `seed`: another one for every FASTBERT_TEST_SEED, the same one without."""
    return seed + 10_007 * SEED  # above the seeds in tests, and NumPy takes no more than 32 bits


def manual_seed(seed: int) -> torch.Generator:
    """torch.manual_seed, which also notes a stack trace for each kind of device that is not there: 0.7 ms a test."""
    if _IS_CPU_ALONE:
        return torch.default_generator.manual_seed(shifted(seed))
    return torch.manual_seed(shifted(seed))


def torch_generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(shifted(seed))


def numpy_generator(seed: int) -> np.random.Generator:
    return np.random.default_rng(shifted(seed))


def python_random(seed: int) -> random.Random:
    return random.Random(shifted(seed))


@contextmanager
def another_draw(number: int) -> Iterator[None]:
    """Within, everything draws other numbers; those of number 0 are the usual ones."""
    global SEED
    usual = SEED
    SEED = usual + 5003 * number  # as many seeds apart as no two runs of `make test-full` are
    try:
        yield
    finally:
        SEED = usual
