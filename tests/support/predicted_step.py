"""What a training step of BERT-base should take on GPUs that nobody has lent us yet: predicted, not measured.

    python tests/support/predicted_step.py

prints the tables of docs/gpu.md: milliseconds of a step in a graph, and its parts on an H200. Masked words, bf16 under
autocast, dropout, AdamW with clipping. By count: operations of products in waves of blocks, of attention at the rates
that others reach, bytes of what is bound by memory at the rate of a copy, and kernels.
"""

from __future__ import annotations

import math
import sys
from typing import NamedTuple

LAYERS, HIDDEN, INNER, VOCAB, LABELLED = 12, 768, 3072, 30522, 0.15
WEIGHTS, OF_LAYERS = 110e6, 85e6
TILE, SLICE = 128, 1024  # of a product: rows and columns of a block, and how much of the sum one block takes at least
SHARE = 0.7  # of the sheet's peak that full waves of blocks reach
# Attention with heads of 64 on an H100, operations a second, forward and backward: FlashAttention's and cuDNN's at 512
# tokens (four products of a score forward, ten backward). Half of it at 128, where a tile is a whole sequence.
ATTENTION = {512: (335e12, 270e12), 128: (168e12, 135e12)}
H100_PEAK = 989e12
KERNELS = 162 + 150 + 84  # of a step with all layers as one op, the optimizer's included: tests/support/dry_step.py
GAP = 1e-6  # seconds between two kernels of a graph
TOKENS = (1024, 4096, 16384, 65536)


class Gpu(NamedTuple):
    """By its sheet: bf16 operations a second without sparsity, bytes a second, multiprocessors."""

    peak: float
    memory: float
    processors: int

    @property
    def copy(self) -> float:
        return 0.9 * self.memory  # an H200's copy was given to us as 4.3 TB/s


GPUS = {
    "A100": Gpu(312e12, 2.04e12, 108),
    "H100": Gpu(989e12, 3.35e12, 132),
    "H200": Gpu(989e12, 4.8e12, 132),
    "B200": Gpu(2250e12, 8.0e12, 148),
}


def product(gpu: Gpu, rows: int, columns: int, inner: int) -> float:
    """Seconds of (rows, inner) times (inner, columns): waves of blocks, or its bytes."""
    slices = max(1, inner // SLICE)
    waves = math.ceil(math.ceil(rows / TILE) * math.ceil(columns / TILE) * slices / gpu.processors)
    block = 2 * TILE * TILE * inner / slices / (SHARE * gpu.peak / gpu.processors)
    return max(waves * block, 2 * (rows * columns + (rows + columns) * inner) / gpu.copy)


def products(gpu: Gpu, tokens: int) -> float:
    total = 0.0
    for given, made in ((HIDDEN, 3 * HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, INNER), (INNER, HIDDEN)):
        one = product(gpu, tokens, made, given) + product(gpu, tokens, given, made) + product(gpu, made, given, tokens)
        total += LAYERS * one
    rows = round(LABELLED * tokens)
    for made in (HIDDEN, VOCAB):
        shapes = ((rows, made, HIDDEN), (rows, HIDDEN, made), (made, HIDDEN, rows))
        total += sum(product(gpu, *shape) for shape in shapes)
    return total


def attention(gpu: Gpu, tokens: int, length: int) -> float:
    forward, backward = (rate * gpu.peak / H100_PEAK for rate in ATTENTION[length])
    return LAYERS * tokens * length * HIDDEN * (4 / forward + 10 / backward)


def glue(gpu: Gpu, tokens: int) -> float:
    """16-bit matrices that norms, activations, sums and records read and write, of HIDDEN columns a token: forward two
    norms of 4 and the wide one twice; backward two norms of 4, the wide one four times, dqkv's sum and records of 2;
    and some 20 of embeddings and the head."""
    matrices = LAYERS * ((8 + 8) + (8 + 16 + 3 + 2)) + 20
    logits = 4 * 2 * LABELLED * VOCAB
    return tokens * (2 * matrices * HIDDEN + logits) / gpu.copy


def weights(gpu: Gpu) -> float:
    """AdamW with clipping, 36 bytes a weight; weights of layers cast, 6, and their gradients cast back, 6."""
    return (36 * WEIGHTS + 12 * OF_LAYERS) / gpu.copy


def parts_of(gpu: Gpu, tokens: int, length: int) -> dict[str, float]:
    return {
        "products": products(gpu, tokens),
        "attention": attention(gpu, tokens, length),
        "glue": glue(gpu, tokens),
        "weights": weights(gpu),
        "gaps": KERNELS * GAP,
    }


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "--:|" * len(header)]
    return "\n".join([*lines, *["| " + " | ".join(row) + " |" for row in rows]]) + "\n"


def main() -> None:
    steps, parts = [], []
    for length in ATTENTION:
        for tokens in TOKENS:
            row = []
            for gpu in GPUS.values():
                found = parts_of(gpu, tokens, length)
                seconds, most = sum(found.values()), max(found, key=lambda name: found[name])
                row.append(f"{1e3 * seconds:.1f} ({most} {found[most] / seconds:.0%})")
            steps.append((str(length), f"{tokens:,}", *row))
            found = parts_of(GPUS["H200"], tokens, length)
            numbers = [f"{1e3 * t:.2f}" for t in found.values()]
            seconds = sum(found.values())
            parts.append((str(length), f"{tokens:,}", *numbers, f"{1e-6 * tokens / seconds:.2f}"))
    sys.stdout.write(table(("length", "tokens", *GPUS), steps) + "\n")
    sys.stdout.write(table(("length", "tokens", *parts_of(GPUS["H200"], 128, 128), "M tokens/s"), parts))


if __name__ == "__main__":
    main()
