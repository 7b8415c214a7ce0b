"""What a captured training step is compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class NoGraphs:
    """Stands in for CUDA graphs (fastbert.cuda_graphs): runs each time, on any device, what a graph would repeat.

    So a GraphedStep, or a GraphedEncoder, with it gives the bits that one with graphs has to give.
    """

    def unsupported(self, device: torch.device) -> str | None:
        return None

    def warm(self, run: Callable[[], None]) -> None:
        run()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run

    def begin(self) -> None:
        """Callers run one after the other."""

    end = begin

    def nbytes(self, replay: Any = None) -> int:
        return 0

    def free(self, replay: Any = None) -> None:
        """Nothing is held."""
