"""`fastbert encode`: turns a file of texts into a .npy of vectors. A run that is killed can be continued.

OUT.npy.partial grows chunk by chunk. OUT.npy.progress, the note, says how many of its rows are complete and from what
they were made. The rows are on the disk before the note that counts them, so the next run trusts the note and continues
there. Chunks depend on the texts alone: a continued run writes the same bits as a run without a stop.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastbert.cli import raise_if_stopped
from fastbert.cli.texts import UsageError, read_texts

if TYPE_CHECKING:
    import numpy as np

    from fastbert.sentences import SentenceEncoder

CHUNK_TEXTS = 1024  # what a kill can cost at most, beside COMMIT_S
COMMIT_S = 1.0  # two fsyncs a chunk would stall a GPU, which is done with one in milliseconds


@dataclass(frozen=True)
class Job:
    """The arguments of one `fastbert encode`."""

    source: Path
    output: Path
    model: str
    column: str | None
    dtype: str
    device: str | None
    batch_tokens: int | None
    force: bool


def encode_file(job: Job, say: Callable[[str], None]) -> str:
    """Encode `job.source` into `job.output`; returns a one-line summary. `say` shows the user a line meanwhile.

    Raises UsageError, before anything is written, for a source or an output that cannot be had; the errors of
    SentenceEncoder.from_pretrained; OSError.
    """
    _check_output(job)
    total = _count_texts(job)

    import torch

    from fastbert.sentences import SentenceEncoder

    raise_if_stopped()
    encoder = SentenceEncoder.from_pretrained(job.model, dtype=job.dtype, device=job.device)
    batch_tokens = encoder.default_batch_tokens if job.batch_tokens is None else job.batch_tokens
    identity = _identity(job, encoder, total, batch_tokens)
    with GrowingArray.open(job.output, (total, encoder.dim), identity, job.force) as array:
        done_before, tokens, start = array.rows, 0, time.perf_counter()
        if done_before:
            say(f"{done_before:,} of {total:,} texts were encoded before: going on from there")
        try:
            tokens = _encode_into(array, encoder, job, batch_tokens)
        except KeyboardInterrupt:
            say(f"stopped; the same command goes on with what {array.partial} has")
            raise
        except torch.OutOfMemoryError:
            raise UsageError(f"the GPU's memory is too small for --batch-tokens {batch_tokens}: choose fewer") from None
        seconds = time.perf_counter() - start
        array.finish()
    rate = f", {tokens:,} tokens in {seconds:.1f} s, {tokens / seconds:,.0f} tokens/s" if tokens else ""
    return f"{total - done_before:,} texts{rate} -> {job.output} float32 ({total}, {encoder.dim})"


def _encode_into(array: GrowingArray, encoder: SentenceEncoder, job: Job, batch_tokens: int) -> int:
    """Encode the texts that the array has no rows for yet; returns how many tokens they had."""
    from fastbert.sentences import progress_bar

    texts = islice(read_texts(job.source, job.column), array.rows, None)
    tokens = 0
    with progress_bar(array.shape[0], None, initial=array.rows) as bar:
        for vectors, count in encoder.encode_stream(texts, batch_tokens=batch_tokens, chunk_texts=CHUNK_TEXTS):
            array.append(vectors)
            raise_if_stopped()
            tokens += count
            bar.update(len(vectors))
    return tokens


def _check_output(job: Job) -> None:
    folder = job.output.parent
    if job.output.suffix != ".npy":
        raise UsageError(f"--output {job.output}: the name must end in .npy")
    if not folder.is_dir():
        raise UsageError(f"--output {job.output}: {folder} is not a folder")
    if job.output.is_dir():
        raise UsageError(f"--output {job.output} is a folder")
    if job.output.exists() and not job.force:
        raise UsageError(f"{job.output} exists already; --force replaces it")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"--output {job.output}: no right to write into {folder}")


def _count_texts(job: Job) -> int:
    """Reads the file once, which checks every text before anything is written, and gives the array's height."""
    if not job.source.exists():
        raise UsageError(f"{job.source} does not exist")
    if not job.source.is_file():
        raise UsageError(f"{job.source} is not a file")
    total = sum(1 for _ in read_texts(job.source, job.column))
    if total == 0:
        raise UsageError(f"{job.source} holds no texts")
    return total


def _identity(job: Job, encoder: SentenceEncoder, total: int, batch_tokens: int) -> dict[str, Any]:
    """What the vectors depend on; rows of one identity may stand in one file."""
    from fastbert import __version__
    from fastbert.checkpoint.pretrained import resolve
    from fastbert.quantization import is_quantized

    stat = job.source.stat()
    return {
        "input": str(job.source.resolve()),
        "input size": stat.st_size,
        "input time": stat.st_mtime_ns,
        "column": job.column,
        "texts": total,
        "dim": encoder.dim,
        "model": str(resolve(job.model).resolve()),
        "model files": _fingerprint(resolve(job.model)),
        "dtype": "int8" if is_quantized(encoder.model) else str(encoder.dtype).removeprefix("torch."),
        "device": str(encoder.device),
        "batch tokens": batch_tokens,
        "fastbert": __version__,
    }


