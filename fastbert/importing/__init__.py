"""What Python's garbage collector need not look at; a leaf, which all may import."""

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


@contextmanager
def collector_spares_what_is_there() -> Iterator[None]:
    """Python's collector does not look through the objects that are there already.

    torch alone has 200,000. What is imported and read behind it makes the collector begin again and again: 0.5 s before
    the first step of training, and 6 % of the time of each. In a server each look holds up all requests for 0.1 s.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
