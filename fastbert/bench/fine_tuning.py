"""A fine-tuning step side by side: forward, backward and AdamW of a sentence classifier, ours against transformers'.

Batches are ragged sentences (lengths log-normal, mean 12, at most 64), in bfloat16 autocast over float32 weights, with
PyTorch's fused AdamW on both sides. The logits of both are checked against transformers in float64 before any timing.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from fastbert.bench.timing import peak_memory
from fastbert.testing.cases import MODELS
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

CONTESTANTS = ("transformers", "fastbert")
MEAN_LENGTH, LONGEST, SPREAD = 12.0, 64, 0.6  # of the log-normal's logarithm
BATCHES = 8  # different ones, in turn
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def make_batches(batch_size: int) -> list[Batch]:
    """[(input_ids, attention_mask, labels)], padded on the right to each batch's longest."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(BATCHES):
        normal = torch.randn(batch_size, generator=generator) * SPREAD + math.log(MEAN_LENGTH) - SPREAD**2 / 2
        lengths = normal.exp().round().clamp(3, LONGEST)
        mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
        ids = torch.randint(1000, 30000, mask.shape, generator=generator) * mask
        batches.append((ids, mask, torch.randint(0, 2, (batch_size,), generator=generator)))
    return batches


def build(contestant: str) -> torch.nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(**MODELS["minilm"])  # two labels unless told otherwise
    theirs = transformers.BertForSequenceClassification(config)
    if contestant == "transformers":
        return theirs
    from fastbert.config import EncoderConfig
    from fastbert.models.classes import CLASSES

    ours = CLASSES["bert", "SequenceClassification"](EncoderConfig.from_dict(config.to_dict()))
    ours.load_state_dict(theirs.state_dict())
    return ours


def check(contestant: str, batch: Batch) -> None:
    """The logits of four sentences, in eval mode. Raises AssertionError."""
    ids, mask = (t[:4] for t in batch[:2])
    with torch.no_grad():
        oracle = build("transformers").double().eval()(input_ids=ids, attention_mask=mask).logits
        with torch.autocast("cpu", torch.bfloat16):
            baseline = build("transformers").eval()(input_ids=ids, attention_mask=mask).logits
            actual = build(contestant).eval()(input_ids=ids, attention_mask=mask).logits
    assert_close_to_reference(actual, oracle, baseline, GRADIENT_FACTOR, contestant)


def contest(task: dict[str, Any], answer: Callable[[dict[str, Any]], None]) -> None:
    """A worker's process: a turn is one step on each of the batches; seconds are those of a step."""
    batches = make_batches(task["batch_size"])
    if task["check"]:  # in a process of its own: the oracle must not count as the contestant's memory
        check(task["contestant"], batches[0])
        return answer({})
    model = build(task["contestant"]).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)

    def step(ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for batch in batches:
        step(*batch)
    answer({})
    tokens = sum(int(mask.sum()) for _, mask, _ in batches)
    for _ in sys.stdin:
        start = time.perf_counter()
        for batch in batches:
            step(*batch)
        seconds = (time.perf_counter() - start) / len(batches)
        answer({"seconds": seconds, "tokens": tokens / len(batches), "peak_memory": peak_memory()})
