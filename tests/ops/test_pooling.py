"""pooling: every backend, forward and backward, against the float64 oracle."""

from __future__ import annotations

import pytest
import torch
from full import halved, left_to_full, thinned, triton_left_to_full
from isas import WITHOUT_PRODUCTS, backend_with_isa, device_of
from test_ops import check

from fastbert import ops
from fastbert.errors import BackendError
from fastbert.testing import reference
from fastbert.testing.cases import LENGTHS, Lengths

BACKENDS = ("torch", *WITHOUT_PRODUCTS, "triton")
SLACK = LENGTHS[5]

each_mode = pytest.mark.parametrize("mode", ("mean", "cls", "max"))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
each_dtype = pytest.mark.parametrize(
    ("backend", "dtype"),
    [(b, d) for b in BACKENDS for d in DTYPES if not (b.startswith("cpu") and d is torch.float16)],  # which they lack
    indirect=["backend"],
    ids=lambda value: str(value).removeprefix("torch."),
)
each_case = pytest.mark.parametrize("case", LENGTHS, ids=lambda c: c.id)
only_triton = pytest.mark.parametrize("backend", ("triton",), indirect=True)


@pytest.fixture(params=BACKENDS)
def backend(request):
    with backend_with_isa(request.param) as name:
        yield name


def pooled(x, case, mode, backend):
    return ops.pooling(x, case.cu_seqlens.to(x.device), mode=mode, backend=backend)


def check_pooling(case, dtype, mode, backend, x):
    check(
        lambda x: pooled(x, case, mode, backend),
        lambda x: reference.pooling(x, case.cu_seqlens, mode),
        {"x": x},
        dtype,
        device=device_of(backend),
    )


@thinned(3)
@triton_left_to_full
@left_to_full(
    lambda p: p["backend"] == "triton" and p["dtype"] is not torch.float32 and p["case"].id not in ("ragged", "slack")
)
@each_case
@each_dtype
@each_mode
def test_against_oracle(case, dtype, mode, backend):
    check_pooling(case, dtype, mode, backend, torch.randn(case.total_tokens, 24))


@triton_left_to_full
@halved
@pytest.mark.parametrize("hidden_size", (1, 64, 65, 257))
@each_mode
def test_widths(hidden_size, mode, backend):
    check_pooling(SLACK, torch.float32, mode, backend, torch.randn(SLACK.total_tokens, hidden_size))


@triton_left_to_full
@left_to_full(lambda p: p["backend"] == "triton" and p["length"] > 512)
@pytest.mark.parametrize("length", (512, 4096))
@each_mode
def test_long_sequences(length, mode, backend):
    """A mean added up token by token errs more than the formula, whose sum is pairwise."""
    case = Lengths("long", (7, length, 0, length - 3), padding_rows=5)
    check_pooling(case, torch.float32, mode, backend, 1 + torch.randn(case.total_tokens, 24))


@triton_left_to_full
@each_dtype
def test_a_maximum_that_several_tokens_have_shares_its_gradient(dtype, backend):
    check_pooling(LENGTHS[3], dtype, "max", backend, torch.randint(0, 4, (LENGTHS[3].total_tokens, 24)).float())
    zeros = 0.0 * torch.randn(LENGTHS[3].total_tokens, 24)  # of both signs, which are one number
    check_pooling(LENGTHS[3], dtype, "max", backend, zeros)


@triton_left_to_full
@left_to_full(lambda p: p["share"] == 7 and p["case"].id != "ragged")
@pytest.mark.parametrize("share", (2, 7))
@each_case
@each_mode
@only_triton
def test_several_programs_share_a_sequence(case, mode, share, backend, monkeypatch):
    import fastbert.kernels.pooling as kernels

    monkeypatch.setattr(kernels, "_MIN_SHARE", share)
    for x in (torch.randn(case.total_tokens, 24), torch.randint(0, 4, (case.total_tokens, 24)).float()):
        check_pooling(case, torch.float32, mode, backend, x)


@triton_left_to_full
@each_mode
def test_nan_comes_out_and_stays_in_its_sequence(mode, backend):
    x = torch.randn(SLACK.total_tokens, 24, device=device_of(backend))
    expected = pooled(x, SLACK, mode, backend)
    x[4, 3], x[0, 5], x[1, 5] = float("nan"), float("-inf"), float("nan")  # of the last sequence and of the first
    out = pooled(x, SLACK, mode, backend)
    assert torch.equal(out.isnan(), pooled(x.cpu(), SLACK, mode, "torch").isnan().to(out.device))
    spoiled = torch.zeros_like(out, dtype=torch.bool)
    spoiled[2, 3] = spoiled[0, 5] = True
    assert torch.equal(out[~spoiled], expected[~spoiled])


@triton_left_to_full
@each_mode
@only_triton
def test_repeats_bit_for_bit_whatever_the_strides_and_the_offsets_dtype(mode, backend):
    wide = torch.randn(LENGTHS[3].total_tokens, 48, device=device_of(backend))
    results = []
    for x, dtype in ((wide[:, ::2].contiguous(), torch.int32), (wide[:, ::2], torch.int64)):
        x = x.detach().requires_grad_()
        out = ops.pooling(x, LENGTHS[3].cu_seqlens.to(x.device, dtype), mode=mode, backend=backend)
        out.backward(torch.ones(48, len(out), device=x.device)[:24].t())
        results.append((out, x.grad))
    assert all(map(torch.equal, *results))


def test_what_cannot_be_served_raises_with_the_reason(backend):
    cu_seqlens = torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"'median'; valid modes: mean, cls, max"):
        ops.pooling(torch.zeros(1, 2), cu_seqlens, mode="median", backend=backend)
    with pytest.raises(BackendError, match="no cuda kernel"):
        ops.pooling(torch.zeros(1, 2), cu_seqlens, backend="cuda")
    with pytest.raises(BackendError, match=r"float64 \(has float32 and bfloat16\)"):
        ops.pooling(torch.zeros(1, 2).double(), cu_seqlens, backend="cpu")
    with pytest.raises(BackendError, match=r"float64|tensors are on cpu"):
        ops.pooling(torch.zeros(1, 2).double(), cu_seqlens, backend="triton")
