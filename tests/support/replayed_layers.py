"""Layers as one op that are called again (fastbert/ops/_layer_replay.py), in Triton's interpreter."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import torch
from layer_specs import CASES, CU_SEQLENS, HIDDEN, Layer, fused, make
from seeds import manual_seed, torch_generator
from torch.utils._python_dispatch import _disable_current_modes
from trained_layers import Several, differentiate

from fastbert.backend import use_backend
from fastbert.ops import _layer_replay, _recorded_calls
from fastbert.ops import encoder_layers_training_gpu as gpu
from fastbert.ops._layer_kernels import LayerKernels

OPS = ("encoder_layers_training", "encoder_layers_recomputing")
STACKS = {
    "post": ("post, no biases", "post, grouped"),
    "post, alike": ("post", "post"),
    "modernbert": ("global", "local"),
    "pre": ("pre", "pre, grouped, merged"),
    "rms": ("rms, grouped", "rms, grouped"),
}
DROPOUTS = (0.1, 0.2, 0.3, 0.4)
OFFSETS = CU_SEQLENS[:4]
TOKENS = int(OFFSETS[-1]) + 1  # a row of slack


def know_nothing(monkeypatch) -> None:
    """And call the tests' fill of new memory (conftest.py) again, too."""
    monkeypatch.setattr(_layer_replay, "_known", {})
    monkeypatch.setitem(_recorded_calls._AGAIN, torch.ops.aten.fill_.Scalar, torch.Tensor.fill_)


def launch_on_addresses(monkeypatch) -> None:
    """As on a GPU, but computed."""
    from fastbert.kernels.launching import Bound

    monkeypatch.setattr(LayerKernels, "_has_addresses", lambda kernels: True)
    monkeypatch.setattr(Bound, "around_addresses", around_addresses)
    monkeypatch.setattr(Bound, "_by_pointers", launch)


def around_addresses(bound, *dtypes) -> tuple:
    def run(*addresses: int | None) -> None:
        assert not any(at % 16 for at in addresses if at is not None), "compiled for others"
        launch(bound, dtypes, addresses)

    return run, (), ()


def launch(bound, dtypes: Sequence[torch.dtype | None], addresses: Sequence[int | None]) -> None:
    with _disable_current_modes():
        bound(*[None if at is None else tensor_at(at, dtype) for at, dtype in zip(addresses, dtypes, strict=True)])


def tensor_at(address: int, dtype: torch.dtype) -> torch.Tensor:
    """One element, of which a kernel takes the address; nothing lies at 0."""
    if address == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer((ctypes.c_byte * dtype.itemsize).from_address(address), dtype=dtype)


def layers_of(name: str, mode: str = "float32", dropouts: tuple[float, ...] = DROPOUTS) -> list[Layer]:
    """With one activation, as the fused op asks."""
    layers = [make(CASES[each].with_dropouts(*dropouts), i) for i, each in enumerate(STACKS[name])]
    dtype = torch.bfloat16 if mode == "bfloat16" else torch.float32
    return [layer.map(lambda t: t.to(dtype)) for layer in layers]


def x_of(step: int, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch_generator(step))


def stepped(
    layers: list[Layer],
    step: int,
    op: str = OPS[0],
    mode: str = "float32",
    needs_dx: bool = True,
    cu_seqlens: torch.Tensor = OFFSETS,
    positions: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Output and gradients of a step whose weights, x and seeds are its own."""

    def run(several: Several, x: torch.Tensor) -> torch.Tensor:
        manual_seed(step)
        return fused(op, several.layers, x, cu_seqlens=cu_seqlens, positions=positions)

    mine = Several([layer.map(lambda t: t * (1 + step / 8)) for layer in layers])
    x = x_of(step).to(next(iter(mine.tensors().values())).dtype)
    with use_backend("triton"), torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        return differentiate(run, mine, x, needs_dx)


def plainly(monkeypatch, call: Callable):
    """Without anything being called again."""
    with monkeypatch.context() as m:
        m.setattr(gpu, "take", lambda *arguments: None)
        return call()


def recorded() -> list[_layer_replay.Recorded]:
    return [each for spare in _layer_replay._known.values() for each in spare or ()]


def memories(each: _layer_replay.Recorded) -> Iterator[_recorded_calls.Memory]:
    yield from each._of_weights
    for calls in (each._forward, each._backward):
        yield from () if calls is None else calls._memories


def assert_nothing_is_held() -> None:
    for each in recorded():
        assert all(memory.storage.nbytes() == 0 for memory in memories(each))
        for calls in (each._forward, each._backward):
            tensors = [] if calls is None else [t for *_, t in _recorded_calls._tensors_of(calls._calls)]
            assert all(t.untyped_storage().nbytes() == 0 for t in tensors), "a call's argument"


class Step(SimpleNamespace):
    """A forward whose backward comes when it is asked for: layers, x, out."""

    @classmethod
    def of(cls, layers: list[Layer], step: int) -> Step:
        mine = [layer.map(lambda t: (t * (1 + step / 8)).detach().requires_grad_()) for layer in layers]
        x = x_of(step).requires_grad_()
        manual_seed(step)
        with use_backend("triton"), torch.autocast("cpu", torch.bfloat16):
            return cls(
                layers=mine, x=x, out=fused(OPS[0], mine, x, cu_seqlens=OFFSETS), cotangent=x_of(step + 100).bfloat16()
            )

    def gradients(self, **options) -> dict[str, torch.Tensor]:
        leaves = {"dx": self.x, **Several(self.layers).tensors()}
        with use_backend("triton"):
            found = torch.autograd.grad(self.out, list(leaves.values()), self.cotangent, **options)
        return {"out": self.out.detach().clone(), **dict(zip(leaves, found, strict=True))}


def expected_of(monkeypatch, layers: list[Layer], step: int) -> dict[str, torch.Tensor]:
    return plainly(monkeypatch, lambda: Step.of(layers, step).gradients())
