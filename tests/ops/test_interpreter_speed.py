"""interpreter_speed.py: what the interpreter computes is what it computed without, and the language is given back."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fastbert.native.availability import triton_error

pytestmark = pytest.mark.skipif(triton_error() is not None, reason=str(triton_error()))

# Triton as it is with `as-it-is`, and with the work that it repeats left out: prints a hash of what kernels wrote.
PROGRAM = """
import hashlib, sys
import torch
import triton.language as tl
import interpreter, interpreter_speed
if sys.argv[1] == "as-it-is":
    interpreter.quicken_triton_interpreter = lambda module: None
interpreter.mend_triton_interpreter()
from fastbert.ops.attention.attention import attention
from fastbert.ops.layer_norm import add_layer_norm
language = {name: id(value) for module in (tl, tl.core) for name, value in vars(module).items()}
torch.manual_seed(0)
offsets, digest = torch.tensor([0, 3, 12], dtype=torch.int32), hashlib.sha256()
for dtype in (torch.float32, torch.bfloat16):
    q, k, v = torch.randn(3, 12, 2, 16, dtype=dtype).unbind()
    q.requires_grad_()
    options = {"dropout_p": 0.25, "softmax_scale": 0.5, "backend": "triton"}
    out = attention(q, k, v, offsets, 9, **options)
    x = out.flatten(1)
    norm = add_layer_norm(x, x, torch.ones(32, dtype=dtype), torch.zeros(32, dtype=dtype), backend="triton")
    (grad,) = torch.autograd.grad(norm, q, torch.randn_like(norm))
    for tensor in (out, norm, grad):
        assert tensor.isfinite().all()
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
if sys.argv[1] == "quick":  # Triton's own leaves the replacements of device functions behind
    assert language == {name: id(value) for module in (tl, tl.core) for name, value in vars(module).items()}
print(digest.hexdigest())
"""


@pytest.mark.full  # all kernels of the interpreter are compared with the oracle
def test_the_numbers_are_those_of_triton_s_own():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    said = []
    for how in ("as-it-is", "quick"):
        command = [sys.executable, "-c", PROGRAM, how]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        said.append(done.stdout)
    assert said[0] == said[1] != ""


def test_shapes_are_refused_as_before():
    from triton.language import core

    with pytest.raises(ValueError, match="Shape element 1 must be a power of 2"):
        core.block_type(core.int32, [4, 3])
    with pytest.raises(TypeError, match="0d block_type"):
        core.block_type(core.int32, [])
    assert core.block_type(core.int32, [4, 1]) == core.block_type(core.int32, [core.constexpr(4), 1])
    assert str(core.block_type(core.bfloat16, [2, 4])) == "<['2', '4'], bf16>"
