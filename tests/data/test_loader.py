"""Batches as a run reads them: a process that makes them and is killed is told of where the next one is asked for."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import closing
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import warm
from half_a_batch import HalfABatch
from new_processes import since_now

from fastbert.data.batches import Steps, StepSampler
from fastbert.data.loader import WorkerKilled, make_loader, read


def half_a_batch(examples):
    return HalfABatch()


def failing(examples):
    """What it reads the data from has gone."""
    raise ConnectionError("the data's server has gone")


def loader_of(collate, workers: int = 1):
    sampler = StepSampler(Steps(np.full(64, 2), 8), hidden_size=32)
    return make_loader([*range(64)], sampler, collate, workers=workers)


def test_a_killed_process_waits_for_the_next_batch():
    others, before = since_now(), signal.getsignal(signal.SIGCHLD)
    with closing(read(loader_of(list))) as batches:
        assert len(next(batches)) == 4
        (worker,) = others()
        os.kill(worker.pid, signal.SIGKILL)
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
        time.sleep(0.2)  # the signal has come, too
        with pytest.raises(WorkerKilled, match=r"DataLoader worker .*killed by signal"):
            list(batches)
    assert not others()
    if callable(before):  # torch sets its own once
        assert signal.getsignal(signal.SIGCHLD) is before


def test_a_process_killed_while_a_batch_is_read_from_it():
    with pytest.raises(WorkerKilled, match="DataLoader worker"):
        list(read(loader_of(half_a_batch)))


def read_to_the_end() -> None:
    try:
        list(read(loader_of(half_a_batch)))
    except WorkerKilled as error:
        sys.stdout.write(str(error))


# A process of its own: a fork drops what other threads keep for themselves. Where an earlier test has left a process
# group of DTensor there, its destructor waits for a thread that no fork has.
IN_A_THREAD = f"""
import sys, threading
sys.path[:0] = {[str(Path(__file__).parent), str(Path(warm.__file__).parent)]!r}
from test_loader import read_to_the_end
thread = threading.Thread(target=read_to_the_end)
thread.start()
thread.join()
"""


@pytest.mark.full  # it waits for torch's own look at its workers, every five seconds
def test_outside_of_the_main_thread():
    """Where torch sets no handler."""
    done = warm.run([sys.executable, "-c", IN_A_THREAD])
    assert "worker" in done.stdout and not done.returncode, done.stderr


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_data_stays_what_it_is(workers):
    others = since_now()
    with pytest.raises(ConnectionError, match="the data's server has gone") as caught:
        list(read(loader_of(failing, workers)))
    assert not others()  # although the error is still there
    del caught


@pytest.mark.parametrize("workers", [0, 2])
def test_closed_early_or_read_to_the_end(workers):
    others = since_now()
    with closing(read(loader_of(list, workers))) as batches:
        first = next(batches)
    whole = list(read(loader_of(list, workers)))
    assert whole[0] == first and sorted(chain(*whole)) == [*range(64)]
    assert not others()
