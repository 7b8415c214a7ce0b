"""Imports without the garbage collector; a leaf, which all may import."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """For imports of ours that bring torch along, or much beside it. What an import makes stays, and so does torch; to
    find that, Python's garbage collector would look at all of their 170,000 objects, several times: half of what the
    import takes. So it waits, and then has them among the old ones, which it seldom looks at.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            if not gc.get_freeze_count():  # or others would lose what they froze
                gc.freeze()
                gc.unfreeze()
            gc.enable()
