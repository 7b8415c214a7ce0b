"""add_layer_norm and add_rms_norm of backend `cuda` against the float64 oracle: its operators over CPU tensors and
emulated kernels. test_cuda.py has the kernels alone.
"""

from __future__ import annotations

import cuda_kernels
import pytest
import torch
from norms import check, keep_mask, make

from fastbert.backend import SUPPORTS, Backend
from fastbert.testing.cases import DTYPES

pytestmark = pytest.mark.full  # the operators take a while to compile here


@pytest.fixture(scope="module", autouse=True)
def operators():
    with cuda_kernels.operators_on_the_cpu("add_layer_norm_fwd_cuda", "add_layer_norm_bwd_cuda"):
        yield


@pytest.fixture(autouse=True)
def served(monkeypatch):
    for op in ("add_layer_norm", "add_rms_norm"):
        monkeypatch.setitem(SUPPORTS[op], Backend.CUDA, lambda *operands: None)  # but for the device


@pytest.mark.parametrize("dropout_p", (0.0, 0.25))
@pytest.mark.parametrize("rms", (False, True), ids=("layer", "rms"))
@pytest.mark.parametrize("dtype", (*DTYPES, torch.float16), ids=lambda d: str(d).removeprefix("torch."))
def test_against_oracle(dtype, rms, dropout_p):
    rows, hidden_size = 17, 96
    keep = keep_mask("cuda", rows, hidden_size, dropout_p, 7, dtype) if dropout_p else None
    for residual, x_bias, prenorm in ((True, True, True), (False, False, False)):
        operands = make(rows, hidden_size, dtype, "cpu", residual, x_bias, bias=not rms)
        check("cuda", operands, prenorm, keep=keep, dropout_p=dropout_p, seed=7, rms=rms)
