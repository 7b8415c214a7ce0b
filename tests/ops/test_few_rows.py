"""Products of few rows that pack the weight on their way give the bits of those that read a copy, and keep none."""

from __future__ import annotations

import pytest
import torch
from full import halved
from isas import OF_FLOATS, backend_with_isa
from seeds import torch_generator

from fastbert import ops
from fastbert.native.availability import extension_error

if extension_error() is not None:
    pytest.skip(extension_error(), allow_module_level=True)
from fastbert import _C

MOST = _C.most_rows_without_copy
SHAPES = ((128, 96), (150, 330), (63, 65), (64, 7), (1, 64), (1, 1), (65, 1), (200, 769))
each_isa = pytest.mark.parametrize("backend", OF_FLOATS)
each_dtype = pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)

LAYOUTS = {
    "rows whole": lambda w: w,
    "columns whole": lambda w: w.t().contiguous().t(),
    "a slice": lambda w: torch.cat([w, w, w], 1)[:, w.shape[1] : 2 * w.shape[1]],
    "strided": lambda w: w.repeat_interleave(2, 1)[:, ::2],
    "from an odd address": lambda w: torch.cat([w.flatten()[:1], w.flatten()])[1:].view(w.shape),
}


def both_ways(run):
    """What `run` gives by copies of the weights, and without."""
    with ops.only_recorded_writes():
        by_copies = run()
    return by_copies, run()


def assert_same_bits(by_copies, on_the_way) -> None:
    for one, other in zip(by_copies, on_the_way, strict=True):
        assert torch.equal(one, other)


@halved
@pytest.mark.parametrize("layout", LAYOUTS)
@each_dtype
@each_isa
def test_linear_forward_and_backward(backend, dtype, layout):
    generator = torch_generator(1)
    for shape in SHAPES:
        for rows in (0, 1, 7, 16, MOST - 1, MOST):
            for weight_dtype in {dtype, torch.float32}:
                weight = LAYOUTS[layout](torch.randn(shape, generator=generator).to(weight_dtype)).requires_grad_()
                bias = torch.randn(shape[0], generator=generator).to(weight_dtype)
                x = torch.randn(rows, shape[1], generator=generator).to(dtype).requires_grad_()
                dout = torch.randn(rows, shape[0], generator=generator).to(dtype)

                def run(weight=weight, bias=bias, x=x, dout=dout):
                    with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
                        out = ops.linear(x, weight, bias, activation="gelu", backend=chosen)
                    return out, *torch.autograd.grad(out, (x, weight), dout)

                with backend_with_isa(backend) as chosen:
                    assert_same_bits(*both_ways(run))


@pytest.mark.parametrize("gated, halves", ((False, 1), (True, 1), (True, 2)))
@each_dtype
@each_isa
def test_feed_forward_forward_and_backward(backend, dtype, gated, halves):
    generator = torch_generator(2)
    for rows in (1, 16, MOST):
        sizes = [2 * 72] if gated and halves == 1 else [72] * halves
        ups = [torch.randn(size, 40, generator=generator).to(dtype).requires_grad_() for size in sizes]
        down = torch.randn(40, 72, generator=generator).to(dtype).requires_grad_()
        x = torch.randn(rows, 40, generator=generator).to(dtype).requires_grad_()

        def run(ups=ups, down=down, x=x):
            gate = {"gate_weight": ups[0], "gate_bias": None} if len(ups) == 2 else {}
            out = ops.feed_forward(x, ups[-1], None, down, activation="silu", gated=gated, backend=chosen, **gate)
            return out, *torch.autograd.grad(out.float().square().sum(), (x, *ups, down))

        with backend_with_isa(backend) as chosen:
            assert_same_bits(*both_ways(run))


def test_no_copy_is_kept():
    held = _C.packed_bytes()
    weight = torch.randn(150, 330, requires_grad=True)
    x = torch.randn(MOST + 1, 330, requires_grad=True)
    ops.linear(x[:MOST], weight, None, backend="cpu").sum().backward()
    assert _C.packed_bytes() == held
    ops.linear(x, weight, None, backend="cpu").sum().backward()
    assert _C.packed_bytes() > held


def test_a_weight_whose_memory_was_taken_away_is_refused():
    weight = torch.randn(150, 330)
    weight.untyped_storage().resize_(4096)
    with pytest.raises(RuntimeError, match="weight needs 198000 bytes of storage, but its storage has 4096"):
        ops.linear(torch.randn(3, 330), weight, None, backend="cpu")
