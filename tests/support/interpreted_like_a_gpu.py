"""Two ways to have Triton's interpreter see what a GPU does and it does not: products that differ from block to block,
and threads out of step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from interpreter import widened


@contextmanager
def products_of_a_gpu() -> Iterator[None]:
    """Within the block tl.dot errs as a GPU's: products of one sum in another block need not be the same bits.

    fp32 operands: a chain of multiply-adds over the inner dimension, which Triton compiles whatever the block. 16-bit
    operands: fp32 sums that are cut off, not rounded, after every eight terms, in an order that depends on the block's
    shape, as it does where one block's product is wgmma and another's mma. Call mend_triton_interpreter() before.
    """
    import numpy as np
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    rounded_once = builder.create_dot

    def create_dot(self, a, b, d, *options):
        if not a.dtype.scalar.is_floating():
            return rounded_once(self, a, b, d, *options)
        left, right, total = widened(a), widened(b), d.data
        (m, depth), n = left.shape, right.shape[1]
        is_fp32 = a.dtype.primitive_bitwidth == 32
        order = np.arange(depth) if is_fp32 else np.roll(np.arange(depth), m // 16 * 5 + n // 16 * 3)
        for at in np.split(order, range(1, depth) if is_fp32 else range(8, depth, 8)):
            exact = left[:, at] @ right[at] + total
            total = exact.astype(np.float32)
            if not is_fp32:
                total = np.where(np.abs(total) > np.abs(exact), np.nextafter(total, np.float32(0)), total)
        return interpreter.TensorHandle(total, d.dtype.scalar)

    builder.create_dot = create_dot
    try:
        yield
    finally:
        builder.create_dot = rounded_once


@contextmanager
def unordered_accesses() -> Iterator[list[str]]:
    """Within the block the list that it gives collects what kernels do in an order that a GPU does not promise.

    The threads of a program keep step at `tl.debug_barrier()` alone. So an address that one load or store of a program
    touches and a later store or load touches, too, must be at the same place of a block of the same shape, which is one
    thread's on a GPU, or a barrier must stand between.
    """
    import numpy as np
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    names = ("set_grid_idx", "create_barrier", "create_masked_load", "create_masked_store")
    originals = {name: getattr(builder, name) for name in names}
    found: list[str] = []
    seen: dict[str, list] = {"load": [], "store": []}  # since the program began, or its last barrier

    def forget() -> None:
        for accesses in seen.values():
            accesses.clear()

    def note(kind: str, others: tuple[str, ...], pointers, mask) -> None:
        addresses = np.where(mask, pointers, 0)
        for other in others:
            for before in seen[other]:
                is_same = before == addresses if before.shape == addresses.shape else None
                mine, theirs = (addresses, before) if is_same is None else (addresses[~is_same], before[~is_same])
                shared = np.setdiff1d(np.intersect1d(mine, theirs), [0])
                if shared.size > 0:
                    found.append(
                        f"a {kind} {addresses.shape} after a {other} {before.shape} of {shared.size} addresses"
                    )
        seen[kind].append(addresses)

    def set_grid_idx(self, *index):
        forget()
        return originals["set_grid_idx"](self, *index)

    def create_barrier(self):
        forget()
        return originals["create_barrier"](self)

    def create_masked_load(self, pointers, mask, *rest):
        note("load", ("store",), pointers.data, mask.data)
        return originals["create_masked_load"](self, pointers, mask, *rest)

    def create_masked_store(self, pointers, value, mask, *rest):
        note("store", ("load", "store"), pointers.data, mask.data)
        return originals["create_masked_store"](self, pointers, value, mask, *rest)

    for replacement in (set_grid_idx, create_barrier, create_masked_load, create_masked_store):
        setattr(builder, replacement.__name__, replacement)
    try:
        yield found
    finally:
        for name, original in originals.items():
            setattr(builder, name, original)
