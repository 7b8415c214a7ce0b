"""What a captured training step is compared with."""

from __future__ import annotations

from collections.abc import Callable

import torch


class NoGraphs:
    """Stands in for CUDA graphs (fastbert.training.graphed): runs each time, on any device, what a graph would repeat.

    So a GraphedStep with it gives the bits that one with graphs has to give.
    """

    def unsupported(self, device: torch.device) -> str | None:
        return None

    def warm(self, run: Callable[[], None]) -> None:
        run()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run

    def nbytes(self) -> int:
        return 0

    def free(self) -> None:
        """Nothing is held."""
