"""Packed weights in a process: their memory goes with them, in every thread; threads, errors, warnings."""

from __future__ import annotations

import copy
import gc
import signal
import sys
import textwrap
import threading
import weakref

import pytest
import torch
import warm
from isas import packs
from packed_bytes import bytes_still_held

import fastbert
from fastbert import ops
from fastbert.native.availability import extension_error

if extension_error() is not None:
    pytest.skip(extension_error(), allow_module_level=True)
from fastbert import _C

pytestmark = packs

ROWS = _C.most_rows_without_copy + 1
OUT, IN = 128, 64
ONE = OUT * IN * 4


@pytest.fixture(autouse=True)
def before() -> int:
    return bytes_still_held()


def call(weight: torch.Tensor) -> torch.Tensor:
    """Twice: the second call keeps a copy."""
    x = torch.ones(ROWS, weight.shape[1])
    ops.linear(x, weight, None, backend="cpu")
    return ops.linear(x, weight, None, backend="cpu")


def call_twice(model: torch.nn.Module) -> None:
    for _ in range(2):
        model(torch.ones(ROWS, 1, dtype=torch.long))


def test_copies_go_with_a_model_at_once(before):
    config = fastbert.EncoderConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    for dtype in (torch.float32, torch.int8):
        model = fastbert.BertModel(config).eval()
        if dtype is torch.int8:
            fastbert.quantize(model)
        call_twice(model)
        twin = copy.deepcopy(model)
        held = _C.packed_bytes()
        assert held > before
        call_twice(twin)
        assert _C.packed_bytes() - before == 2 * (held - before)
        del twin
        gc.collect()
        assert _C.packed_bytes() == held
        del model
        gc.collect()
        assert _C.packed_bytes() == before


@pytest.mark.parametrize("split", (0, 1))
def test_what_int8_has_beside_panels_is_counted(split, before):
    weight = torch.ones(OUT, IN, dtype=torch.int8)
    weight[:, :2] = 64 + split  # 129 would be too much for one product of pairs
    ops.linear(torch.ones(3, IN), weight, None, weight_scale=torch.ones(OUT), backend="cpu")
    residuals = (OUT + 1) * 4 + split * OUT * 8 if _C.isa() in ("avx2", "avx512") else 0
    assert _C.packed_bytes() - before == OUT * IN + OUT * 4 + residuals


@pytest.mark.parametrize("holder", ("view", "parameter", "autograd", "storage"))
def test_copies_live_as_long_as_the_storage_does(holder, before):
    weight = torch.randn(OUT, IN)
    first = call(weight)
    x = torch.randn(OUT, OUT, requires_grad=True)
    held = {
        "view": lambda w: w[3:],
        "parameter": torch.nn.Parameter,
        "autograd": lambda w: x @ w,  # saved by C++ alone
        "storage": torch.Tensor.untyped_storage,
    }[holder](weight)
    del weight
    gc.collect()
    assert _C.packed_bytes() - before == ONE
    del held
    assert _C.packed_bytes() == before
    again = torch.randn(OUT, IN)  # likely where the first was
    assert not torch.equal(call(again), first)
    assert torch.equal(call(again), call(again.clone()))


def test_resizing_a_storage_adds_nothing(before):
    weight = torch.randn(OUT, IN)
    storage, size = weight.untyped_storage(), weight.untyped_storage().nbytes()
    kept = []
    for _ in range(5):
        values = torch.randn(OUT, IN)
        storage.resize_(0)
        kept.append(torch.empty(OUT, IN))  # takes the memory, so that the storage moves
        storage.resize_(size)
        weight.copy_(values)
        assert torch.equal(call(weight), call(values))
        assert _C.packed_bytes() - before == 2 * ONE
    storage.resize_(0)
    with pytest.raises(
        RuntimeError, match=f"weight needs {ONE} bytes of storage, but its storage has 0: it was resized"
    ):
        call(weight)
    module = torch.nn.Module()
    module.register_buffer("weight", weight)
    del values
    fastbert.repack(module)
    assert _C.packed_bytes() == before


