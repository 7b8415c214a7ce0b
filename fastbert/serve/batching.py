"""Continuous batching: a thread takes what waits, up to a budget of tokens, as soon as its last batch is done.

Requests that fit in a batch go by their arrival, and share batches. Larger ones take turns of a batch each, so that
none holds up the others. Nothing waits for a batch to fill up, and nothing is padded, so a batch takes the time of its
real tokens.
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
    position: int


class PendingRequest:
    """The sequences of one request. `future` gets what was computed of each, in their order."""

    def __init__(self, sequences: list[Sequence], lengths: list[int], future: asyncio.Future, is_large: bool):
        self.sequences, self.lengths, self.future, self.is_large = sequences, lengths, future, is_large
        self.taken = 0  # so many of them are in a batch, or were
        self.rows: list[np.ndarray | None] = [None] * len(sequences)
        self.missing = len(sequences)
        self.submitted = self.started = time.perf_counter()
        self.finished = self.submitted


class Batcher:
    """Runs `compute(sequences)`, which gives a row for each, in threads of its own. Methods are for the event loop's
    thread.

    spare: one more thread, for requests that fit in a batch, while all others compute parts of larger ones. Where these
    threads keep all cores busy, the system lets it in within milliseconds, and a batch may take hundreds of them.
    `on_batch(sequences, tokens)` is called in the loop's thread after each batch.
    """

    def __init__(
        self,
        compute: Callable[[list[Sequence]], Rows],
        budget: int,
        workers: int,
        threads: int,
        on_batch: Callable[[int, int], None] = lambda sequences, tokens: None,
        *,
        spare: bool = False,
    ):
        self.compute, self.budget, self.on_batch = compute, budget, on_batch
        self.small: deque[PendingRequest] = deque()
        self.large: deque[PendingRequest] = deque()  # that do not fit in a batch
        self.waiting = self.waiting_tokens = 0  # sequences that are in no batch, and their tokens
        self._before_large = 0  # small requests whose turn is before that of the next large one
        self._idle = self._on_large = 0  # workers
        self._closed = False
        lock = threading.Lock()
        self._changed, self._spare_is_needed = threading.Condition(lock), threading.Condition(lock)
        self._loop = asyncio.get_running_loop()
        takes = [self._take] * workers + [self._take_spare] * spare
        self.workers = workers
        self._threads = [threading.Thread(target=self._work, args=(take, threads), daemon=True) for take in takes]
        for thread in self._threads:
            thread.start()

    @property
    def is_alive(self) -> bool:
        return all(thread.is_alive() for thread in self._threads)

    def submit(self, sequences: list[Sequence], lengths: list[int]) -> PendingRequest:
        """The job of some sequences, at least one; cancelling its future takes out those that are not begun."""
        tokens = sum(lengths)
        job = PendingRequest(sequences, lengths, self._loop.create_future(), is_large=tokens > self.budget)
        with self._changed:
            if job.is_large and not self.large:
                self._before_large = max(1, len(self.small))
            (self.large if job.is_large else self.small).append(job)
            self.waiting += len(sequences)
            self.waiting_tokens += tokens
            self._wake()
        return job

    def close(self) -> None:
        """Compute what waits, then end the threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._spare_is_needed.notify_all()
        for thread in self._threads:
            thread.join()

    def _wake(self) -> None:
        """Wake a thread that can take something of what waits."""
        if self.small or self.large:
            self._changed.notify()
        if self.small and self._on_large == self.workers:
            self._spare_is_needed.notify()

    def _take(self) -> list[Piece]:
        """The next batch; waits for one. Empty at the end."""
        with self._changed:
            while not (batch := self._next()) and not self._closed:
                self._idle += 1
                self._changed.wait()
                self._idle -= 1
            if batch:
                self._on_large += batch[0].job.is_large
            self._wake()  # another idle thread gets a part of what is left
            return batch

    def _take_spare(self) -> list[Piece]:
        """As `_take`, of small requests, while all workers are on large ones."""
        with self._changed:
            while not self._closed:
                if self._on_large == self.workers and (batch := self._fill_small(self.budget)):
                    return batch
                self._spare_is_needed.wait()
            return []

    def _next(self) -> list[Piece]:
        """What one worker is to take: up to the budget, and no more than its share among the idle.

        Before each turn of a large request those small ones have theirs that waited at the one before it, or one that
        came since.
        """
        share = max(SMALL, -(-self.waiting_tokens // (self._idle + 1)))
        budget = min(self.budget, share)
        if self._before_large > 0 and (batch := self._fill_small(budget)):
            return batch
        if batch := self._fill(self.large, budget):
            if self.large and batch[-1].job is self.large[0]:
                self.large.rotate(-1)
            self._before_large = max(1, len(self.small))
            return batch
        return self._fill_small(budget)

    def _fill_small(self, budget: int) -> list[Piece]:
        waited = len(self.small)
        batch = self._fill(self.small, budget)
        self._before_large -= waited - len(self.small)
        return batch

    def _fill(self, queue: deque[PendingRequest], budget: int) -> list[Piece]:
        """What is at the head of a queue, up to a budget of tokens, at least one sequence."""
        tokens = 0
        batch: list[Piece] = []
        while queue:
            job = queue[0]
            if job.future.done():  # its client has gone, or another part has failed
                self._leave(len(job.sequences) - job.taken, sum(job.lengths[job.taken :]))
                queue.popleft()
                continue
            length = job.lengths[job.taken]
            if batch and tokens + length > budget:
                break
            tokens += length
            batch.append(Piece(job, job.taken))
            job.taken += 1
            if job.taken == len(job.sequences):
                queue.popleft()
        self._leave(len(batch), tokens)
        return batch

    def _leave(self, sequences: int, tokens: int) -> None:
        self.waiting -= sequences
        self.waiting_tokens -= tokens

    def _work(self, take: Callable[[], list[Piece]], threads: int) -> None:
        torch.set_num_threads(threads)  # of this thread's own team
        while batch := take():
            now = time.perf_counter()
            for piece in batch:
                if piece.position == 0:
                    piece.job.started = now
            try:
                rows, error = self.compute([piece.job.sequences[piece.position] for piece in batch]), None
            except Exception as caught:  # whatever it is, the clients are told, and the next batch may do better
                rows, error = None, caught
            with self._changed:
                self._on_large -= batch[0].job.is_large
            self._loop.call_soon_threadsafe(self._deliver, batch, rows, error)

    def _deliver(self, batch: list[Piece], rows: Rows | None, error: Exception | None) -> None:
        now, tokens = time.perf_counter(), 0
        for i, (job, position) in enumerate(batch):
            tokens += job.lengths[position]
            if job.future.done():
                continue
            if rows is None:
                job.future.set_exception(ComputeError(error))
                continue
            job.rows[position] = rows[i]
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
