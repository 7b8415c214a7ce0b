"""Does the fastbert that this Python has work, with its C++ kernels? A program that needs nothing of the tests.

.github/workflows/wheels.yml runs it with every wheel; `--without-kernels` is for the wheel in pure Python.
"""

from __future__ import annotations

import sys

import torch

import fastbert
from fastbert.native.availability import extension_error
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

SHAPE = {
    "vocab_size": 99,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}


def main(has_kernels: bool) -> None:
    assert (extension_error() is None) == has_kernels, extension_error()
    serves = {row["selected"] for row in fastbert.backends().values()}
    assert serves == ({"cpu", "torch"} if has_kernels else {"torch"}), serves
    torch.manual_seed(0)
    model = fastbert.BertModel(fastbert.EncoderConfig(**SHAPE)).eval()
    ids, mask = torch.randint(1, 99, (4, 17)), torch.ones(4, 17, dtype=torch.long)
    mask[0, 5:] = mask[2, 11:] = 0
    with torch.inference_mode():
        actual = model(ids, mask).last_hidden_state
        with fastbert.use_backend("torch"):
            baseline = model(ids, mask).last_hidden_state
            oracle = model.double()(ids, mask).last_hidden_state
    assert_close_to_reference(actual, oracle, baseline, GRADIENT_FACTOR, "an encoder of two layers")


if __name__ == "__main__":
    main(sys.argv[1:] != ["--without-kernels"])
