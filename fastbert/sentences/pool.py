"""Several processes, each with a copy of a model on a device of its own, that share the work of one call."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from fastbert.errors import InputError
from fastbert.native.cores import usable_threads

if TYPE_CHECKING:
    from fastbert.sentences.text_model import InferenceOptions, TextModel

LARGEST_CHUNK = 5000  # texts; sentence-transformers' own
CHUNKS_PER_WORKER = 10  # so that workers end at about the same time


class ProcessPool:
    """Workers that run until `close`, or the end of a `with`."""

    def __init__(self, model: TextModel, devices: list[str | torch.device]):
        if not devices:
            raise InputError("a pool needs at least one device")
        import multiprocessing  # here: few need them
        from concurrent.futures import ProcessPoolExecutor

        context = multiprocessing.get_context("spawn")  # a fork of a process with threads, or with a GPU, hangs
        waiting = context.SimpleQueue()
        for device in devices:
            waiting.put(str(device))
        on_cpu = sum(torch.device(device).type == "cpu" for device in devices)
        threads = max(1, usable_threads() // max(1, on_cpu))
        sent = model if model.device.type == "cpu" else copy.deepcopy(model).to("cpu")
        self.workers = len(devices)
        self._executor = ProcessPoolExecutor(self.workers, context, _start, (sent, waiting, threads))

    def rows(
        self, inputs: list[Any], options: InferenceOptions, chunk_size: int | None = None
    ) -> Iterator[tuple[int, Any]]:
        """(how many inputs, their rows) for one chunk after the other, in order."""
        if chunk_size is not None and chunk_size < 1:
            raise InputError(f"chunk_size is {chunk_size}; it must be at least 1")
        size = chunk_size or max(1, min(math.ceil(len(inputs) / self.workers / CHUNKS_PER_WORKER), LARGEST_CHUNK))
        chunks = [inputs[start : start + size] for start in range(0, len(inputs), size)]
        results = self._executor.map(_run, chunks, [options] * len(chunks))
        for chunk, rows in zip(chunks, results, strict=True):
            yield len(chunk), _tensor(rows)

    def close(self) -> None:
        self._executor.shutdown(cancel_futures=True)

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


_model: TextModel | None = None  # of a worker


def _start(model: TextModel, waiting: Any, threads: int) -> None:
    global _model
    device = torch.device(waiting.get())
    if device.type == "cpu":
        torch.set_num_threads(threads)
    _model = model.to(device)


def _run(inputs: list[Any], options: InferenceOptions) -> Any:
    assert _model is not None
    found: Any = _model.rows(inputs, options)
    if not isinstance(found, torch.Tensor):  # a MultiVectorEncoder's
        packed = found.to("cpu")
        return packed.vectors.numpy(), packed.cu_seqlens.numpy()
    rows = found.cpu()
    # NumPy travels through the pipe; a tensor would be a file of shared memory for each chunk.
    return (rows.indices().numpy(), rows.values().numpy(), tuple(rows.shape)) if rows.is_sparse else rows.numpy()


def _tensor(rows: Any) -> Any:
    if not isinstance(rows, tuple):
        return torch.from_numpy(rows)
    if len(rows) == 2:
        from fastbert.sentences.multi_vector.vectors import TokenVectors

        return TokenVectors(*map(torch.from_numpy, rows))
    indices, values, shape = rows
    where, what = torch.from_numpy(indices), torch.from_numpy(values)
    return torch.sparse_coo_tensor(where, what, shape, is_coalesced=True, check_invariants=False)
