"""What a process does with signals, without a moment at which one is lost."""

from __future__ import annotations

import signal
import sys
from typing import Any


def set_handler(number: int, handler: Any) -> None:
    """signal.signal, which alone says "Signal 2 ignored due to race condition" of some that come meanwhile, and drops
    them: Python notes a signal at once and calls the handler later, which is none where it is SIG_DFL or SIG_IGN by
    then. Here the system has that handler first, so that no more are noted, and those before still get the old one.
    """
    if handler in (signal.SIG_DFL, signal.SIG_IGN) and sys.platform != "win32":
        import ctypes

        of_system = ctypes.CDLL(None).signal
        of_system.argtypes, of_system.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        of_system(number, int(handler))
    signal.signal(number, handler)
