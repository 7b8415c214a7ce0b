"""Choosing a backend: the order, forced choices, reasons, and which one really ran."""

from __future__ import annotations

import sys

import pytest
import torch
import warm

import fastbert
from fastbert import ops
from fastbert.backend import Backend, parse_backend, register, select, use_backend
from fastbert.errors import BackendError
from fastbert.native.availability import cuda_error, extension_error


@pytest.fixture
def probe_op(monkeypatch):
    """An op whose cpu backend objects to more than 2 rows and whose triton backend always objects, and a plain one."""
    monkeypatch.setattr(fastbert.backend, "SUPPORTS", {"plain": {}})
    register("probe", Backend.CPU, lambda x: f"{x.shape[0]} rows, the limit is 2" if x.shape[0] > 2 else None)
    register("probe", Backend.TRITON, lambda x: "no GPU")


def test_auto_takes_the_first_that_supports_the_call(probe_op):
    assert select("probe", None, torch.zeros(2, 1)) is Backend.CPU
    assert select("probe", None, torch.zeros(3, 1)) is Backend.TORCH
    assert select("probe", "auto", torch.zeros(2, 1)) is Backend.CPU


def test_a_named_backend_serves_or_raises_with_its_reason(probe_op):
    assert select("probe", "torch", torch.zeros(2, 1)) is Backend.TORCH
    with pytest.raises(BackendError, match="backend 'cpu' cannot serve probe: 3 rows, the limit is 2"):
        select("probe", "cpu", torch.zeros(3, 1))
    with pytest.raises(BackendError, match="there is no cuda kernel for probe"):
        select("probe", "cuda", torch.zeros(2, 1))
    with pytest.raises(ValueError, match="unknown backend 'gpu'; valid names: auto, torch, cpu, triton, cuda"):
        parse_backend("gpu")


def test_use_backend_is_strict_where_the_backend_has_kernels(probe_op):
    register("plain", Backend.CUDA, lambda x: "no GPU")
    with use_backend("cpu"):
        assert select("probe", None, torch.zeros(2, 1)) is Backend.CPU
        assert select("plain", None, torch.zeros(2, 1)) is Backend.TORCH
        assert select("probe", "torch", torch.zeros(2, 1)) is Backend.TORCH
        with pytest.raises(BackendError), use_backend("triton"):
            select("probe", None, torch.zeros(2, 1))
        assert select("probe", None, torch.zeros(2, 1)) is Backend.CPU  # restored after the exception
    with use_backend("torch"):
        assert select("probe", None, torch.zeros(2, 1)) is Backend.TORCH


def test_environment_variable_sets_the_start_value():
    program = "from fastbert.backend import _choice; print(_choice.forced.value)"
    run = [sys.executable, "-c", program]
    out = warm.run(run, env={"FASTBERT_BACKEND": "torch", "PATH": ""})
    assert out.stdout.strip() == "torch"
    # Importing the package says nothing yet: what is wrong is said where it matters, and by the command line in a line.
    run[-1] = f"import fastbert; print('there it is'); {program}"
    out = warm.run(run, env={"FASTBERT_BACKEND": "fast", "PATH": ""})
    assert out.stdout.strip() == "there it is"
    assert out.stderr.splitlines()[-1] == (
        "ValueError: FASTBERT_BACKEND: unknown backend 'fast'; valid names: auto, torch, cpu, triton, cuda"
    )


def test_report_names_every_op_and_every_other_backends_reason():
    report = fastbert.backends("cpu", torch.float32)
    assert set(report) == {
        "adamw",
        "add_layer_norm",
        "add_rms_norm",
        "attention",
        "cross_entropy",
        "dropout",
        "embed_layer_norm",
        "encoder",
        "encoder_layers",
        "encoder_layers_training",
        "feed_forward",
        "linears",
        "maxsim",
        "normalize",
        "pack",
        "pooling",
        "unpack",
    }
    for op, row in report.items():
        assert set(row) - {"selected"} == {b.value for b in Backend} - {row["selected"], "torch"}, op
        assert all(row.values()), op
    expected = "cpu" if extension_error() is None else "torch"
    assert report["add_layer_norm"]["selected"] == expected
    assert "float64" in fastbert.backends("cpu", torch.float64)["add_layer_norm"]["cpu"]


@pytest.mark.parametrize("name", ("triton", "cuda"))
def test_a_backend_that_cannot_serve_is_reported(name, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with use_backend(name):
        report = fastbert.backends("cpu", torch.float32)
    assert report["add_layer_norm"]["selected"] == "none" and report["add_layer_norm"][name] == "tensors are on cpu"
    assert report["encoder_layers"]["selected"] == "torch"  # of which it has no kernel: torch runs it
    assert all(all(row.values()) and "torch" not in set(row) - {"selected"} for row in report.values())


def test_a_missing_cuda_part_is_said():
    error = cuda_error()
    if extension_error() is not None:
        assert error == extension_error()
    elif torch.version.cuda is None:
        assert error == "the C++ extension was built without its CUDA part"
    assert fastbert.backends("cpu")["add_layer_norm"]["cuda"] == "tensors are on cpu"
    table, one = torch.ones(3, 8, requires_grad=True), torch.ones(8)
    with pytest.raises(BackendError, match="cannot serve embed_layer_norm: it has no backward"):
        select("embed_layer_norm", "cuda", table, table, None, one, one)


def test_the_backend_that_was_chosen_is_the_one_that_ran():
    """By the registered op's name in a profile."""
    if extension_error() is not None:
        pytest.skip(extension_error())
    x, weight = torch.randn(4, 64), torch.ones(64)

    def ran(backend):
        with torch.profiler.profile() as profile, use_backend(backend):
            ops.add_layer_norm(x, x, weight, weight)
        return {event.key for event in profile.key_averages()}

    assert "fastbert::add_layer_norm_fwd_cpu" in ran("auto")
    assert "fastbert::add_layer_norm_fwd_cpu" in ran("cpu")
    names = ran("torch")
    assert "aten::layer_norm" in names and not any(name.startswith("fastbert::") for name in names)
