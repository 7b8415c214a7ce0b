"""pack and unpack: every backend, forward and backward, with the bits of plain indexing."""

from __future__ import annotations

import pytest
import torch
from full import halved, left_to_full, triton_left_to_full
from isas import backend_with_isa, device_of

from fastbert import ops
from fastbert.backend import Backend, select, use_backend
from fastbert.errors import BackendError
from fastbert.packing import PackedBatch
from fastbert.testing.cases import MASKS, attention_mask

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
only_triton = pytest.mark.parametrize("backend", ("triton",), indirect=True)


@pytest.fixture(params=("torch", "triton"))
def backend(request):
    with backend_with_isa(request.param) as name:
        yield name


def indices_of(mask: torch.Tensor, backend: str) -> torch.Tensor:
    return mask.flatten().nonzero().flatten().to(device_of(backend))


def literal(packed: torch.Tensor, indices: torch.Tensor, num_rows: int) -> torch.Tensor:
    padded = torch.zeros(num_rows, *packed.shape[1:], dtype=packed.dtype, device=packed.device)
    padded[indices] = packed
    return padded


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """NaN of one sort is not NaN of another, nor 0 another sign's."""
    words = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype is b.dtype and torch.equal(a.contiguous().view(words), b.contiguous().view(words))


def check(x: torch.Tensor, indices: torch.Tensor, backend: str) -> None:
    """Both directions of both ops, for a padded x (num_rows, ...)."""
    num_rows, x = x.shape[0], x.detach().requires_grad_()
    packed = ops.pack(x, indices, backend=backend)
    assert same_bits(packed, x[indices])
    dpacked = torch.randn(packed.shape, device=x.device).to(x.dtype)
    packed.backward(dpacked)
    assert same_bits(x.grad, literal(dpacked, indices, num_rows))

    packed = packed.detach().requires_grad_()
    padded = ops.unpack(packed, indices, num_rows, backend=backend)
    assert same_bits(padded, literal(packed, indices, num_rows))
    dpadded = torch.randn(padded.shape, device=x.device).to(x.dtype)
    padded.backward(dpadded)
    assert same_bits(packed.grad, dpadded[indices])


@triton_left_to_full
@halved
@pytest.mark.parametrize("shape", ((1, 1), (3, 5), (2, 16), (3, 17), (5, 33)), ids=str)
@pytest.mark.parametrize("pattern", MASKS[1:])
@each_dtype
def test_every_mask(pattern, shape, dtype, backend):
    mask = attention_mask(pattern, *shape)
    check(torch.randn(mask.numel(), 24, device=device_of(backend)).to(dtype), indices_of(mask, backend), backend)


@triton_left_to_full
@halved
@pytest.mark.parametrize("width", (1, 2, 3, 16, 255, 256, 257, 530))
@each_dtype
def test_widths(width, dtype, backend):
    """Rows of whole words of 4 bytes and not, of one block of columns and several."""
    mask = attention_mask("holes", 3, 17)
    check(torch.randn(51, width, device=device_of(backend)).to(dtype), indices_of(mask, backend), backend)


@triton_left_to_full
def test_every_subset_of_few_rows(backend):
    """What the bisection can meet: 6 rows before, in and after a block of rows, each there or not."""
    x = torch.randn(36, 2, device=device_of(backend))
    for bits in range(64):
        few = torch.tensor([bits >> i & 1 for i in range(6)])
        for first in (0, 13, 30):
            mask = torch.arange(36) % 3 == 0
            mask[first : first + 6] = few.bool()
            indices = indices_of(mask, backend)
            padded = ops.unpack(x[indices], indices, 36, backend=backend)
            assert torch.equal(padded, literal(x[indices], indices, 36)), (bits, first)


@pytest.mark.parametrize("shape", ((), (3,), (2, 3, 4), (0,)), ids=str)
def test_other_ranks(shape, backend):
    indices = indices_of(attention_mask("left", 3, 7), backend)
    check(torch.randn(21, *shape, device=device_of(backend)), indices, backend)


