"""What the process of a training run asks of malloc, and of the garbage collector."""

from __future__ import annotations

import gc
import platform
import re
import sys
from pathlib import Path

import collector
import pytest
import warm

from fastbert.importing import collector_spares_what_is_there

PROGRAM = """
import resource

import torch
from fastbert.training.memory import keep_freed_memory


def faults(size):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensor = torch.empty(size).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, tensor


keep_freed_memory()
faults(2**24)
again, tensor = faults(2**24)
print(again, tensor.data_ptr())
print(open("/proc/self/smaps").read())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc is told")
@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="this kernel has no such pages")
def test_freed_memory_stays_and_lies_in_huge_pages():
    """Of /proc/self/smaps, proc(5): the heap is marked `hg`, whether or not the kernel has such pages at the moment."""
    run = warm.run([sys.executable, "-c", PROGRAM])
    first, areas = run.stdout.split("\n", 1)
    faults, address = map(int, first.split())
    assert faults < 1000  # 64 MB are 16,000 pages
    for area in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", areas):
        begin, end = (int(place, 16) for place in area.split(maxsplit=1)[0].split("-"))
        if begin <= address < end:
            (flags,) = re.findall(r"^VmFlags: (.*)", area, re.MULTILINE)
            assert "hg" in flags.split()
            return
    raise AssertionError(f"no area holds {address}")


def test_the_collector_looks_at_what_is_new_alone(monkeypatch):
    monkeypatch.setattr(gc, "unfreeze", collector.thaw)
    older: list[object] = [[]]

    def is_looked_at(thing: object) -> bool:
        return any(thing is other for other in gc.get_objects())

    assert is_looked_at(older)
    with collector_spares_what_is_there():
        newer: list[object] = [[]]
        assert is_looked_at(newer) and not is_looked_at(older)
    assert is_looked_at(newer) and is_looked_at(older)
    collector.spare_what_is_there()  # again, for the tests that follow
