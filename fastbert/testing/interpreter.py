"""Triton 3.6's interpreter, mended: without this kernels with loops or products cannot be run on a CPU. And two ways to
have it see what a GPU does and it does not: products that differ from block to block, and threads out of step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fastbert.testing.interpreter_speed import quicken_triton_interpreter


def _widened(t):
    """The elements of an interpreter's tensor in float64."""
    import numpy as np
    import triton.language as tl

    data = t.data
    if t.dtype.scalar == tl.bfloat16:  # held as bit patterns
        data = (data.astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float64)


def mend_triton_interpreter() -> None:
    """Call it before a kernel runs under TRITON_INTERPRET=1. Does nothing where Triton is not installed.

    The bound of a kernel's loop goes through int() as an array of shape (1,), which NumPy 2.4 refuses; float32 becomes
    bfloat16 by cutting bits off, where GPUs round to nearest even; and tl.dot multiplies the bit patterns of bfloat16
    operands as integers, and adds in an order that depends on the block's shape, which a GPU does not: two kernels that
    make the same score make the same bits there. It is also made quicker: interpreter_speed.py.
    """
    try:
        import numpy as np
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    builder = interpreter.InterpreterBuilder
    if builder.create_dot.__module__ == __name__:
        return
    patch_tensor, create_dot = interpreter._patch_lang_tensor, builder.create_dot
    convert = interpreter._convert_float

    def patch_and_mend(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def dot_in_one_order(self, a, b, d, *options):
        if not a.dtype.scalar.is_floating():
            return create_dot(self, a, b, d, *options)
        product = np.matmul(_widened(a), _widened(b)).astype(d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    def convert_and_round(data, source, target, rounding_mode):
        if source == tl.bfloat16 and target == tl.float32:
            return data.astype(np.uint32) << 16
        if source != tl.float32 or target != tl.bfloat16 or rounding_mode is not None:
            return convert(data, source, target, rounding_mode)
        bits = data.view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(data), 0x7FC0, rounded).astype(np.uint16)

    quicken_triton_interpreter(interpreter)
    interpreter._convert_float = convert_and_round
    interpreter._patch_lang_tensor = patch_and_mend
    builder.create_dot = dot_in_one_order


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
        left, right, total = _widened(a), _widened(b), d.data
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
