"""Continuous batching: whoever computes takes what waits, up to a budget of tokens, as soon as the last batch is done.

Sequences of many requests share a batch; those of a large request may be spread over several. Nothing waits for a batch
to fill up, and nothing is padded, so a batch takes the time of its real tokens.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

SMALL = 256  # tokens that fill the products well enough: a batch is not split into smaller ones

Rows = np.ndarray | list[np.ndarray]
Sequence = Any  # what the engine computes, with a length in tokens


class Piece(NamedTuple):
    """A sequence of a job, and its place there."""

    job: PendingRequest
    place: int


class PendingRequest:
    """The sequences of one request. `future` gets what was computed of each, in their order."""

    def __init__(self, sequences: list[Sequence], lengths: list[int], future: asyncio.Future):
        self.sequences, self.lengths, self.future = sequences, lengths, future
        self.taken = 0  # so many of them are in a batch, or were
        self.rows: list[np.ndarray | None] = [None] * len(sequences)
        self.missing = len(sequences)
        self.submitted = self.started = time.perf_counter()
        self.finished = self.submitted


class Batcher:
    """Runs `compute(sequences)`, which gives a row for each, in threads of its own. Methods are for the event loop's
    thread.

    `on_batch(sequences, tokens)` is called there after each batch.
    """

    def __init__(
        self,
        compute: Callable[[list[Sequence]], Rows],
        budget: int,
        workers: int,
        threads: int,
        on_batch: Callable[[int, int], None] = lambda sequences, tokens: None,
    ):
        self.compute, self.budget, self.on_batch = compute, budget, on_batch
        self.queue: deque[PendingRequest] = deque()
        self.waiting = self.waiting_tokens = 0  # sequences that are in no batch, and their tokens
        self._idle = 0
        self._closed = False
        self._changed = threading.Condition()
        self._loop = asyncio.get_running_loop()
        self._threads = [threading.Thread(target=self._work, args=(threads,), daemon=True) for _ in range(workers)]
        for thread in self._threads:
            thread.start()

    @property
    def is_alive(self) -> bool:
        return all(thread.is_alive() for thread in self._threads)

    def submit(self, sequences: list[Sequence], lengths: list[int]) -> PendingRequest:
        """The job of some sequences, at least one; cancelling its future takes out those that are not begun."""
        job = PendingRequest(sequences, lengths, self._loop.create_future())
        with self._changed:
            self.queue.append(job)
            self.waiting += len(sequences)
            self.waiting_tokens += sum(lengths)
            self._changed.notify()
        return job

    def close(self) -> None:
        """Compute what waits, then end the threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _take(self) -> list[Piece]:
        """The next batch, longest waiting first; waits for one. Empty at the end."""
        with self._changed:
            while not (batch := self._next()) and not self._closed:
                self._idle += 1
                self._changed.wait()
                self._idle -= 1
            if self.queue:
                self._changed.notify()  # who else is idle gets a part of it
            return batch

    def _next(self) -> list[Piece]:
        """What one worker is to take of the queue: up to the budget, and no more than its share among the idle."""
        share = max(SMALL, -(-self.waiting_tokens // (self._idle + 1)))
        budget, tokens = min(self.budget, share), 0
        batch: list[Piece] = []
        while self.queue:
            job = self.queue[0]
            if job.future.cancelled():
                self._leave(len(job.sequences) - job.taken, sum(job.lengths[job.taken :]))
                self.queue.popleft()
                continue
            length = job.lengths[job.taken]
            if batch and tokens + length > budget:
                break
            tokens += length
            batch.append(Piece(job, job.taken))
            job.taken += 1
            if job.taken == len(job.sequences):
                self.queue.popleft()
        self._leave(len(batch), tokens)
        return batch

    def _leave(self, sequences: int, tokens: int) -> None:
        self.waiting -= sequences
        self.waiting_tokens -= tokens

    def _work(self, threads: int) -> None:
        torch.set_num_threads(threads)  # of this thread's own team
        while batch := self._take():
            now = time.perf_counter()
            for piece in batch:
                if piece.place == 0:
                    piece.job.started = now
            try:
                rows, error = self.compute([piece.job.sequences[piece.place] for piece in batch]), None
            except Exception as caught:  # whatever it is, those who wait are told, and the next batch may do better
                rows, error = None, caught
            self._loop.call_soon_threadsafe(self._deliver, batch, rows, error)

    def _deliver(self, batch: list[Piece], rows: Rows | None, error: Exception | None) -> None:
        now, tokens = time.perf_counter(), 0
        for i, (job, place) in enumerate(batch):
            tokens += job.lengths[place]
            if job.future.done():
                continue
            if rows is None:
                job.future.set_exception(ComputeError(error))
                continue
            job.rows[place] = rows[i]
            job.missing -= 1
            if not job.missing:
                job.finished = now
                job.future.set_result(job.rows)
        self.on_batch(len(batch), tokens)


class ComputeError(RuntimeError):
    """The model failed on a batch; `cause` says how."""

    def __init__(self, cause: Exception | None):
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.cause = cause
