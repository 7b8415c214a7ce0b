"""The losses of the last steps, on the device: what a log reads now and then, and a captured step can write."""

from __future__ import annotations

import torch

CAPACITY = 1024


class LossRing:
    """A place for the loss of each step until somebody reads it.

    `add` and `end_step` launch the same for every step, with the place in memory, so both can be captured; a replay of
    them is told by `count_step`.
    """

    def __init__(self, device: torch.device | str, capacity: int = CAPACITY):
        self.capacity, self.unread = capacity, 0
        self.sum = torch.zeros((), device=device)  # of the batches of this step so far
        self._losses = torch.zeros(capacity, device=device)
        self._at = torch.zeros(1, dtype=torch.int64, device=device)
        self._first = 0  # the oldest that was not read

    @property
    def is_full(self) -> bool:
        return self.unread == self.capacity

    def add(self, loss: torch.Tensor) -> None:
        """A batch's loss (), which is a part of its step's."""
        self.sum.add_(loss.detach())

    def end_step(self) -> None:
        self._losses.index_copy_(0, self._at, self.sum[None])
        self._at.add_(1).remainder_(self.capacity)
        self.sum.zero_()

    def count_step(self) -> None:
        """The oldest is lost where none was read for as many steps as there are places."""
        if self.is_full:
            self._first = (self._first + 1) % self.capacity
        else:
            self.unread += 1

    def read(self) -> torch.Tensor:
        """float32 (unread,), the oldest first, on the device: to look at them is a wait."""
        losses = self._losses.roll(-self._first)[: self.unread]
        self._first, self.unread = (self._first + self.unread) % self.capacity, 0
        return losses
