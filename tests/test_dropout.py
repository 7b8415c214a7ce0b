"""ops.dropout on its own: its mask, in forward and backward."""

from __future__ import annotations

import pytest
import torch
from isas import CPU_BACKENDS, backend_with_isa

from fastbert import ops

BACKENDS = ("torch", *CPU_BACKENDS)


@pytest.fixture(params=BACKENDS)
def backend(request):
    with backend_with_isa(request.param) as name:
        yield name


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("shape", ((64, 1030), (3, 5, 7), (1, 1), (300,)), ids=str)
def test_what_is_kept_is_scaled_and_backward_has_the_same_mask(backend, shape, dtype):
    torch.manual_seed(0)
    x = (1 + torch.rand(shape)).to(dtype).requires_grad_()
    out = ops.dropout(x, 0.3, backend=backend)
    keep = out != 0
    expected = torch.where(keep, x.double() / 0.7, torch.zeros(())).detach()
    assert (out - expected).abs().max() <= torch.finfo(dtype).eps * expected.abs().max()
    if x.numel() > 10_000:
        assert abs(keep.double().mean() - 0.7) < 0.01
        assert (keep.double().mean(0) - 0.7).abs().max() < 6 * (0.21 / 64) ** 0.5  # no column is favoured
    dout = torch.randn(shape).to(dtype)
    out.backward(dout)
    gradient = torch.where(keep, dout.double() / 0.7, torch.zeros(()))
    assert (x.grad - gradient).abs().max() <= torch.finfo(dtype).eps * gradient.abs().max()


def test_edges(backend):
    x = torch.randn(4, 6)
    assert ops.dropout(x, 0.0, backend=backend) is x
    assert torch.equal(ops.dropout(x, 1.0, backend=backend), torch.zeros(4, 6))
    assert ops.dropout(torch.empty(0, 6), 0.5, backend=backend).shape == (0, 6)
    assert ops.dropout(torch.empty(4, 0), 0.5, backend=backend).shape == (4, 0)
    torch.manual_seed(1)
    strided = ops.dropout(x.t(), 0.5, backend=backend)
    torch.manual_seed(1)
    assert torch.equal(strided, ops.dropout(x.t().contiguous(), 0.5, backend=backend)) or backend == "torch"


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_the_mask_is_add_layer_norms(backend):
    with backend_with_isa(backend) as name:
        x = torch.ones(7, 33)
        torch.manual_seed(5)
        alone = ops.dropout(x, 0.4, backend=name)
        torch.manual_seed(5)
        _, summed = ops.add_layer_norm(x, None, x[0], None, dropout_p=0.4, prenorm=True, backend=name)
        assert torch.equal(alone, summed)


def test_opcheck():
    for dtype in (torch.float32, torch.bfloat16):
        torch.library.opcheck(torch.ops.fastbert.dropout_cpu, (torch.randn(5, 9).to(dtype), torch.tensor([3, 4]), 0.2))
    with pytest.raises(RuntimeError, match="dropout_p is 2"):
        torch.ops.fastbert.dropout_cpu(torch.randn(5, 9), torch.tensor([3, 4]), 2.0)
