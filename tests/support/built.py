"""What tests compile, once: kept in build/ under a hash of what it is made of, for every worker and the next run."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def built(folder: str, name: str, key: object, parts: Iterable[Path], make: Callable[[Path], None]) -> Path:
    """build/`folder`/`name`-<hash of `key` and of the contents of `parts`>, written by `make` where it is not there."""
    digest = hashlib.sha256(repr(key).encode())
    for part in parts:
        digest.update(part.read_bytes())
    home = ROOT / "build" / folder
    home.mkdir(parents=True, exist_ok=True)
    result = home / f"{name}-{digest.hexdigest()[:16]}"
    with open(home / f"{name}.lock", "w") as lock:  # pytest-xdist's workers want it at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            for old in home.glob(f"{name}-{'?' * 16}"):
                old.unlink()
            unfinished = home / f"{name}.unfinished"
            make(unfinished)
            os.replace(unfinished, result)
    return result
