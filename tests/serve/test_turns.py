"""Whose turn it is: small requests by their arrival, larger ones in turns of a batch, and neither waits for ever."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
from test_batching import Model, begun, drive

from fastbert.serve.batching import Batcher


def turns(program, budget: int = 100) -> list[list[str]]:
    """The batches that `program(submit, take)` takes one by one, as names of their sequences; nothing is computed."""
    found: list[list[str]] = []

    async def main() -> None:
        batcher = Batcher(lambda sequences: sequences, budget, 0, 1)

        def submit(name: str, *lengths: int):
            return batcher.submit([f"{name}{i}" for i in range(len(lengths))], list(lengths))

        def take(times: int = 1) -> None:
            for _ in range(times):
                found.append([piece.job.sequences[piece.position] for piece in batcher._next()])

        program(submit, take)
        assert (batcher.waiting, batcher.waiting_tokens) == (0, 0)

    asyncio.run(main())
    return found


def test_small_requests_share_batches_by_their_arrival():
    def program(submit, take):
        submit("a", 30, 30)
        submit("b", 30)
        submit("c", 20)
        take(2)

    assert turns(program) == [["a0", "a1", "b0"], ["c0"]]


def test_a_small_request_waits_for_no_turn_of_a_large_one_that_is_not_begun():
    def program(submit, take):
        submit("L", *[50] * 8)
        take(2)
        submit("s", 10)
        take(3)

    assert turns(program) == [["L0", "L1"], ["L2", "L3"], ["s0"], ["L4", "L5"], ["L6", "L7"]]


def test_small_requests_that_came_before_a_large_one_are_before_it():
    def program(submit, take):
        submit("a", 60)
        submit("b", 60)
        submit("L", *[50] * 4)
        submit("c", 60)
        take(5)

    assert turns(program) == [["a0"], ["b0"], ["L0", "L1"], ["c0"], ["L2", "L3"]]


def test_large_requests_take_turns():
    def program(submit, take):
        submit("L", *[50] * 5)
        submit("M", *[100] * 2)
        submit("N", 40, 40, 40)
        take(7)

    # A turn that ends a request is filled up by the next one's.
    assert turns(program) == [["L0", "L1"], ["M0"], ["N0", "N1"], ["L2", "L3"], ["M1"], ["N2", "L4"], []]


def test_who_sends_small_requests_all_the_time_does_not_hold_up_a_large_one():
    """Between two of its turns those have theirs that waited at the first: here two batches of three."""

    def program(submit, take):
        submit("L", *[60] * 3)
        take()
        for i in range(6):
            submit("abcdef"[i], 30)
        for i in range(6):
            take()
            submit("uvwxyz"[i], 30)
        take(4)

    assert turns(program) == [
        ["L0"],
        ["a0", "b0", "c0"],
        ["L1"],
        ["d0", "e0", "f0"],
        ["u0", "v0", "w0"],
        ["L2"],
        ["x0", "y0"],
        ["z0"],
        [],
        [],
        [],
    ]


def test_large_requests_of_those_who_have_gone_are_left_out():
    def program(submit, take):
        gone = submit("L", *[50] * 8)
        submit("M", 60, 60)
        take()
        gone.future.cancel()
        take(3)

    assert turns(program) == [["L0", "L1"], ["M0"], ["M1"], []]


def test_the_spare_thread_takes_small_requests_while_all_others_are_on_large_ones():
    model = Model(held=True)

    async def program():
        batcher = Batcher(model, 100, 2, 1, spare=True)
        large = batcher.submit([1, 2, 3, 4], [80] * 4)
        await begun(model)
        await begun(model)
        small = batcher.submit([5], [10])
        await begun(model)  # while both workers are held
        assert sorted(model.batches) == [[1], [2], [5]]
        model.held = False
        model.gate.release(100)
        found = [np.ravel(await job.future).tolist() for job in (large, small)]
        await asyncio.to_thread(batcher.close)
        return found

    assert asyncio.run(program()) == [[1, 4, 9, 16], [25]]


def test_the_spare_thread_leaves_small_requests_to_the_others():
    model = Model(held=True)

    async def program(batcher):
        batcher._threads.append(spare := threading.Thread(target=batcher._work, args=(batcher._take_spare, 1)))
        spare.start()
        jobs = [batcher.submit([1], [100])]
        await begun(model)
        jobs.append(batcher.submit([2], [100]))
        assert batcher.waiting == 1 and batcher._on_large == 0
        model.gate.release(2)
        return [np.ravel(await job.future).item() for job in jobs]

    assert drive(model, 100, program) == [1, 4]
