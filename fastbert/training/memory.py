"""Freed memory stays with the process: a step of training asks for the same hundreds of megabytes again and again."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD
_LARGEST = 2**31 - 1


def keep_freed_memory() -> None:
    """Let glibc keep what is freed, for all of this process; elsewhere nothing happens.

    By default a freed block of megabytes goes back to the kernel, which gives it again page by page, zeroed: 6 % of the
    time of a step on 128 sentences.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # which musl has not
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _LARGEST)
        mallopt(_MMAP_THRESHOLD, _LARGEST)
