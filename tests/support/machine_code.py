"""What the compiler's intermediate code tells of copies into shared memory that run beside the products."""

from __future__ import annotations

import re


def copies_before_reads_end(llir: str) -> list[str]:
    """The asynchronous copies of every loop, one iteration after another, into shared memory that some thread may not
    have read to the end: no barrier stands between. A buffer is known by its offset from the beginning of all.

    A jump back is a loop, but not where it leads to the return, which the compiler may write down first.
    """
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
            if lines[first + 1].startswith("ret "):
                continue
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
    take one and may read it after the next instruction, and how many copies a wait of such a kernel leaves under way.

    A product that is waited for at once reads no later than an instruction would: the compiler's barrier between a
    reading and the next copy stands behind the product, and so behind the wait. A name is that of the last buffer that
    was given it, since loops beside each other may have the same.
    """
    lines = [line.strip() for line in ttgir.splitlines()]
    count, views, read, waits = 0, set(), [], set()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if made := re.match(r"(%\w+) = ttg\.local_alloc\b(.*)", line):
            is_single = re.match(r" : \(\) -> !ttg\.memdesc<1x\d+x\d+x", made.group(2)) is not None
            count += is_single
            (views.add if is_single else views.discard)(made.group(1))
        elif made := re.match(r"(%\w+) = ttg\.memdesc_\w+ (%\w+)", line):
            (views.add if made.group(2) in views else views.discard)(made.group(1))
        elif re.search(r"warp_group_dot %|tc_gen5_mma %", line) and views & set(re.findall(r"%\w+", line)):
            is_done = re.search(r"warp_group_dot_wait .*\{pendings = 0 ", following) is not None
            read += [] if is_done else [line[:100]]
        waits |= set(re.findall(r"ttg\.async_wait .*\{num = (\d+)", line))
    return {"count": count, "read_later": read, "waits": sorted(waits) if count else []}
