"""Triton 3.6's interpreter, mended: without this kernels with loops or products cannot be run on a CPU."""

from __future__ import annotations

from interpreter_speed import quicken_triton_interpreter


def widened(t):
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
        product = np.matmul(widened(a), widened(b)).astype(d.data.dtype)
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
