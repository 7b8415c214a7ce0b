"""Products that pack the weight for themselves give the bits of those that read a copy, and keep none."""

from __future__ import annotations

import pytest
import torch
from full import halved, left_to_full, thinned
from isas import PACKED, backend_with_isa, packs
from packed_bytes import bytes_still_held
from seeds import torch_generator

import fastbert
from fastbert import ops
from fastbert.native.availability import extension_error

if extension_error() is not None:
    pytest.skip(extension_error(), allow_module_level=True)
from fastbert import _C

MOST = _C.most_rows_without_copy
MANY = _C.least_rows_without_copy
SHAPES = ((128, 96), (150, 330), (63, 65), (64, 7), (1, 64), (1, 1), (65, 1), (200, 769))
WITH_BFLOAT16 = ("cpu-avx512_bf16", "cpu-amx")  # which have products of their own for it
each_isa = pytest.mark.parametrize("backend", PACKED)
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


@thinned(4)
@pytest.mark.parametrize("layout", LAYOUTS)
@each_dtype
@each_isa
def test_linear_forward_and_backward(backend, dtype, layout):
    generator = torch_generator(1)
    for i, shape in enumerate(SHAPES):
        for rows in (0, 1, 7, 16, MOST - 1, MOST)[i % 2 :: 2]:  # a shape meets three of them
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


@left_to_full(lambda p: (p["dtype"] is torch.bfloat16) != (p["backend"] in WITH_BFLOAT16))  # float32's code, in turn
@each_dtype
@each_isa
def test_linear_of_many_rows(backend, dtype):
    for shape in SHAPES[:4]:
        for weight_dtype in {dtype, torch.float32}:
            with backend_with_isa(backend) as chosen:
                check_many_rows(chosen, shape, dtype, weight_dtype)


def check_many_rows(backend, shape, dtype, weight_dtype) -> None:
    held, generator = bytes_still_held(), torch_generator(3)
    weight = torch.randn(shape, generator=generator).to(weight_dtype).requires_grad_()
    x = torch.randn(MANY, shape[1], generator=generator).to(dtype).requires_grad_()
    dout = torch.randn(MANY, shape[0], generator=generator).to(dtype)

    def call(rows):
        with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
            out = ops.linear(x[:rows], weight, None, backend=backend)
        return out, torch.autograd.grad(out, x, dout[:rows])[0][:rows]

    alone = call(MANY)
    assert _C.packed_bytes() == held
    with ops.only_recorded_writes():
        assert_same_bits(call(MANY), alone)
        assert _C.packed_bytes() == held  # there is no copy to read
        call(MOST + 1)  # makes some
        copies = _C.packed_bytes()
        assert_same_bits(call(MANY), alone)
        assert _C.packed_bytes() == copies > held
    assert_same_bits(call(MANY), alone)


@packs
def test_a_copy_that_is_there_serves_many_rows_in_inference_mode_only():
    """Otherwise the weight is packed as it is now, and nothing has to be compared."""
    served = 0
    for _ in range(3):  # few of 1,024 calls look at the place that is written, and no two weights' in a row are those
        weight, x = torch.randn(150, 330), torch.randn(MANY, 330)
        with torch.inference_mode():
            for _ in range(2):
                ops.linear(x[: MOST + 1], weight, None, backend="cpu")
        old = ops.linear(x, weight, None, backend="cpu")
        weight.data[63, 77] = 100
        with torch.inference_mode():
            served += torch.equal(ops.linear(x, weight, None, backend="cpu"), old)
        assert not torch.equal(ops.linear(x, weight, None, backend="cpu"), old)
        weight[0, 0] = 1  # counted
        with torch.inference_mode():
            new = ops.linear(x, weight, None, backend="cpu")
        assert torch.equal(new, ops.linear(x, weight.clone(), None, backend="cpu"))
    assert served >= 2


def test_many_rows_make_no_remark_on_inference_tensors(recwarn):
    with torch.inference_mode():
        weight, x = torch.randn(150, 330), torch.randn(MANY, 330)
        ops.linear(x, weight, None, backend="cpu")
    assert not recwarn.list


@halved
@pytest.mark.parametrize("gated, halves", ((False, 1), (True, 1), (True, 2)))
@each_dtype
@each_isa
def test_feed_forward_forward_and_backward(backend, dtype, gated, halves):
    generator = torch_generator(2)
    for rows in (1, 16, MOST, MANY):
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


@packs
def test_no_copy_is_kept():
    held = bytes_still_held()
    weight = torch.randn(150, 330, requires_grad=True)
    x = torch.randn(MOST + 1, 330, requires_grad=True)
    ops.linear(x[:MOST], weight, None, backend="cpu").sum().backward()
    assert _C.packed_bytes() == held
    ops.linear(x, weight, None, backend="cpu").sum().backward()
    assert _C.packed_bytes() == held  # it may not be needed again
    ops.linear(x, weight, None, backend="cpu").sum().backward()
    assert _C.packed_bytes() > held


def test_a_step_of_training_of_many_tokens_keeps_no_copy():
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    model = fastbert.BertModel(fastbert.EncoderConfig.of_family("bert", vocab_size=99, **shape))
    optimizer = torch.optim.AdamW(model.parameters())
    held = bytes_still_held()
    for _ in range(2):
        model(torch.randint(1, 99, (16, MANY // 16))).last_hidden_state.square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        model(torch.randint(1, 99, (16, MANY // 16)))
    assert _C.packed_bytes() == held


def test_a_weight_whose_memory_was_taken_away_is_refused():
    weight = torch.randn(150, 330)
    weight.untyped_storage().resize_(4096)
    with pytest.raises(RuntimeError, match="weight needs 198000 bytes of storage, but its storage has 4096"):
        ops.linear(torch.randn(3, 330), weight, None, backend="cpu")
