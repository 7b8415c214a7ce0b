"""One short text on a GPU: a call's latency, eager and through CUDA graphs; graphs' outputs on batches of all kinds."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import fastbert
from benchmarks.gpu.record import Record
from fastbert.testing.cases import MODELS, attention_mask
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

LENGTH = 32


def run_part(record: Record) -> None:
    """The part `graphs`."""
    models = ("tiny",) if record.smoke else ("bert-base", "bert-large", "minilm")
    for name in models:
        if name != "bert-large":
            record.run(f"outputs {name}", partial(check, record, name))
        record.run(f"latency {name}", partial(latency, record, name))


def build(record: Record, name: str) -> Any:
    torch.manual_seed(0)
    config = fastbert.EncoderConfig.of_family("bert", **MODELS[name])
    with torch.device(record.device):
        model = fastbert.BertModel(config)
    return model.to(torch.bfloat16).eval()


def batches(record: Record) -> list[dict[str, torch.Tensor]]:
    """Of many buckets, padded on every side and packed."""
    generator = torch.Generator().manual_seed(2)
    found: list[dict[str, Any]] = []
    sizes = ((1, 9), (3, 17)) if record.smoke else ((1, 1), (1, 32), (2, 100), (5, 33), (16, 64), (8, 512), (64, 128))
    for i, (size, length) in enumerate(sizes):
        ids = torch.randint(1000, 30000, (size, length), generator=generator)
        for pattern in ("none", "right", "left", "holes"):
            mask = attention_mask(pattern, size, length, i)
            found.append({"input_ids": ids, **({} if mask is None else {"attention_mask": mask})})
        offsets = torch.arange(0, size * length + 1, length, dtype=torch.int32)
        found.append({"input_ids": ids.flatten(), "cu_seqlens": offsets, "max_seqlen": length})
    return [{n: t.to(record.device) if isinstance(t, torch.Tensor) else t for n, t in b.items()} for b in found]


def check(record: Record, name: str) -> dict[str, Any]:
    """Through graphs as without them: bit for bit, or at least by the error rule; twice over, from old buffers."""
    model = build(record, name)
    oracle_model = copy.deepcopy(model).double()
    graphed = fastbert.graphs(model)
    identical, eager, total = 0, [], 0
    with torch.inference_mode():
        for _ in range(2):
            for batch in batches(record):
                found, plain = graphed(**batch), model(**batch)
                eager += [graphed.why_eager] if graphed.why_eager else []
                total += 1
                for field in ("last_hidden_state", "pooler_output"):
                    if torch.equal(found[field], plain[field]):
                        identical += field == "last_hidden_state"
                        continue
                    with fastbert.use_backend("torch"):
                        oracle = oracle_model(**batch)[field]
                    assert_close_to_reference(found[field], oracle, plain[field], GRADIENT_FACTOR, field)
    entry = {"batches": total, "bit for bit": identical, "graphs": len(graphed.buckets), "bytes": graphed.nbytes}
    if record.device.type == "cuda":
        assert not eager, f"{len(eager)} of {total} ran without a graph: {eager[0]}"
    return {**entry, "eager": sorted(set(eager))}


def latency(record: Record, name: str) -> dict[str, Any]:
    """Milliseconds from call to result on the GPU, median; batch 1 of 32 tokens."""
    model = build(record, name)
    input_ids = torch.randint(1000, 30000, (1, LENGTH), device=record.device)
    graphed = fastbert.graphs(model)
    calls: dict[str, Callable[[], object]] = {
        "fastbert": lambda: model(input_ids),
        "fastbert, graphs": lambda: graphed(input_ids),
    }
    import transformers

    config = transformers.BertConfig(**MODELS[name])
    with torch.device(record.device):
        theirs = transformers.AutoModel.from_config(config, attn_implementation="sdpa").to(torch.bfloat16).eval()
    calls["transformers-sdpa"] = lambda: theirs(input_ids=input_ids)
    with torch.inference_mode():
        found = {call: medians(record, run) for call, run in calls.items()}
    assert record.device.type != "cuda" or graphed.why_eager is None, f"there was no graph: {graphed.why_eager}"
    if name == "bert-base":
        record.figures["latency_ms"] = found["fastbert, graphs"]
    return {"numbers": {call: {"ms": value} for call, value in found.items()}, "unit": f"1 x {LENGTH}"}


def medians(record: Record, call: Callable[[], object]) -> float:
    warmup, rounds = (1, 2) if record.smoke else (20, 200)
    seconds = []
    for i in range(warmup + rounds):
        start = time.perf_counter()
        call()
        if record.device.type == "cuda":
            torch.cuda.synchronize()
        if i >= warmup:
            seconds.append(time.perf_counter() - start)
    return 1e3 * statistics.median(seconds)
