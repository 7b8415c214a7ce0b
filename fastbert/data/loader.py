"""Batches of an epoch as they are read: by this process, or by others that make them ahead."""

from __future__ import annotations

import signal
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader

from fastbert.data.batches import KeyedDataset, StepSampler

END_S = 1.0  # the system tells of a process's end later than its connections do


def dataset_of(examples: Sequence[Any], sampler: StepSampler, collate: Any) -> Any:
    """What `collate` gets examples from: one that masks (`collate.masking`) gets each one's key, see KeyedDataset."""
    is_masked = getattr(collate, "masking", None) is not None
    return KeyedDataset(examples, sampler.steps.seed or 0, sampler.epoch) if is_masked else examples


def make_loader(
    examples: Sequence[Any],
    sampler: StepSampler,
    collate: Any,
    *,
    workers: int = 0,
    pin_memory: bool = False,
    finish: Callable[[Any], Any] | None = None,
) -> DataLoader:
    """A DataLoader over a rank's batches of an epoch. What it gives is the same for any number of `workers`. A batch
    without examples has the fields of one, and no sequence. `finish`: what is done to each batch behind `collate`.
    """
    dataset = dataset_of(examples, sampler, collate)
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=_Collate(dataset, collate, finish),
        num_workers=workers,
        pin_memory=pin_memory,
        prefetch_factor=4 if workers else None,
        worker_init_fn=_leave_interrupts if workers else None,
    )


class _Collate:
    """Makes a batch, an empty one too, in a worker."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], finish: Callable[[Any], Any] | None):
        self.dataset, self.collate, self.finish = dataset, collate, finish

    def __call__(self, examples: list[Any]) -> Any:
        made = self.collate(examples) if examples else self.collate([self.dataset[0]]).without_sequences()
        return made if self.finish is None else self.finish(made)


def _leave_interrupts(worker: int) -> None:
    """A Ctrl-C goes to all processes of a terminal: the training process says what becomes of a run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class WorkerKilled(RuntimeError):
    """A process of a DataLoader was killed."""


def read(loader: DataLoader) -> Generator[Any]:
    """The loader's batches. Close it when no more are wanted.

    torch's handler of SIGCHLD raises that a worker was killed wherever the main thread happens to be: while it writes a
    checkpoint, or in a kernel that calls Python and can say only that the call failed. Here that waits for the next
    batch.

    Raises WorkerKilled: a worker was killed. The others have ended by then.
    """
    batches = iter(loader)
    handler: Any = signal.getsignal(signal.SIGCHLD)
    waits = loader.num_workers and callable(handler) and threading.current_thread() is threading.main_thread()
    waiting, is_reading = list[int](), False

    def note(number: int, frame: Any) -> None:
        if is_reading:
            handler(number, frame)
        else:
            waiting.append(number)

    try:
        if waits:
            signal.signal(signal.SIGCHLD, note)
        while True:
            is_reading = True
            while waiting:
                handler(waiting.pop(), None)
            batch = _next_of(batches, loader.num_workers)
            is_reading = False
            if batch is None:
                return
            yield batch
    except Exception as error:
        is_reading = False
        # The workers end with the iterator, which the error's frames hold. Left to Python's collector, torch would wait
        # five seconds for them: the collector closes the queue that is to tell them first.
        traceback.clear_frames(error.__traceback__)
        del batches
        # What a worker itself raises begins with "Caught".
        if not isinstance(error, RuntimeError) or not str(error).startswith("DataLoader worker"):
            raise
        raise WorkerKilled(str(error)) from None
    finally:
        if waits:
            signal.signal(signal.SIGCHLD, handler)


def _next_of(batches: Iterator[Any], workers: int) -> Any:
    """The next batch; None at the end."""
    try:
        return next(batches, None)
    except (EOFError, ConnectionError) as error:
        if not workers or str(error).startswith("Caught"):
            raise
        # A worker was killed while a batch was on the way from it, and torch does not know yet. Its handler will.
        time.sleep(END_S)
        raise RuntimeError("DataLoader worker ended while a batch was read from it") from error
