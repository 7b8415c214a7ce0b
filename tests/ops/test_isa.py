"""FASTBERT_ISA: the instruction set that the CPU kernels run with, where it is not to be the machine's best."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from command_line import fails, run_python

import fastbert
from fastbert.cli.doctor import doctor_lines
from fastbert.native import availability
from fastbert.native.availability import extension_error

pytestmark = pytest.mark.skipif(extension_error() is not None, reason=str(extension_error()))
PROGRAM = """
import torch
from fastbert import ops
x = torch.ones(2, 8)
ops.add_layer_norm(x, x, x[0], x[0])
from fastbert import _C
print(_C.isa())
"""


def test_the_kernels_are_held_down():
    from fastbert import _C

    for isa in (_C.isas()[0], _C.isas()[-1]):
        done = run_python([sys.executable, "-c", PROGRAM], FASTBERT_ISA=isa)
        assert done.stdout == f"{isa}\n", done.stderr


@pytest.mark.parametrize("name", ("avx3", pytest.param("", marks=pytest.mark.full)))
def test_a_name_that_this_machine_cannot_run_is_one_clear_error(name):
    from fastbert import _C

    message = f"FASTBERT_ISA: this machine cannot run ISA '{name}'; it can run: {', '.join(_C.isas())}"
    done = run_python([sys.executable, "-c", PROGRAM], FASTBERT_ISA=name)
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == f"ValueError: {message}"
    assert fails("doctor", FASTBERT_ISA=name) == f"fastbert: error: {message}\n"


def test_nothing_is_wrong_before_the_kernels_are_used():
    assert run_python([sys.executable, "-c", "import fastbert"], FASTBERT_ISA="avx3").returncode == 0


def test_a_build_for_another_processor_says_so(monkeypatch):
    """A checkout's build has no kernels for what its processor lacked, and may be moved to one that has it."""
    from fastbert import _C

    best = _C.isas()[-1]
    said = "built for another CPU, without avx1024: `fastbert build` makes one for all"
    warning = re.escape(f"fastbert's C++ kernels run as {best}, not at their best: {said}")
    monkeypatch.delenv("FASTBERT_ISA", raising=False)
    for machine, is_slower in (([*_C.isas(), "avx1024"], True), (["avx1", *_C.isas()], False)):
        monkeypatch.setattr(_C, "machine_isas", lambda machine=machine: machine)
        monkeypatch.setattr(availability, "_extension_error", "not asked yet")
        with pytest.warns(UserWarning, match=warning) if is_slower else nullcontext():
            assert extension_error() is None
        assert (said in "".join(doctor_lines()[0])) == is_slower


def test_without_bfloat16_products_a_quantized_model_is_float32():
    from fastbert import _C

    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    config = fastbert.EncoderConfig.of_family("bert", vocab_size=20, **shape)
    chosen, expected = _C.isa(), torch.bfloat16 if _C.has_bf16() else torch.float32
    assert fastbert.quantize(fastbert.BertModel(config)).dtype == expected
    try:
        _C.set_isa("generic")
        assert fastbert.quantize(fastbert.BertModel(config)).dtype == torch.float32
        assert "bfloat16 checkpoints compute in float32" in "".join(doctor_lines()[0])
    finally:
        _C.set_isa(chosen)


def test_make_sanitize_tests_its_own_build():
    """Not this checkout's, which pytest finds first: pyproject.toml has it on the path."""
    is_sanitizing = "libasan" in os.environ.get("LD_PRELOAD", "")
    built = importlib.util.find_spec("fastbert._C")
    folder = "" if built is None else Path(str(built.origin)).parents[1].name
    assert is_sanitizing == (folder == "sanitized")


ROUTE = """
import torch
import fastbert
from fastbert import _C, ops
x, weight, ids = torch.randn(300, 32), torch.randn(70, 32), torch.arange(12).view(2, 6)
shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
model = fastbert.BertModel(fastbert.EncoderConfig.of_family("bert", vocab_size=20, **shape)).eval()
report, multiply = fastbert.backends(), ("linears", "feed_forward", "cross_entropy", "encoder", "encoder_layers")
assert {report[op]["selected"] for op in multiply} == {"cpu"}
for _ in range(3):
    assert torch.equal(ops.linear(x, weight, None), x @ weight.T)
with torch.inference_mode():
    for _ in range(3):
        actual = model(ids).last_hidden_state
    with fastbert.use_backend("torch"):
        expected = model(ids).last_hidden_state
torch.testing.assert_close(actual, expected)
assert _C.packed_bytes() == 0 and not _C.has_products()
print(_C.isa())
"""


def test_where_no_products_are_written_torch_makes_them():
    """ARM, and x86 without AVX2: all else stays ours, and no weight is packed."""
    done = run_python([sys.executable, "-c", ROUTE], FASTBERT_ISA="generic")
    assert done.stdout == "generic\n", done.stderr
    assert "torch's own" in run_python([sys.executable, "-m", "fastbert", "doctor"], FASTBERT_ISA="generic").stdout
