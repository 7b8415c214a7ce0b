"""AdamW over buffers that stay where they are, by numbers that are read from memory: what a CUDA graph can replay."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fastbert.backend import Backend, register, select
from fastbert.ops._common import define_triton, triton_unsupported

# By block: where its first weight lies, how many there are, their group. gradients, means, squares: (blocks * BLOCK,),
# fp32. numbers: what step_numbers gives, fp32. Changes what is at the addresses, too. Returns the gradients' norm; NaN
# where max_norm is 0, which does not ask for it.
_OP = define_triton(
    "adamw_flat",
    "(Tensor addresses, Tensor counts, Tensor groups, Tensor(a!) gradients, Tensor(b!) means, Tensor(c!) squares,"
    " Tensor numbers, float beta1, float beta2, float eps, float max_norm) -> Tensor",
    "adamw",
    lambda addresses, counts, groups, gradients, *others: gradients.new_empty(()),
)

# Elements of a program of the kernel: 16 a thread, of four arrays. A weight begins a block, and zeros fill up its last.
BLOCK = 2048
_ALIGNED = 16  # bytes: a load of the kernel's


class FlatState:
    """Gradients, means and squares of weights, each kind in one buffer, whose memory never moves.

    weights: float32, contiguous, on one device; they stay where they are. groups: the optimizer's group of each.
    `gradients`, `means`, `squares`: float32 (blocks * 2048,), zeros at first. Where the weights lie is written down
    once: `is_of` says whether they are still there.

    Raises ValueError: there is no weight, or not a group for each; a weight is of another kind, or lies on no multiple
    of 16 bytes.
    """

    def __init__(self, weights: Sequence[torch.Tensor], groups: Sequence[int]):
        if not weights or len(weights) != len(groups):
            raise ValueError(
                f"there are {len(weights)} weights and {len(groups)} groups; there must be a group for each"
            )
        self.weights, device = list(weights), weights[0].device
        for i, weight in enumerate(self.weights):
            if weight.dtype is not torch.float32 or not weight.is_contiguous() or weight.device != device:
                raise ValueError(
                    f"weight {i} is {weight.dtype} on {weight.device}; all must be float32, contiguous and on {device}"
                )
            if weight.data_ptr() % _ALIGNED:
                raise ValueError(f"weight {i} lies on no multiple of {_ALIGNED} bytes")
        self._addresses = [weight.data_ptr() for weight in self.weights]
        sizes = torch.tensor([weight.numel() for weight in self.weights])
        blocks = (sizes + BLOCK - 1) // BLOCK
        self.first = torch.cat([blocks.new_zeros(1), blocks.cumsum(0)]).mul(BLOCK).tolist()
        of = torch.repeat_interleave(blocks)  # the weight of each block
        block_index = torch.arange(len(of)) - torch.tensor(self.first)[of] // BLOCK  # within its weight
        self.addresses = (torch.tensor(self._addresses)[of] + 4 * BLOCK * block_index).to(device)
        self.counts = (sizes[of] - BLOCK * block_index).clamp(max=BLOCK).int().to(device)
        self.groups = torch.tensor(list(groups), dtype=torch.int32)[of].to(device)
        self.num_groups = 1 + max(groups)
        self.gradients = torch.zeros(self.first[-1], device=device)
        self.means, self.squares = torch.zeros(2, self.first[-1], device=device).unbind()  # what a saved state has

    def is_of(self, weights: Sequence[torch.Tensor]) -> bool:
        """Whether these are the weights, in this order, and where they were."""
        return [weight.data_ptr() for weight in weights] == self._addresses

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The part of each weight of one of the buffers, in the weight's shape."""
        return [
            buffer[first : first + weight.numel()].view(weight.shape)
            for first, weight in zip(self.first[:-1], self.weights, strict=True)
        ]


def step_numbers(step: int, rates: Sequence[float], decays: Sequence[float], beta1: float, beta2: float) -> list[float]:
    """What step number `step`, counted from 1, goes by beside betas and eps; rates and decays are the groups'."""
    return [1.0 / (1.0 - beta1**step), (1.0 - beta2**step) ** -0.5, *rates, *decays]


def _adamw_flat_torch(state, numbers, beta1, beta2, eps, max_norm):
    norm = state.gradients.new_full((), float("nan"))
    gradients = state.gradients
    if max_norm > 0:
        norm = gradients.square().sum().sqrt()
        gradients = gradients * (max_norm / (norm + 1e-6)).clamp(max=1.0)
    state.means.mul_(beta1).add_(gradients, alpha=1.0 - beta1)
    state.squares.mul_(beta2).addcmul_(gradients, gradients, value=1.0 - beta2)
    moved = state.means / (state.squares.sqrt().mul_(numbers[1]).add_(eps)) * numbers[0]
    group = state.groups.repeat_interleave(BLOCK).long()
    rates, decays = numbers[2 : 2 + state.num_groups][group], numbers[2 + state.num_groups :][group]
    for weight, move, keep in zip(
        state.weights, state.views(rates * moved), state.views(1.0 - rates * decays), strict=True
    ):
        weight.mul_(keep).sub_(move)
    state.gradients.zero_()
    return norm


register("adamw_flat", Backend.TRITON, triton_unsupported, probe=lambda x, vector: (x.float(),))


def adamw_flat(
    state: FlatState,
    numbers: torch.Tensor,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    max_norm: float = 0.0,
    backend: str | None = None,
) -> torch.Tensor:
    """One step of AdamW, in place, and gradients of 0 behind it; returns their norm before, float32 ().

    Args:
        numbers: float32 (2 + 2 * groups,) on the state's device: what `step_numbers` gives. They are read when the step
            runs, so that a captured one goes by what the host has put there.
        max_norm: gradients that are together longer are shortened (Pascanu et al. 2013, section 3.2); 0: not, and the
            norm is NaN.

    Raises:
        ValueError: numbers of another shape, dtype or device. BackendError: the backend that was asked for cannot serve
            the call.
    """
    expected = (2 + 2 * state.num_groups,)
    if numbers.shape != expected or numbers.dtype is not torch.float32 or numbers.device != state.gradients.device:
        raise ValueError(
            f"numbers is {numbers.dtype} {tuple(numbers.shape)} on {numbers.device}; it must be float32 {expected} on"
            f" {state.gradients.device}"
        )
    chosen = select("adamw_flat", backend, state.gradients)
    with torch.no_grad():
        if chosen is Backend.TORCH:
            norm = _adamw_flat_torch(state, numbers, beta1, beta2, eps, max_norm)
        else:
            norm = _OP(
                state.addresses,
                state.counts,
                state.groups,
                state.gradients,
                state.means,
                state.squares,
                numbers,
                beta1,
                beta2,
                eps,
                max_norm,
            )
    torch.autograd.graph.increment_version(state.weights)  # for whoever keeps something made of the weights
    return norm
