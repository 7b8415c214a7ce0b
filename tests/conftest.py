"""What every test starts from: a seed, NaN in uninitialised memory, the Triton interpreter where there is no GPU."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# Read by Triton when it is imported, which must therefore come after.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell's script starts what runs in its background with SIGINT ignored, and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What is tested is this checkout's extension, not one that `fastbert build` has made on this machine.
os.environ["FASTBERT_CACHE"] = os.devnull

# pytest-xdist's workers, and the processes they start, share the cores: one thread each, or they only wait for another.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import collector
import interpreted_like_a_gpu
import interpreter
import judging
from core_seconds import CoreSeconds
from full import mark_those_left_to_full
from seeds import SEED, manual_seed
from torch import distributed as dist

import fastbert

collector.install()
judging.install()

# `with torch.device("meta")` keeps a list of torch's constructors, made at its first use: that must come before
# they are patched below.
with torch.device("meta"):
    assert torch.empty(0).is_meta

_PACKAGE_FOLDERS = tuple(
    f"{folder}{os.sep}" for folder in (Path(fastbert.__file__).parent, Path(__file__).resolve().parents[1] / "kernels")
)


if os.environ.get("TRITON_INTERPRET") == "1":
    interpreter.mend_triton_interpreter()


def pytest_addoption(parser):
    parser.addoption("--core-seconds", type=Path, metavar="FILE", help="write what tests cost, as a table")


def pytest_configure(config):
    is_whole = config.args == config.getini("testpaths") and not config.option.keyword
    config.pluginmanager.register(
        CoreSeconds(config.option.core_seconds, is_whole and "not full" in config.option.markexpr)
    )


def pytest_report_header():
    return f"numbers are drawn from FASTBERT_TEST_SEED={SEED}"


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported and collected lives to the end: the garbage collector need not look through it each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        collector.spare_what_is_there()
        gc.enable()


def pytest_runtest_logfinish():
    collector.spare_what_was_imported()


@pytest.hookimpl(tryfirst=True)  # before -m is looked at
def pytest_collection_modifyitems(items):
    mark_those_left_to_full(items)
    # pytest-xdist's workers take tests from the ends of each other's lists. What is dear to set up stands at the
    # beginning, so that no second worker sets it up again.
    items.sort(key=lambda item: item.get_closest_marker("dear_to_set_up") is None)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """A test that breaks the error rule is judged over several draws together (judging.py)."""
    try:
        return (yield)
    except AssertionError as first:
        if "breaks_the_rule" not in vars(first):
            raise
        given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

        def body(draw: int) -> None:
            if "tmp_path" in given:
                given["tmp_path"] = pyfuncitem.funcargs["tmp_path"] / f"draw-{draw}"
                given["tmp_path"].mkdir()
            if "packed_layers" in given:
                given["packed_layers"].clear()
            pyfuncitem.obj(**given)

        judging.judge_again(body, first)
        return True


@pytest.fixture(autouse=True)
def seed():
    manual_seed(0)


def _poisoned(allocate):
    """`allocate`, filled with NaN when the package calls it: what a kernel forgets to write is then seen."""

    def wrapper(*args, **kwargs):
        # A compiled graph must not hold the poison, and meta and fake tensors have no memory.
        if torch.compiler.is_compiling():
            return allocate(*args, **kwargs)
        out = allocate(*args, **kwargs)
        caller = sys._getframe(1).f_code.co_filename
        if type(out) is torch.Tensor and out.is_floating_point() and caller.startswith(_PACKAGE_FOLDERS):
            return out if out.is_meta else out.fill_(float("nan"))
        return out

    return wrapper


@pytest.fixture(autouse=True)
def poison_uninitialised_memory(monkeypatch):
    monkeypatch.setattr(torch, "empty", _poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", _poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", _poisoned(torch.Tensor.new_empty))


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of one: reducers and sharded modules are the same as with several."""
    if not dist.is_gloo_available():
        pytest.skip("torch.distributed is without gloo")
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def products_of_a_gpu() -> Iterator[None]:
    """Interpreted products with a GPU's bits: one sum has others in another block."""
    if torch.cuda.is_available():
        pytest.skip("a GPU has products of its own")
    with interpreted_like_a_gpu.products_of_a_gpu():
        yield


@pytest.fixture
def packed_layers(monkeypatch) -> list[int]:
    import packed_layers

    return packed_layers.count(monkeypatch)
