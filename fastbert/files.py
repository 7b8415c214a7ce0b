"""Files and folders that are replaced whole or not at all, even if the writer is killed or the power fails.

What fastbert writes for somebody to read later is written beside its place, made durable, and then renamed. And JSON
that users may have edited, read with one clear error.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import platform
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PARTIAL = ".partial"  # how the names of unfinished files end; they begin with a dot


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """The path of an empty file to write, which takes `path`'s place at the end. Raises OSError.

    An error removes the new file. What a killed process has left is removed by the next writer of `path` on the same
    machine. Of several writers at once, the last to end has written it.
    """
    try:
        _remove_left(path)
        new, descriptor = _created(path)
        try:
            yield new
            move(new, path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
        finally:
            _unlock(descriptor)
    except OSError as error:
        if _is_of(error.filename, path):  # which the caller does not know
            raise OSError(error.errno, error.strerror, str(path)) from None
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


def _start(path: Path) -> str:
    """How the names of `path`'s unfinished files begin, on this machine: others have locks of their own."""
    return f".{path.name}.{platform.node()}."


def _is_of(name: object, path: Path) -> bool:
    return isinstance(name, str) and Path(name).name.startswith(_start(path)) and name.endswith(PARTIAL)


def _created(path: Path) -> tuple[Path, int]:
    """A new file beside `path`, locked as long as this process writes it."""
    while True:
        new = path.with_name(f"{_start(path)}{uuid.uuid4().hex[:12]}{PARTIAL}")
        descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        _lock(descriptor)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(new), os.fstat(descriptor)):
                return new, descriptor
        os.close(descriptor)  # another process has taken it for a dead one's, before it was locked


def _remove_left(path: Path) -> None:
    for left in path.parent.glob(f"{glob.escape(_start(path))}*{PARTIAL}"):
        with suppress(FileNotFoundError):  # its writer is done, or another process has removed it
            descriptor = os.open(left, os.O_RDWR)
            if _lock(descriptor):
                left.unlink(missing_ok=True)
            _unlock(descriptor)


def _lock(descriptor: int) -> bool:
    """Whether no other process has it now; False, too, on a file system without locks, as some network ones are."""
    import fcntl  # here: it is POSIX's, and reading needs none of it

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _unlock(descriptor: int) -> None:
    """Also for a process that was forked meanwhile, and has the descriptor, too: closing it would not do that."""
    import fcntl

    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


# --------------------------------------------------------------------------------------------------------------------
# JSON of files that users may have edited: one clear error for whatever is wrong with it


def read_json(path: Path, error: type[ValueError], expected: type = dict) -> Any:
    """A JSON object, or list. Raises `error`, naming the file, where it is absent, damaged or not that."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise error(f"{path} does not exist") from None
    except (OSError, ValueError) as reason:  # ValueError: a path that cannot be one
        raise error(f"{path} cannot be read: {reason}") from None
    return parse_json(content, path, error, expected)


def parse_json(content: bytes | str, source: Any, error: type[ValueError], expected: type = dict) -> Any:
    """A JSON object, or list, from its text. Raises `error`, naming its `source`, for anything else."""
    try:
        entries = json.loads(content if isinstance(content, str) else content.decode("utf-8"))
    except ValueError as reason:  # of JSON, of UTF-8, and of an integer of thousands of digits
        raise error(f"{source} is not valid JSON: {reason}") from None
    except RecursionError:
        raise error(f"{source} is not valid JSON: its brackets are nested too deeply") from None
    if not isinstance(entries, expected):
        raise error(f"{source} holds a {type(entries).__name__}, not a {expected.__name__}")
    return entries
