"""ops.dropout on its own: its mask, in forward and backward."""

from __future__ import annotations

import pytest
import torch
from full import triton_left_to_full
from isas import WITHOUT_PRODUCTS, backend_with_isa, device_of
from seeds import manual_seed
from shares import assert_share

from fastbert import ops
from fastbert.errors import BackendError

BACKENDS = ("torch", *WITHOUT_PRODUCTS, "triton")


@pytest.fixture(params=BACKENDS)
def backend(request):
    with backend_with_isa(request.param) as name:
        yield name


@triton_left_to_full
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("shape", ((64, 1030), (3, 5, 7), (1, 1), (300,)), ids=str)
def test_what_is_kept_is_scaled_and_backward_has_the_same_mask(backend, shape, dtype):
    if backend == "cpu" and dtype is torch.float16:
        with pytest.raises(BackendError, match="float16"):
            ops.dropout(torch.ones(shape, dtype=dtype), 0.3, backend=backend)
        return
    manual_seed(0)
    x = (1 + torch.rand(shape)).to(device_of(backend), dtype).requires_grad_()
    out = ops.dropout(x, 0.3, backend=backend)
    keep = out != 0
    expected = torch.where(keep, x.double() / 0.7, 0.0).detach()
    assert (out - expected).abs().max() <= torch.finfo(dtype).eps * expected.abs().max()
    if x.numel() > 10_000:
        assert_share(keep, 0.7, (0,))  # no column is favoured
    dout = torch.randn(shape).to(x)
    out.backward(dout)
    gradient = torch.where(keep, dout.double() / 0.7, 0.0)
    assert (x.grad - gradient).abs().max() <= torch.finfo(dtype).eps * gradient.abs().max()


def test_edges(backend):
    x = torch.randn(4, 6, device=device_of(backend))
    assert ops.dropout(x, 0.0, backend=backend) is x
    assert torch.equal(ops.dropout(x, 1.0, backend=backend), torch.zeros_like(x))
    assert ops.dropout(x[:0], 0.5, backend=backend).shape == (0, 6)
    assert ops.dropout(x[:, :0], 0.5, backend=backend).shape == (4, 0)
    manual_seed(1)
    strided = ops.dropout(x.t(), 0.5, backend=backend)
    manual_seed(1)
    assert torch.equal(strided, ops.dropout(x.t().contiguous(), 0.5, backend=backend)) or backend == "torch"


def dropped_by(name, x, philox, dropout_p=0.4):
    """By the op itself, whose philox is given: both backends' generators need not agree."""
    device = device_of(name)
    rows = x.reshape(-1, x.shape[-1]).to(device)
    return getattr(torch.ops.fastbert, f"dropout_{name}")(rows, philox.to(device), dropout_p).cpu().view(x.shape)


@pytest.mark.parametrize("backend", BACKENDS[1:], indirect=True)
def test_the_mask_is_add_layer_norms(backend):
    x = torch.ones(7, 33, device=device_of(backend))
    manual_seed(5)
    alone = ops.dropout(x, 0.4, backend=backend)
    manual_seed(5)
    _, summed = ops.add_layer_norm(x, None, x[0], None, dropout_p=0.4, prenorm=True, backend=backend)
    assert torch.equal(alone, summed)


@pytest.mark.parametrize("shape", ((7, 33), (2, 1030), (2, 3, 256), (5,)), ids=str)
def test_cpu_and_triton_have_the_same_bits(shape):
    with backend_with_isa("cpu-generic"), backend_with_isa("triton"):
        x, philox = torch.randn(shape), torch.tensor([2**61 + 5, 2**40 + 1])
        assert torch.equal(dropped_by("cpu", x, philox), dropped_by("triton", x, philox))


@pytest.mark.parametrize("backend", BACKENDS[1:], indirect=True)
def test_what_is_dropped_is_zero_whatever_it_was(backend):
    philox = torch.tensor([3, 4])
    ones = dropped_by(backend, torch.ones(4, 40), philox)
    out = dropped_by(backend, torch.full((4, 40), float("nan")), philox)
    assert torch.equal(out == 0, ones == 0) and torch.equal(out.isnan(), ones != 0)


@pytest.mark.parametrize("backend", ("cpu",), indirect=True)
def test_the_kernel_names_the_wrong_value(backend):
    with pytest.raises(RuntimeError, match="dropout_p is 2"):
        torch.ops.fastbert.dropout_cpu(torch.randn(5, 9), torch.tensor([3, 4]), 2.0)
