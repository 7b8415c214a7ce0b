"""Files and folders that are replaced whole or not at all, even if the writer is killed or the power fails.

All that fastbert writes for somebody to read later goes through this module: new content is written beside its place,
made durable, and then renamed.
"""

from __future__ import annotations

import errno
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """The path of an empty file to write, which takes `path`'s place at the end. Raises OSError.

    An error removes the new file. Processes that write the same path wait for each other; what a killed one has left,
    the next one writes over. Other machines, whose locks a network's file system may not have, use another name.
    """
    new = path.with_name(f".{path.name}.{platform.node()}.partial")
    try:
        with _alone(new):
            try:
                yield new
                move(new, path)
            except BaseException:
                new.unlink(missing_ok=True)
                raise
    except OSError as error:
        if error.filename == str(new):
            error.filename = str(path)  # which the caller knows
        raise


def write_text(path: Path, text: str) -> None:
    """Replace a file, in UTF-8. Raises OSError."""
    with writing(path) as new:
        new.write_text(text, encoding="utf-8")


def move(new: Path, path: Path) -> None:
    """Give a file or a folder, with all that is in it, its name on the same disk. Raises OSError."""
    for each in _below(new) if new.is_dir() else (new,):
        sync(each)
    rename(new, path)


def rename(new: Path, path: Path) -> None:
    """The same for what is on the disk already. Raises OSError."""
    os.replace(new, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():  # folders have no fsync everywhere
            raise
    finally:
        os.close(descriptor)


def _below(root: Path) -> Iterator[Path]:
    """All files and folders in `root`, each before the folder that it is in."""
    for at, _, names in os.walk(root, topdown=False):
        yield from (Path(at) / name for name in names)
        yield Path(at)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """The file is there and empty, and no other process of this machine is in here with it."""
    import fcntl  # here: it is POSIX's, and reading needs none of it

    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            with suppress(OSError):  # of a file system without locks, some network ones
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is(path, descriptor):
                os.ftruncate(descriptor, 0)
                yield
                return
        finally:  # which unlocks it
            os.close(descriptor)


def _is(path: Path, descriptor: int) -> bool:
    """Whether the file has this name still: who had the lock before has renamed or removed it."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
