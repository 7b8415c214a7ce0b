"""MasterWeights: an optimizer that keeps float32 copies of bfloat16 weights (Micikevicius et al. 2018, section 3.1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class MasterWeights:
    """Wraps an optimizer of a bfloat16 model's parameters, so that updates happen in float32.

    bfloat16 has 8 bits of precision. An update below 1/256 of its weight would be rounded away, and most updates are.
    MasterWeights keeps float32 copies of the weights and steps those. After each step the model gets them, rounded.
    Parameters that are float32 already are stepped in place. Give `.optimizer` to a scheduler.

        optimizer = fastbert.MasterWeights(torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True))

    Memory: 4 bytes a weight for the master and 4 for its gradient, beside the 2 + 2 of the model.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        """Raises ValueError when the optimizer has stepped already: its state would not be the masters'."""
        if optimizer.state:
            raise ValueError("MasterWeights needs an optimizer that has not stepped yet")
        self.optimizer = optimizer
        self.model_weights: list[torch.Tensor] = []
        self.masters: list[torch.Tensor] = []
        for group in optimizer.param_groups:
            group["params"] = [self._master_of(weight) for weight in group["params"]]

    def _master_of(self, weight: torch.Tensor) -> torch.Tensor:
        if weight.dtype == torch.float32:
            return weight
        master = weight.detach().float().requires_grad_()
        self.model_weights.append(weight)
        self.masters.append(master)
        return master

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the optimizer with the model's gradients. `closure` is that of torch's optimizers."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for weight, master in zip(self.model_weights, self.masters, strict=True):
            if weight.grad is None:
                master.grad = None
            elif master.grad is None:
                master.grad = weight.grad.float()
            else:
                master.grad.copy_(weight.grad)
        self.optimizer.step()
        torch._foreach_copy_(self.model_weights, self.masters)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the model's gradients. Those of the float32 copies keep their memory; step() writes them again."""
        masters = set(map(id, self.masters))
        stepped = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        for weight in (*self.model_weights, *(w for w in stepped if id(w) not in masters)):
            if set_to_none:
                weight.grad = None
            elif weight.grad is not None:
                weight.grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict(), "masters": [master.detach() for master in self.masters]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state. Raises ValueError, and changes nothing, if it is that of another model."""
        saved = state_dict["masters"]
        shapes, expected = [tuple(m.shape) for m in saved], [tuple(m.shape) for m in self.masters]
        if shapes != expected:
            raise ValueError(f"the saved masters have shapes {shapes}, the model's {expected}")
        self.optimizer.load_state_dict(state_dict["optimizer"])
        for master, weight, value in zip(self.masters, self.model_weights, saved, strict=True):
            master.copy_(value)
            weight.copy_(value)
