"""What the compiler's intermediate code tells of copies into shared memory that run beside the products."""

from __future__ import annotations

import re


def copies_before_reads_end(llir: str) -> list[str]:
    """The asynchronous copies of every loop, one iteration after another, into shared memory that some thread may not
    have read to the end: no barrier stands between. A buffer is known by its offset from the beginning of all."""
    lines = [line.strip() for line in llir.splitlines()]
    labels = {line.split(":")[0]: i for i, line in enumerate(lines) if re.match(r"[\w.]+:", line)}
    pointer = r"ptr addrspace\(3\) (?:nonnull )?(getelementptr [^)]*\([^)]*\) @\w+, i32 (?P<base>\d+)\)|[%@][\w.]+)"
    bases = {"@global_smem": "0"}

    def base_of(line: str) -> str:
        found = re.search(pointer, line)
        assert found is not None, line
        return found.group("base") or bases.get(found.group(1), found.group(1))

    for line in lines:
        if made := re.match(r"(%[\w.]+) = getelementptr .*addrspace\(3\)", line):
            bases[made.group(1)] = base_of(line)
    found = []
    for last, line in enumerate(lines):
        targets = re.findall(r"label %([\w.]+)", line) if line.startswith("br ") else []
        for first in (labels[target] for target in targets if labels[target] <= last):
            read: set[str] = set()
            for inside in lines[first:last] * 2:
                if "nvvm.barrier" in inside:
                    read.clear()
                elif re.search(r"= load .*addrspace\(3\)|ldmatrix|ld\.shared", inside):
                    read.add(base_of(inside))
                elif re.search(r"cp\.async\.c[ag]\.shared", inside) and base_of(inside) in read:
                    found.append(inside[:160])
    return found


def single_buffers(ttgir: str) -> dict:
    """Of the buffers of asynchronous copies that hold one block: how many there are, the products on tensor cores that
    take one, which read later than they are issued, and how many copies a wait of such a kernel leaves under way."""
    names = re.findall(r"(%\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<1x\d+x\d+x", ttgir)
    views = set(names)
    for line in ttgir.splitlines():
        made = re.match(r"\s*(%\w+) = ttg\.memdesc_\w+ (%\w+)", line)
        if made and made.group(2) in views:
            views.add(made.group(1))
    products = [line for line in ttgir.splitlines() if re.search(r"warp_group_dot %|tc_gen5_mma %", line)]
    read = [line.strip()[:100] for line in products if views & set(re.findall(r"%\w+", line))]
    waits = re.findall(r"ttg\.async_wait .*\{num = (\d+)", ttgir) if names else []
    return {"count": len(names), "read_later": read, "waits": sorted(set(waits))}