@each_dtype
def test_no_token_and_no_row(dtype, backend):
    x = torch.randn(5, 8, device=device_of(backend)).to(dtype)
    none = torch.zeros(0, dtype=torch.int64, device=x.device)
    check(x, none, backend)
    check(x[:0], none, backend)


@each_dtype
def test_nan_is_copied_as_it_is(dtype, backend):
    """Bits that no arithmetic leaves alone: NaN with a payload, negative zero, a denormal number."""
    words = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    x = torch.tensor([[-1, 1, -(2 ** (8 * dtype.itemsize - 1)), -2]] * 6, dtype=words).view(dtype)
    x, indices = x.to(device_of(backend)), torch.tensor([1, 4], device=device_of(backend))
    packed = ops.pack(x, indices, backend=backend)
    assert same_bits(packed, x[indices])
    assert same_bits(ops.unpack(packed, indices, 6, backend=backend), literal(packed, indices, 6))


@left_to_full(lambda p: p["compiler"] == "inductor")  # ours ends where the graph does; test_compile.py runs inductor
@pytest.mark.parametrize("compiler", ("aot_eager", "inductor"))
def test_compiles_into_one_graph(compiler):
    """The shapes vary and nothing waits for the host. The interpreter cannot be compiled: `auto`, which is torch."""

    def both(x, indices):
        return ops.unpack(2 * ops.pack(x, indices), indices, x.shape[0])

    compiled = torch.compile(both, fullgraph=True, backend=compiler)
    for pattern, shape in (("right", (3, 7)), ("holes", (4, 9)), ("left", (2, 5))):
        mask = attention_mask(pattern, *shape)
        indices = indices_of(mask, "torch")
        results = []
        for function in (both, compiled):
            x = torch.linspace(-1, 1, mask.numel() * 6).view(-1, 6).requires_grad_()
            out = function(x, indices)
            out.backward(torch.linspace(0, 1, out.numel()).view_as(out))
            results.append((out, x.grad))
        assert all(map(torch.equal, *results))


@only_triton
def test_a_padded_batch_goes_through_the_kernels(backend):
    mask = attention_mask("holes", 3, 7)
    device = torch.device(device_of(backend))
    batch = PackedBatch.from_mask(mask, 3, 7, device)
    x = torch.randn(3, 7, 6, device=device, requires_grad=True)
    ids = torch.randint(9, (3, 7), device=device)
    with use_backend("triton"), torch.profiler.profile() as profile:
        packed = batch.pack(x)
        padded, last = batch.unpack(packed), batch.unpack(packed[:, 0])
        assert torch.equal(batch.pack(ids), ids[mask.bool()])
        (padded.sum() + last.sum()).backward()
    real = mask.bool().to(device)[..., None]
    assert torch.equal(padded, torch.where(real, x, 0)) and torch.equal(last, padded[..., 0])
    assert torch.equal(x.grad, torch.where(real, torch.tensor([2.0, 1, 1, 1, 1, 1], device=device), 0))
    ours = [event.name for event in profile.events() if event.name.startswith("fastbert::")]
    assert sorted(ours) == ["fastbert::pack_triton"] * 3 + ["fastbert::unpack_triton"] * 3


def test_what_cannot_be_served_raises_with_the_reason(backend):
    x, indices = torch.zeros(4, 2, dtype=torch.float64), torch.tensor([1])
    assert select("pack", backend, torch.zeros(4, 2)) is Backend(backend)
    for call in (lambda b: ops.pack(x, indices, backend=b), lambda b: ops.unpack(x[:1], indices, 4, backend=b)):
        with pytest.raises(BackendError, match="no cpu kernel"):
            call("cpu")
        with pytest.raises(BackendError, match=r"float64|tensors are on cpu"):
            call("triton")
