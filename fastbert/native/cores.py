"""How many threads this process should use: no more than its affinity, its cgroup's quota and torch's own number.

torch counts the cores of the affinity. A container's quota is time, not cores: with more threads than it has CPUs, all
of them are stopped together for most of each period.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Cores(NamedTuple):
    """affinity: cores that the process may run on. quota: CPUs of its cgroups, the least of them; None: no limit.
    unreadable: why the quota is not known.
    """

    affinity: int
    quota: float | None = None
    unreadable: str | None = None

    @property
    def usable(self) -> int:
        """A quota is rounded up, and below one CPU it is one."""
        return self.affinity if self.quota is None else max(1, min(self.affinity, math.ceil(self.quota)))

    def __str__(self) -> str:
        if self.unreadable:
            return f"affinity {self.affinity}, quota not known ({self.unreadable})"
        return f"affinity {self.affinity}, " + ("no quota" if self.quota is None else f"quota {self.quota:g} CPUs")


def cores(root: str = "/") -> Cores:
    """Of this process. root: where the files of the system are."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        return Cores(affinity, min(_quotas(Path(root)), default=None))
    except (OSError, ValueError, IndexError) as error:
        return Cores(affinity, unreadable=f"{type(error).__name__}: {error}")


def usable_threads() -> int:
    """Of torch's threads, those that the process should use."""
    import torch

    return min(torch.get_num_threads(), cores().usable)


def keep_to_quota() -> None:
    """Give torch no more threads than the quota has, whether it is imported yet or not. For the command line."""
    found = cores()
    if found.usable == found.affinity:
        return
    import sys

    given = os.environ.get("OMP_NUM_THREADS", "")
    if not given.isdecimal() or int(given) > found.usable:
        os.environ["OMP_NUM_THREADS"] = str(found.usable)
    os.environ.setdefault("RAYON_NUM_THREADS", str(found.usable))  # the tokenizer's
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(usable_threads())


def warn_of_quota() -> None:
    """Once, of a process whose torch has more threads than the quota: they would wait for each other."""
    import torch

    found = cores()
    if found.quota is not None and torch.get_num_threads() > found.usable:
        warnings.warn(
            f"torch has {torch.get_num_threads()} threads, but this process's quota is {found.quota:g} CPUs: all"
            f" threads are stopped for most of the time. Call torch.set_num_threads({found.usable}) first.",
            stacklevel=2,
        )


def _quotas(root: Path) -> Iterator[float]:
    """Of each cgroup that limits the process: its own, and those around it."""
    if not (root / "proc/self/cgroup").exists():
        return  # not Linux
    groups = {}  # the path by what it is of: "cpu" in version 1, "" in version 2
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        groups.update(dict.fromkeys(controllers.split(","), path))
    for line in (root / "proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ")[:3]
        group = groups.get("") if kind == "cgroup2" else groups.get("cpu") if "cpu" in options.split(",") else None
        if not kind.startswith("cgroup") or group is None:
            continue
        top, mount = before.split(" ")[3:5]  # which part of the tree is mounted, and where
        inside = group[len(top.rstrip("/")) :] if group.startswith(top) else "/"
        folder = root / mount.lstrip("/")
        here = folder / inside.strip("/")
        for each in (here, *here.parents):
            if (limit := _limit(each)) is not None:
                yield limit
            if each == folder:
                break


def _limit(folder: Path) -> float | None:
    """CPUs; None where the cgroup has no limit."""
    if (folder / "cpu.max").exists():
        limit, period = (folder / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    if not (folder / "cpu.cfs_quota_us").exists():
        return None
    quota = int((folder / "cpu.cfs_quota_us").read_text())
    return None if quota < 0 else quota / int((folder / "cpu.cfs_period_us").read_text())