def test_slices_that_move_along_a_storage_do_not_add_up(before):
    whole = torch.randn(40 * OUT, IN)
    for first in range(0, 39 * OUT, 8):
        assert torch.equal(call(whole[first : first + OUT]), call(whole[first : first + OUT].clone()))
    assert _C.packed_bytes() - before <= 8 * whole.nbytes


def test_a_storage_is_watched_once(monkeypatch):
    watched: list[object] = []
    finalize = weakref.finalize
    monkeypatch.setattr(weakref, "finalize", lambda *args: watched.append(args) or finalize(*args))
    weight = torch.nn.Linear(IN, OUT, bias=False)
    for _ in range(3):
        call(weight.weight)
        fastbert.repack(weight)
        call(weight.weight.bfloat16().float())  # another storage each time
        call(weight.weight[: OUT // 2])
    assert len(watched) == 1 + 3


def test_an_interrupt_in_a_kernels_call_to_python_is_raised_behind_the_kernel(monkeypatch):
    """A signal that came while a kernel ran has its handler run where the kernel calls Python."""
    module, interrupts = sys.modules["fastbert.ops.linear.linear"], [signal.SIGINT]
    let_go = module._let_go_of_moved

    def interrupted(storage):
        if interrupts:
            signal.raise_signal(interrupts.pop())
        let_go(storage)

    monkeypatch.setattr(module, "_let_go_of_moved", interrupted)
    weight = torch.randn(OUT, IN)
    with pytest.raises(KeyboardInterrupt):
        call(weight)
        pytest.fail("not reached")
    found, packed = call(weight), _C.packed_bytes()
    assert torch.equal(found, call(weight.clone())) and not interrupts
    del weight
    assert _C.packed_bytes() < packed  # its memory is watched


def test_strided_weights_leave_nothing(before):
    """Neither rows nor columns lie whole: a copy is packed at each call."""
    weight = torch.randn(OUT, 2 * IN)[:, ::2]
    assert torch.equal(call(weight), call(weight.contiguous()))
    assert _C.packed_bytes() == before


def test_weights_die_in_all_threads_while_others_pack(before):
    """Finalizers run at any allocation, in any thread, and wait for a thread that packs."""

    def work() -> None:
        for _ in range(200):
            cycle = [torch.randn(OUT, IN)]
            cycle.append(cycle)
            call(cycle[0])
            del cycle
            gc.collect(0)

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    gc.collect()
    assert _C.packed_bytes() == before


def test_repack_says_what_it_takes():
    with pytest.raises(TypeError, match="repack takes a module or a SentenceEncoder, not Tensor"):
        fastbert.repack(torch.zeros(3))


def run(program: str) -> str:
    done = warm.run([sys.executable, "-c", textwrap.dedent(program)])
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def test_a_process_ends_quietly_with_packed_weights_alive():
    assert (
        run("""
        import torch, fastbert
        from fastbert import ops
        weight = torch.randn(64, 64)
        with torch.inference_mode():
            ops.linear(torch.ones(3, 64), weight, None, backend="cpu")
        torch.keep = [weight]
        torch.keep.append(torch.keep)
    """)
        == ""
    )


def test_each_warning_comes_once_in_a_process():
    stderr = run("""
        import torch, warnings
        from fastbert import _C, ops
        warnings.simplefilter("always")
        x = torch.randn(_C.most_rows_without_copy + 1, 64)
        with torch.inference_mode():
            weights = [torch.randn(64, 64) for _ in range(2)]
        weights += [torch.randn(64, 64) for _ in range(2)]
        for weight in weights:
            for _ in range(3):
                ops.linear(x, weight, None, backend="cpu")
                if not weight.is_inference():
                    weight.data[5, 7] -= 100  # which the next call sees, and says nothing
            with torch.inference_mode():
                for _ in range(_C.packed_check_calls):
                    ops.linear(x, weight, None, backend="cpu")
    """)
    assert stderr.count("UserWarning") == 2, stderr
    assert stderr.count("Call fastbert.repack(model) right after such a write") == 1
    assert stderr.count("convert or move the model outside of torch.inference_mode") == 1
