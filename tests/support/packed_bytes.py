"""What packed copies a process still holds."""

from __future__ import annotations

import gc
import sys

import torch


def bytes_still_held() -> int:
    """By other tests of this process; what they left to the collector or to compiled code goes first."""
    from fastbert import _C

    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    held = None
    while held != _C.packed_bytes():  # what one collection frees may make more garbage
        held = _C.packed_bytes()
        gc.collect()
    return held
