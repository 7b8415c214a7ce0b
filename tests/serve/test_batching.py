"""Continuous batching: who shares a batch, that nothing waits, that failures and absent clients harm no other."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from fastbert.serve.batching import Batcher, ComputeError


class Model:
    """Gives each sequence, a number, its square; holds a batch back until `release` if it is told to."""

    def __init__(self, held: bool = False):
        self.batches: list[list[int]] = []
        self.begun, self.gate = threading.Semaphore(0), threading.Semaphore(0)
        self.held = held

    def __call__(self, sequences: list[int]) -> np.ndarray:
        self.batches.append(list(sequences))
        self.begun.release()
        if self.held:
            assert self.gate.acquire(timeout=60)
        if 13 in sequences:
            raise RuntimeError("thirteen")
        return np.array([[n * n] for n in sequences], np.float32)


def drive(model: Model, budget: int, program, workers: int = 1):
    async def main():
        batcher = Batcher(model, budget, workers, 1)
        try:
            return await program(batcher)
        finally:
            model.held = False
            model.gate.release(100)
            batcher.close()

    return asyncio.run(main())


async def begun(model: Model) -> None:
    assert await asyncio.to_thread(model.begun.acquire, timeout=60)


def test_what_waits_is_taken_together_up_to_the_budget():
    model = Model(held=True)

    async def program(batcher):
        jobs = [batcher.submit([1], [10])]
        await begun(model)  # the first does not wait for others
        jobs += [batcher.submit([2, 3, 4], [40, 40, 40]), batcher.submit([5], [20]), batcher.submit([6], [500])]
        assert batcher.waiting == 5
        model.gate.release(5)
        rows = [await job.future for job in jobs]
        assert batcher.waiting == 0
        return rows

    rows = drive(model, 100, program)
    # A request is spread over batches, by turns; a sequence that is above the budget is a batch of its own.
    assert model.batches == [[1], [5], [2, 3], [6], [4]]
    assert [np.ravel(row).tolist() for row in rows] == [[1], [4, 9, 16], [25], [36]]


def test_a_failure_is_told_to_those_in_the_batch_only():
    model = Model(held=True)

    async def program(batcher):
        first = batcher.submit([1], [1])
        await begun(model)
        failing, beside = batcher.submit([13, 7], [50, 50]), batcher.submit([2], [60])
        model.gate.release(3)
        with pytest.raises(ComputeError, match="RuntimeError: thirteen"):
            await failing.future
        return np.ravel(await first.future).item(), np.ravel(await beside.future).item(), batcher.is_alive

    assert drive(model, 100, program) == (1, 4, True)


def test_who_has_gone_is_not_computed():
    model = Model(held=True)

    async def program(batcher):
        first = batcher.submit([1], [1])
        await begun(model)
        gone, stays = batcher.submit([2, 3], [1, 1]), batcher.submit([4], [1])
        gone.future.cancel()
        model.gate.release(2)
        await first.future
        return np.ravel(await stays.future).item(), batcher.waiting

    assert drive(model, 100, program) == (16, 0)
    assert model.batches == [[1], [4]]


def test_two_workers_take_two_batches():
    model = Model(held=True)

    async def program(batcher):
        jobs = [batcher.submit([1], [100])]
        await begun(model)
        jobs.append(batcher.submit([2], [100]))
        await begun(model)  # while the first is still held
        model.gate.release(2)
        return [np.ravel(await job.future).item() for job in jobs]

    assert drive(model, 100, program, workers=2) == [1, 4]


def test_the_idle_share_what_comes():
    """1,000 tokens and four idle workers: a batch of 256 or so for each, where one alone would take them all."""
    model = Model(held=True)

    async def program(batcher):
        while batcher._idle < 4:
            await asyncio.sleep(0.001)
        job = batcher.submit(list(range(20, 40)), [50] * 20)
        for _ in range(4):
            await begun(model)
        model.gate.release(4)
        return np.ravel(await job.future).tolist()

    assert drive(model, 2048, program, workers=4) == [float(n * n) for n in range(20, 40)]
    assert [len(batch) for batch in model.batches] == [5, 5, 5, 5]


def test_close_computes_what_waits():
    model = Model(held=True)

    async def main():
        batcher = Batcher(model, 100, 1, 1)
        jobs = [batcher.submit([i], [100]) for i in range(5)]
        model.held = False
        model.gate.release(5)
        await asyncio.to_thread(batcher.close)
        return [np.ravel(await job.future).item() for job in jobs]

    assert asyncio.run(main()) == [0, 1, 4, 9, 16]
