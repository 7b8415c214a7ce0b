"""The emulation of CUDA that tests/gpu/test_cuda.py trusts: it sees the faults that a kernel could have."""

from __future__ import annotations

import os
import subprocess

import cuda_kernels as cuda
import pytest

pytestmark = pytest.mark.full


def run(fault: str, order: str = "up") -> subprocess.CompletedProcess:
    program = cuda.compile_once("faults", [cuda.HERE / "cuda_faults.cpp"])
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    return subprocess.run([program, fault, order], capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("order", ("up", "down"))
def test_barriers_and_shuffles_hand_over(order):
    done = run("none", order)
    assert done.returncode == 0, done.stderr
    assert [float(value) for value in done.stdout.split()] == [63 - (i ^ 1) for i in range(64)]


@pytest.mark.parametrize(
    "fault,message",
    (
        ("writes_beyond_a_buffer", "heap-buffer-overflow"),
        ("reads_beyond_shared_memory", "use-after-poison"),
        ("loads_16_bytes_from_4", "misaligned address"),
        ("skips_a_barrier", "a barrier that some threads never reach"),
        ("leaves_before_a_barrier", "a barrier that some threads never reach"),
        ("skips_a_shuffle", "a shuffle that some lanes of the warp never reach"),
        ("mixes_shuffles", "lanes of a warp are at different shuffles"),
    ),
)
@pytest.mark.parametrize("order", ("up", "down"))
def test_what_would_fail_on_a_gpu_ends_the_program(fault, message, order):
    done = run(fault, order)
    assert done.returncode != 0
    assert message in done.stderr


def test_shared_memory_is_not_zero_when_a_block_begins():
    assert set(run("reads_unset_shared_memory").stdout.split()) <= {"nan", "-nan"}


@pytest.mark.parametrize("fault", ("lacks_a_barrier", "writes_what_others_still_read"))
def test_a_barrier_that_is_missing_shows_as_two_results(fault):
    up, down = run(fault, "up"), run(fault, "down")
    assert up.returncode == down.returncode == 0
    assert up.stdout != down.stdout
