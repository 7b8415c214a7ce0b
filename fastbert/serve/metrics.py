"""Counts and times for Prometheus, under text-embeddings-inference's names; its client adds `_total` to counters. The
times of a request stand in the header of its answer, too.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
SIZES = tuple(2**i for i in range(12))
TOKENS = tuple(2**i for i in range(4, 18))


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


@dataclass
class Outcomes:
    """What became of the POSTs; those of clients that have left are in none. refused: with a status of 400 or more."""

    answered: int = 0
    refused: int = 0
    cut_off: int = 0  # by the server's end

    def count(self, status: int) -> None:
        if status < 400:
            self.answered += 1
        else:
            self.refused += 1


class Metrics:
    def __init__(self) -> None:
        self.outcomes = Outcomes()
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)

        def counter(name: str, what: str, label: str) -> Counter:
            return Counter(f"te_{name}", what, [label], registry=self.registry)

        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"te_{name}", what, buckets=buckets, registry=self.registry)

        self.requests = counter("request_count", "requests that came in", "method")
        self.successes = counter("request_success", "requests that were answered with 200", "method")
        self.failures = counter("request_failure", "requests that were refused or failed", "err")
        self.duration = histogram("request_duration", "seconds from a request to its answer", SECONDS)
        self.tokenization = histogram("request_tokenization_duration", "seconds of tokenising a request", SECONDS)
        self.queue = histogram("request_queue_duration", "seconds of waiting: for this, and for a batch", SECONDS)
        self.inference = histogram("request_inference_duration", "seconds of its batches, first to last", SECONDS)
        self.input_length = histogram("request_input_length", "tokens of a request", TOKENS)
        self.batch_size = histogram("batch_next_size", "sequences in a batch", SIZES)
        self.batch_tokens = histogram("batch_next_tokens", "tokens in a batch", TOKENS)
        self.queue_size = Gauge("te_queue_size", "sequences that wait", registry=self.registry)

    def on_request(self, count: int, tokens: int, seconds: float, times: Times) -> None:
        """One of `count` inputs was computed."""
        self.successes.labels("single" if count == 1 else "batch").inc()
        self.queue.observe(times.waiting)
        self.inference.observe(times.computing)
        self.duration.observe(seconds)
        self.input_length.observe(tokens)

    def on_batch(self, sequences: int, tokens: int) -> None:
        self.batch_size.observe(sequences)
        self.batch_tokens.observe(tokens)

    def page(self) -> bytes:
        return generate_latest(self.registry)
