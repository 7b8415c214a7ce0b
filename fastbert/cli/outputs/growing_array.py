"""A .npy that grows row by row, and that a kill does not lose.

OUT.npy.partial grows chunk by chunk; OUT.npy.progress says how many of its rows are whole and from what they were made.
The rows are on the disk before the note that counts them, so a run that starts again trusts the note and goes on there.
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
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastbert.cli.parser import UsageError
from fastbert.files import move, sync, write_text

if TYPE_CHECKING:
    import numpy as np

COMMIT_S = 1.0  # two fsyncs a chunk would stall a GPU, which is done with one in milliseconds


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
        cls, output: Path, shape: tuple[int, int], identity: dict[str, Any], force: bool, more: int = 0
    ) -> Iterator[GrowingArray]:
        """The array for `output`, taken up where an earlier run with the same identity left it. `more`: bytes that are
        written beside it in the end.

        What was appended is kept when the block is left by an error, Ctrl-C included. Raises UsageError when another
        run is writing it, when the earlier run was of another identity and not `force`, or when the disk is too full.
        """
        partial, _ = _beside(output)
        missing = 4 * shape[0] * shape[1] + more - (partial.stat().st_size if partial.exists() else 0)
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
        sync(self.partial)
        try:
            write_text(self.progress, json.dumps({"identity": self.identity, "rows": self.rows}))
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.progress)) from None
        self.committed_rows, self.committed_at = self.rows, time.monotonic()

    def check_whole(self) -> None:
        """Raises UsageError if not all rows are there: the source has changed."""
        if self.rows != self.shape[0]:
            raise UsageError(f"the input changed while it was read: {self.rows} texts now, {self.shape[0]} at first")
        self._commit()

    def finish(self) -> None:
        """Check that all rows are there and give the file its name. Raises UsageError if the source has changed."""
        self.check_whole()
        move(self.partial, self.output)  # the new name is on the disk before the note goes
        self.progress.unlink(missing_ok=True)

    def finish_as_rows(self, write: Callable[[np.ndarray], None]) -> None:
        """The same for an output that is no .npy, but what `write` makes of the whole array."""
        import numpy as np

        self.check_whole()
        write(np.load(self.partial, mmap_mode="r"))
        self.partial.unlink()
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


def fingerprint(folder: Path) -> str:
    """Of the names, sizes and times of a model's files."""
    kinds = (".json", ".txt", ".safetensors", ".bin")
    files = sorted(path for path in folder.rglob("*") if path.suffix in kinds and path.is_file())
    stats = [(str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(repr(stats).encode()).hexdigest()[:16]
