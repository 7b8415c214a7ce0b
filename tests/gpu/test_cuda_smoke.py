"""Each kernel of csrc/cuda once in the emulation: all that `make test` runs of test_cuda.py."""

from __future__ import annotations

import test_cuda
import torch


def test_each_kernel_once():
    """A sum with LayerNorm and an activation, forward and backward, and the embeddings."""
    case = {"dtype": torch.bfloat16, "rows": 6}
    test_cuda.test_add_layer_norm(**case, width=80)
    test_cuda.test_activation(**case, activation="gelu", columns=80, gated=False)
    test_cuda.test_embed(**case, width=80)
