"""fastbert.native.signals: a signal meets the old handler or the new one, and none is lost between them."""

from __future__ import annotations

import os
import signal

import pytest

from fastbert.native.signals import set_handler

NUMBER = signal.SIGWINCH  # which by default does nothing


@pytest.mark.parametrize("handler", (signal.SIG_IGN, signal.SIG_DFL))
def test_the_system_has_the_handler_before_python(handler, monkeypatch):
    """Python would drop a signal that it notes in between, with a line on stderr: 1 of 150 that a flood brought."""
    seen, set_pythons = list[int](), signal.signal

    def with_a_signal_before(number, handler):
        os.kill(os.getpid(), number)
        return set_pythons(number, handler)

    before = set_pythons(NUMBER, lambda number, frame: seen.append(number))
    try:
        os.kill(os.getpid(), NUMBER)
        assert seen == [NUMBER]
        monkeypatch.setattr(signal, "signal", with_a_signal_before)
        set_handler(NUMBER, handler)
        assert seen == [NUMBER]
        assert signal.getsignal(NUMBER) is handler
    finally:
        set_pythons(NUMBER, before)


def test_a_handler_of_python():
    before = signal.getsignal(NUMBER)
    try:
        set_handler(NUMBER, test_a_handler_of_python)
        assert signal.getsignal(NUMBER) is test_a_handler_of_python
    finally:
        set_handler(NUMBER, before)
    assert signal.getsignal(NUMBER) == before
