"""All layers as one op on backend `cuda`, against the oracle: its own operators over CPU tensors and emulated kernels,
and Triton's in the interpreter where it has none.
"""

from __future__ import annotations

import cuda_kernels
import pytest
from layer_specs import CASES, WITH_HOLES
from test_encoder_layers_gpu import OPS, SERVED, SLACK, STACKS, stack_of
from trained_layers import MODES, check, masks

from fastbert.backend import use_backend
from fastbert.native.availability import triton_error
from fastbert.ops.layers.gpu import encoder_layers_training as gpu

pytestmark = [
    pytest.mark.full,  # the operators take a while to compile here
    pytest.mark.skipif(triton_error() is not None, reason=str(triton_error())),
]
OPERATORS = (
    "add_layer_norm_fwd_cuda", "add_layer_norm_bwd_cuda", "feed_forward_cuda", "feed_forward_bwd_cuda",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def operators():
    with cuda_kernels.operators_on_the_cpu(*OPERATORS):
        yield


@pytest.fixture(autouse=True)
def cuda(monkeypatch):
    monkeypatch.setattr(gpu, "cuda_unsupported", lambda x: None)  # but for the device
    with use_backend("cuda"):
        yield


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SERVED)
def test_against_oracle(name, mode):
    check([CASES[name]], mode, name=name, cu_seqlens=SLACK)


@pytest.mark.parametrize("inner", (0.0, 0.3))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SERVED)
def test_dropout_against_oracle(name, mode, inner):
    """Its feed-forward has none inside: with one, Triton's runs."""
    case = CASES[name].with_dropouts(0.1, 0.2, inner, 0.4)
    check([case], mode, masks(case, 7, "triton"), 7, name, positions=WITH_HOLES)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", STACKS)
def test_several_layers_against_oracle(name, mode, op):
    check(stack_of(name), mode, name=name, op=op)
