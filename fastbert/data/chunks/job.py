"""Chunks of texts through a model: what it computes of each, and what is made of all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from fastbert.data.chunks import TokenChunks
from fastbert.data.tokenized import run_batches
from fastbert.packed_inputs import PackedInputs

Rows = Sequence[np.ndarray] | np.ndarray  # one a chunk
Result = TypeVar("Result")
Another = TypeVar("Another")


@dataclass(frozen=True)
class ChunkJob(Generic[Result]):
    """chunks: of some texts. forward: what the model makes of a batch of them. reduce: of that, and of their places
    among all chunks, one array a chunk. finish: what is said of the texts, by these arrays in the order of windows.
    """

    chunks: TokenChunks
    forward: Callable[[PackedInputs], torch.Tensor]
    reduce: Callable[[torch.Tensor, np.ndarray], Rows]
    finish: Callable[[Rows], Result]

    def then(self, more: Callable[[Result], Another]) -> ChunkJob[Another]:
        """The job of which `more` makes the result of this one's."""
        return ChunkJob(self.chunks, self.forward, self.reduce, lambda rows: more(self.finish(rows)))

    @torch.inference_mode()
    def result(self, rows: Rows) -> Result:
        """What is said of the texts, by the arrays of all windows."""
        return self.finish(rows)

    @torch.inference_mode()
    def compute(self, batch: PackedInputs, places: np.ndarray) -> Rows:
        """The arrays of the chunks at `places`, which are in `batch`."""
        return self.reduce(self.forward(batch), places)

    def run(
        self,
        device: torch.device,
        batch_tokens: int | None = None,
        batch_size: int | None = None,
        *,
        share: int | None = None,
        on_tokens: Callable[[int], Any] = lambda tokens: None,
        on_batch: Callable[[int], Any] = lambda chunks: None,
    ) -> Result:
        """All of it here. The arguments are those of `run_batches`; `on_tokens(tokens)` is called after each batch."""
        results: Any = [None] * len(self.chunks)
        lengths = self.chunks.lengths
        batches = run_batches(
            self.forward, self.chunks, device, batch_tokens, batch_size, share=share, on_batch=on_batch
        )
        with torch.inference_mode():
            for places, output in batches:
                rows = self.reduce(output, places)
                if isinstance(rows, np.ndarray):  # many small arrays between the large ones of batches split the heap
                    if not isinstance(results, np.ndarray):
                        results = np.empty((len(results), *rows.shape[1:]), rows.dtype)
                    results[places] = rows
                else:
                    for i, row in zip(places.tolist(), rows, strict=True):
                        results[i] = row
                on_tokens(int(lengths[places].sum()))
        return self.result(results)


def tokens_at(chunks: TokenChunks, places: np.ndarray) -> np.ndarray:
    """The places, among all tokens, of those of the chunks at `places`: a batch's tokens, int64 (tokens,)."""
    return np.concatenate([np.arange(chunks.offsets[i], chunks.offsets[i + 1]) for i in places])


def chosen(packed: torch.Tensor, which: np.ndarray) -> torch.Tensor:
    """The rows of packed tokens (total_tokens, n) that `which`, a truth value a token, chooses."""
    return packed if which.all() else packed[torch.from_numpy(np.flatnonzero(which)).to(packed.device)]


def on_host(packed: torch.Tensor) -> np.ndarray:
    return packed.to(torch.promote_types(packed.dtype, torch.float32)).cpu().numpy()
