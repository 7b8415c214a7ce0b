"""What fastbert asks of glibc's malloc, which keeps what was freed; elsewhere nothing happens."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

_MMAP_THRESHOLD, _ARENA_MAX = -3, -8  # glibc's M_MMAP_THRESHOLD and M_ARENA_MAX
ARENAS, ALONE = 2, 1 << 20


def _of_libc(name: str) -> Callable[..., Any] | None:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None  # musl has neither


_mallopt, _trim = _of_libc("mallopt"), _of_libc("malloc_trim")


def bound_arenas() -> None:
    """For all of this process: a server's, since a library leaves settings to its program. Each thread has an arena by
    default, and each keeps free memory between what is in use. What has a megabyte is mapped alone, and goes back when
    it is freed.

    After four minutes of everything (benchmarks/soak.py) a server with 14 arenas held 426 MB and went on to
    grow; with two it held 398 from the first minute on.
    """
    if _mallopt is not None:
        _mallopt(_ARENA_MAX, ARENAS)
        _mallopt(_MMAP_THRESHOLD, ALONE)


def give_back() -> None:
    """Free memory, from between what is in use, too: 0.2 to 30 ms.

    Called where much was freed: where a model was loaded, since another may have been in its place, and where one was
    quantised. Of BERT-base in int8 the float32 weights, 310 MB, stayed in one load of two.
    """
    if _trim is not None:
        _trim(0)
