"""Python's collector looks through what tests make, and not each time through what lives to the end.

That is half a million objects: torch, transformers, all that was collected. A whole collection of them takes 0.4 s,
each run of training asks for one, and what tests allocate starts others.
"""

from __future__ import annotations

import gc
import sys

THRESHOLDS = (10_000, 10, 10)  # objects until the next look; by default 700, which models of many modules are at once
MANY = 100  # modules

thaw = gc.unfreeze
_modules = 0


def install() -> None:
    """What a run of training freezes stays so: gc.unfreeze() would take all that was frozen before, too. The
    question whether others froze something is answered at once: to count it takes 0.05 s, at each name of fastbert.
    """
    gc.unfreeze = lambda: None
    gc.get_freeze_count = lambda: 1
    gc.set_threshold(*THRESHOLDS)


def spare_what_is_there() -> None:
    """All of it lives to the end."""
    global _modules
    _modules = len(sys.modules)
    gc.freeze()


def spare_what_was_imported() -> None:
    """To be called between tests: when many modules are new, they, too, live to the end."""
    if len(sys.modules) >= _modules + MANY:
        gc.collect()
        spare_what_is_there()