def _fingerprint(folder: Path) -> str:
    """Of the names, sizes and times of a model's files."""
    kinds = (".json", ".txt", ".safetensors", ".bin")
    files = sorted(path for path in folder.rglob("*") if path.suffix in kinds and path.is_file())
    stats = [(str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(repr(stats).encode()).hexdigest()[:16]


class GrowingArray:
    """A float32 .npy file that is written row by row. `rows` are in it; `finish` gives it its name."""

    def __init__(self, output: Path, shape: tuple[int, int], identity: dict[str, Any], fd: int):
        self.output, self.shape, self.identity, self.fd = output, shape, identity, fd
        self.partial, self.progress = _beside(output)
        self.rows = self.committed_rows = 0
        self.committed_at = -math.inf  # the first chunk is committed at once
        self.header = _npy_header(shape)

    @classmethod
    @contextmanager
    def open(
        cls, output: Path, shape: tuple[int, int], identity: dict[str, Any], force: bool
    ) -> Iterator[GrowingArray]:
        """The array for `output`, taken up where an earlier run with the same identity left it.

        What was appended is kept when the block is left by an error, Ctrl-C included. Raises UsageError when another
        run is writing it, when the earlier run was of another identity and not `force`, or when the disk is too full.
        """
        partial, _ = _beside(output)
        missing = 4 * shape[0] * shape[1] - (partial.stat().st_size if partial.exists() else 0)
        free = shutil.disk_usage(output.parent).free
        if missing > free:
            raise UsageError(f"{output} needs {missing / 1e6:,.1f} MB more; the disk has {free / 1e6:,.1f} MB")
        fd = os.open(partial, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"{partial} is being written by another process") from None
            if not partial.exists() or partial.stat().st_ino != os.fstat(fd).st_ino:
                raise UsageError(f"{output} was finished by another process just now")
            array = cls(output, shape, identity, fd)
            try:
                array._take_up(force)
                try:
                    yield array
                finally:
                    array._commit()
            except BaseException:
                if os.fstat(fd).st_size <= len(array.header):  # nothing to go on from
                    partial.unlink()
                raise
        finally:
            os.close(fd)

    def _take_up(self, force: bool) -> None:
        row_bytes = 4 * self.shape[1]
        try:
            note = json.loads(self.progress.read_text())
            rows, identity = int(note["rows"]), dict(note["identity"])
        except FileNotFoundError:
            rows, identity = 0, {}
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{self.progress} is damaged ({error!r}): delete it to start again") from None
        if os.fstat(self.fd).st_size < len(self.header) + rows * row_bytes:
            rows = 0  # the note has outlived its rows
        if rows and identity == self.identity:
            self.rows = self.committed_rows = rows
        elif rows and not force:
            difference = _difference(identity, self.identity)
            raise UsageError(f"{self.partial} was begun with {difference}; --force starts again")
        if self.rows:
            os.ftruncate(self.fd, len(self.header) + self.rows * row_bytes)
            os.lseek(self.fd, 0, os.SEEK_END)
        else:
            self.progress.unlink(missing_ok=True)  # before the rows that it counts
            os.ftruncate(self.fd, 0)
            self._write(self.header)

    def append(self, vectors: np.ndarray) -> None:
        """Add float32 (texts, dim) rows."""
        self._write(vectors.astype("<f4", copy=False).tobytes())
        self.rows += len(vectors)
        if time.monotonic() - self.committed_at >= COMMIT_S:
            self._commit()

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self.fd, view) :]
        except OSError as error:  # a full disk, a quota: of which file, os.write does not say
            raise OSError(error.errno, error.strerror, str(self.partial)) from None

    def _commit(self) -> None:
        """Rows first, then the note that counts them: each on the disk before the next begins."""
        if self.rows == self.committed_rows:
            return
        os.fsync(self.fd)
        beside = self.progress.with_name(self.progress.name + ".new")
        try:
            with beside.open("w") as file:
                json.dump({"identity": self.identity, "rows": self.rows}, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, self.progress)
        except OSError as error:
            beside.unlink(missing_ok=True)
            raise OSError(error.errno, error.strerror, str(self.progress)) from None
        self.committed_rows, self.committed_at = self.rows, time.monotonic()

    def finish(self) -> None:
        """Check that all rows are there and give the file its name. Raises UsageError if the source has changed."""
        if self.rows != self.shape[0]:
            raise UsageError(f"the input changed while it was read: {self.rows} texts now, {self.shape[0]} at first")
        self._commit()
        os.replace(self.partial, self.output)
        folder = os.open(self.output.parent, os.O_RDONLY)
        os.fsync(folder)  # the new name is on the disk before the note goes
        os.close(folder)
        self.progress.unlink(missing_ok=True)


def _beside(output: Path) -> tuple[Path, Path]:
    """Where the growing file and the note are."""
    return output.with_name(output.name + ".partial"), output.with_name(output.name + ".progress")


def _npy_header(shape: tuple[int, int]) -> bytes:
    import numpy as np

    header = BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return header.getvalue()


def _difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """'another model (a, now b), ...' of what two identities disagree in."""
    return ", ".join(f"another {name} ({old.get(name)}, now {new[name]})" for name in new if old.get(name) != new[name])
