"""How long a request waited, was tokenised and was computed: in the header of its answer, and in /metrics."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass
class Times:
    """Seconds: waiting, to be tokenised and for its first batch; computing, from there to the end of its last one."""

    waiting: float = 0.0
    tokenizing: float = 0.0
    computing: float = 0.0

    def header(self) -> tuple[str, str]:
        """In milliseconds, as browsers and proxies read them (W3C, Server Timing)."""
        parts = (("wait", self.waiting), ("tokenize", self.tokenizing), ("compute", self.computing))
        return "server-timing", ", ".join(f"{name};dur={1e3 * seconds:.1f}" for name, seconds in parts)


TIMES: ContextVar[Times] = ContextVar("times")  # of the request that this task answers
