"""A fine-tuning step side by side: forward, backward and AdamW of a sentence classifier, ours against transformers'.

Batches are ragged sentences (lengths log-normal, mean 12, at most 64) or of one length, in bfloat16 autocast over
float32 weights, with PyTorch's fused AdamW on all sides. The logits of all are checked against transformers in float64
before any timing.
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

CONTESTANTS = ("transformers", "transformers-compile", "fastbert")
MEAN_LENGTH, LONGEST, SPREAD = 12.0, 64, 0.6  # of the log-normal's logarithm
BATCHES = 8  # different ones, in turn
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def make_batches(spec: str) -> list[Batch]:
    """[(input_ids, attention_mask, labels)], padded on the right to each batch's longest. spec: a number of sentences,
    or "4x512" for so many of one length, of which there is one batch.
    """
    generator = torch.Generator().manual_seed(1)
    batch_size, length = (int(part or 0) for part in spec.partition("x")[::2])
    batches = []
    for _ in range(1 if length else BATCHES):
        normal = torch.randn(batch_size, generator=generator) * SPREAD + math.log(MEAN_LENGTH) - SPREAD**2 / 2
        lengths = torch.full((batch_size,), length) if length else normal.exp().round().clamp(3, LONGEST)
        mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
        ids = torch.randint(1000, 30000, mask.shape, generator=generator) * mask
        batches.append((ids, mask, torch.randint(0, 2, (batch_size,), generator=generator)))
    return batches


def build(contestant: str, name: str) -> torch.nn.Module:
    import transformers

    torch.manual_seed(0)
    fields = dict(MODELS[name])
    model_type = fields.pop("model_type", "bert")
    config = transformers.AutoConfig.for_model(model_type, **fields)  # two labels unless told otherwise
    theirs = transformers.AutoModelForSequenceClassification.from_config(config)
    if contestant != "fastbert":
        if contestant == "transformers-compile":
            theirs.compile()
        return theirs
    from fastbert.config import EncoderConfig
    from fastbert.models.classes import CLASSES

    ours = CLASSES[model_type, "SequenceClassification"](EncoderConfig.from_dict(config.to_dict()))
    ours.load_state_dict(theirs.state_dict())
    return ours


def check(contestant: str, name: str, batch: Batch) -> None:
    """The logits of four sentences, in eval mode. Raises AssertionError."""
    ids, mask = (t[:4] for t in batch[:2])
    with torch.no_grad():
        oracle = build("transformers", name).double().eval()(input_ids=ids, attention_mask=mask).logits
        with torch.autocast("cpu", torch.bfloat16):
            baseline = build("transformers", name).eval()(input_ids=ids, attention_mask=mask).logits
            actual = build(contestant, name).eval()(input_ids=ids, attention_mask=mask).logits
    assert_close_to_reference(actual, oracle, baseline, GRADIENT_FACTOR, contestant)


def contest(task: dict[str, Any], answer: Callable[[dict[str, Any]], None]) -> None:
    """A worker's process: a turn is one step on each of the batches; seconds are those of a step."""
    batches = make_batches(task["batch"])
    if task["check"]:  # in a process of its own: the oracle must not count as the contestant's memory
        check(task["contestant"], task["model"], batches[0])
        return answer({})
    model = build(task["contestant"], task["model"]).train()
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
