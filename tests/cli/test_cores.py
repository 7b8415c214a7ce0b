"""How many threads a process should use: its affinity, the quotas of its cgroups, torch's own number."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
import warnings
from pathlib import Path

import pytest
import torch
from command_line import ENVIRONMENT

from fastbert.native import cores as module
from fastbert.native.cores import Cores, cores, keep_to_quota, usable_threads, warn_of_quota

V1, V2 = Path("sys/fs/cgroup/cpu"), Path("sys/fs/cgroup")
MOUNT_V1 = "33 31 0:30 {top} /sys/fs/cgroup/cpu rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct"
MOUNT_V2 = "30 23 0:26 {top} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"


def machine(root: Path, group: str, mount: str, limits: dict[str, str], top: str = "/") -> str:
    """A tree of the system's files under `root`; limits: what the files of cgroups hold, by their paths."""
    files = {
        "proc/self/cgroup": f"4:memory:/elsewhere\n{group}\n",
        "proc/self/mountinfo": mount.format(top=top),
        **limits,
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return str(root)


def v1(quota: int, folder: str = "") -> dict[str, str]:
    return {f"{V1 / folder}/cpu.cfs_quota_us": f"{quota}\n", f"{V1 / folder}/cpu.cfs_period_us": "100000\n"}


def v2(limit: str, folder: str = "") -> dict[str, str]:
    return {f"{V2 / folder}/cpu.max": f"{limit}\n"}


@pytest.mark.parametrize(
    "group, mount, limits, top, quota",
    (
        ("0::/", MOUNT_V2, {}, "/", None),  # no limit in the root's own cgroup, which has no file
        ("0::/", MOUNT_V2, v2("150000 100000"), "/", 1.5),  # of a container with a cgroup namespace
        ("0::/a/b", MOUNT_V2, {**v2("max 100000", "a/b"), **v2("50000 100000", "a")}, "/", 0.5),  # of a cgroup around
        ("0::/a/b", MOUNT_V2, {**v2("100000 100000", "a/b"), **v2("400000 100000", "a")}, "/", 1.0),
        ("0::/../..", MOUNT_V2, v2("200000 100000"), "/", 2.0),
        ("2:cpu,cpuacct:/", MOUNT_V1, v1(-1), "/", None),
        ("2:cpu,cpuacct:/docker/x", MOUNT_V1, v1(300000), "/docker/x", 3.0),  # the part of the tree that is mounted
        ("2:cpuacct,cpu:/a", MOUNT_V1, {**v1(-1), **v1(25000, "a")}, "/", 0.25),
    ),
)
def test_the_least_of_all_quotas_counts(tmp_path, group, mount, limits, top, quota):
    found = cores(machine(tmp_path, group, mount, limits, top))
    assert (found.quota, found.unreadable) == (quota, None)


@pytest.mark.parametrize(
    "affinity, quota, usable", ((4, None, 4), (4, 2.0, 2), (4, 1.5, 2), (4, 0.1, 1), (4, 100.0, 4), (1, 2.0, 1))
)
def test_a_quota_is_rounded_up(affinity, quota, usable):
    assert Cores(affinity, quota).usable == usable


def test_what_cannot_be_read_is_no_quota_and_said(tmp_path):
    root = machine(tmp_path, "0::/", MOUNT_V2, v2("many 100000"))
    found = cores(root)
    assert found.quota is None and found.usable == found.affinity
    assert str(found).endswith("quota not known (ValueError: invalid literal for int() with base 10: 'many')")
    assert cores(str(tmp_path / "nowhere")) == Cores(found.affinity)  # not Linux


@pytest.fixture
def one_cpu(monkeypatch):
    """A quota of one CPU for this process, which has two threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(module, "cores", lambda: Cores(2, 1.0))
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    yield
    torch.set_num_threads(threads)


def test_a_library_user_is_told(one_cpu):
    assert usable_threads() == 1
    message = r"torch has 2 threads, but this process's quota is 1 CPUs.*torch.set_num_threads\(1\)"
    with pytest.warns(UserWarning, match=message):
        warn_of_quota()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_quota()


def test_the_command_line_keeps_to_it(one_cpu):
    keep_to_quota()
    assert (torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]) == (1, "1")


def test_doctor_shows_all_three():
    environment = {**ENVIRONMENT, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "fastbert", "doctor"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120, check=False)
    [line] = [line for line in done.stdout.splitlines() if line.startswith("  threads ")]
    assert line.split(maxsplit=1)[1] == f"1 of {cores()}, torch 1"


@pytest.fixture
def cgroup():
    """A real one with a quota of one CPU; a visible skip where this machine lets none be made."""
    first = Path("/sys/fs/cgroup/cpu")  # of version 1
    folder = (first if first.exists() else first.parent) / f"fastbert-{uuid.uuid4().hex}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here ({error})")
    try:
        if (folder / "cpu.max").exists():
            (folder / "cpu.max").write_text("100000 100000")
        else:
            (folder / "cpu.cfs_quota_us").write_text("100000")
        yield folder
    except OSError as error:
        pytest.skip(f"no quota can be set here ({error})")
    finally:
        folder.rmdir()


def test_a_real_cgroup(cgroup):
    program = (
        "import os, pathlib, sys\n"
        "pathlib.Path(sys.argv[1], 'cgroup.procs').write_text(str(os.getpid()))\n"
        "sys.argv[1:] = ['doctor']\n"
        "from fastbert.cli import main\n"
        "main()\n"
    )
    words = [sys.executable, "-c", program, str(cgroup)]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False)
    [line] = [line for line in done.stdout.splitlines() if line.startswith("  threads ")] or [done.stderr]
    affinity = len(os.sched_getaffinity(0))
    assert line.split(maxsplit=1)[1] == f"1 of affinity {affinity}, quota 1 CPUs, torch 1"
