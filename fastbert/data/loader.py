"""Batches of an epoch as they are read: by this process, or by others that make them ahead."""

from __future__ import annotations

import signal
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, Dataset

from fastbert.data.batches import KeyedDataset, StepSampler

PREFETCHED = 4
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
) -> DataLoader:
    """A DataLoader over a rank's batches of an epoch. What it gives is the same for any number of `workers`. A batch
    without examples has the fields of one, and no sequence.
    """
    return DataLoader(
        _Batches(dataset_of(examples, sampler, collate), collate),
        sampler=sampler,
        batch_size=None,
        collate_fn=_as_it_is,
        num_workers=workers,
        pin_memory=pin_memory,
        prefetch_factor=PREFETCHED if workers else None,
        worker_init_fn=_leave_interrupts if workers else None,
    )


class _Batches(Dataset):
    """Makes a batch, an empty one too, in a worker."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]):
        self.dataset, self.collate = dataset, collate

    def __getitem__(self, indices: list[int]) -> Any:
        fetch = getattr(self.dataset, "__getitems__", None)  # `datasets` reads many at once much faster
        if not indices:
            return self.collate([self.dataset[0]]).without_sequences()
        return self.collate([self.dataset[i] for i in indices] if fetch is None else fetch(indices))


def _as_it_is(batch: Any) -> Any:
    return batch


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
    except Exception as error:  # a loader raises what its data set does
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
