"""Where a call's time goes on a GPU.

One short text: its latency, eager and through CUDA graphs, whose outputs are checked on batches of all kinds. A forward
and a training step of large batches: launches, gaps between kernels, and the kernels that take the most.
"""

from __future__ import annotations

import copy
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fastbert
from benchmarks.gpu.record import Record
from benchmarks.gpu.subject import BATCHES, Subject
from fastbert.testing.cases import MODELS, attention_mask
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

LENGTH = 32
TOP = 12  # kernels of a table
Rows = dict[str, dict[str, float]]


def run_part(record: Record) -> None:
    """The part `profile`."""
    models = ("tiny",) if record.smoke else ("bert-base", "bert-large", "minilm")
    for name in models:
        if name != "bert-large":
            record.run(f"outputs {name}", partial(check, record, name))
        record.run(f"latency {name}", partial(latency, record, name))
    for mode, precision in (("forward", "bf16"), ("training", "amp")):
        for contestant in ("fastbert", "transformers-sdpa"):
            task = {"contestant": contestant, "model": models[0], "mode": mode, "precision": precision}
            record.run(f"{mode} {models[0]}, {contestant}", partial(profile_subject, record, task))
    record.run(f"1 x {LENGTH} {models[0]}", partial(profile_short, record, models[0]))
    profiled = {name: entry["profiled"] for name, entry in record.entries.items() if "profiled" in entry}
    rows = {f"{name}, {what}": row for name, found in profiled.items() for what, row in found.items()}
    record.add("launches and gaps", {"numbers": rows, "unit": "a step"})


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


def short_calls(record: Record, name: str) -> tuple[dict[str, Callable[[], object]], Any]:
    """({contestant: its forward of one text of LENGTH tokens}, what holds our graphs)."""
    import transformers

    model = build(record, name)
    input_ids = torch.randint(1000, 30000, (1, LENGTH), device=record.device)
    graphed = fastbert.graphs(model)
    config = transformers.BertConfig(**MODELS[name])
    with torch.device(record.device):
        theirs = transformers.AutoModel.from_config(config, attn_implementation="sdpa").to(torch.bfloat16).eval()
    calls: dict[str, Callable[[], object]] = {
        "fastbert": lambda: model(input_ids),
        "fastbert, graphs": lambda: graphed(input_ids),
        "transformers-sdpa": lambda: theirs(input_ids=input_ids),
    }
    return calls, graphed


def latency(record: Record, name: str) -> dict[str, Any]:
    """Milliseconds from call to result on the GPU, median; batch 1 of 32 tokens."""
    calls, graphed = short_calls(record, name)
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


# --------------------------------------------------------------------------------------------------------------------
# Launches, gaps, kernels


class Span(NamedTuple):
    """A kernel, a copy or a filling of memory; on a CPU an op of torch that calls no other. Times in microseconds."""

    name: str
    start: float
    end: float


def traced(call: Callable[[], object], steps: int, device: torch.device) -> list[dict[str, Any]]:
    """The events of `steps` calls, by torch's profiler."""
    with torch.profiler.profile(activities=[getattr(torch.profiler.ProfilerActivity, device.type.upper())]) as profiler:
        for _ in range(steps):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events


def host_launches(events: list[dict[str, Any]]) -> int:
    """Calls by which the host has made a GPU do something: one of a whole graph counts once."""
    calls = (e["name"] for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver"))
    return sum(any(what in name for what in ("Launch", "Memcpy", "Memset")) for name in calls)


def spans_of(events: list[dict[str, Any]], device: torch.device) -> list[Span]:
    """What ran on the device, in order."""
    is_gpu = device.type == "cuda"
    kinds = {"kernel", "gpu_memcpy", "gpu_memset"} if is_gpu else {"cpu_op"}
    events = [e for e in events if e.get("cat") in kinds]
    found: list[Span] = []
    for thread in {e["tid"] for e in events}:  # on a GPU, a stream
        spans = [Span(e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e["tid"] == thread]
        spans.sort(key=lambda span: (span.start, -span.end))
        found += spans if is_gpu else [a for a, b in pairwise([*spans, None]) if a and (b is None or b.start >= a.end)]
    return sorted(found, key=lambda span: span.start)


def gaps_of(spans: list[Span], steps: int) -> dict[str, float]:
    """A step's launches and times; a gap is when nothing runs between the first and the last."""
    busy, gaps, end = 0.0, [0.0], spans[0].start
    for span in spans:
        gaps.append(max(0.0, span.start - end))
        busy += max(0.0, span.end - max(end, span.start))
        end = max(end, span.end)
    total = end - spans[0].start
    return {
        "launches": len(spans) / steps,
        "ms": total / steps / 1e3,
        "busy ms": busy / steps / 1e3,
        "share of gaps": sum(gaps) / total,
        "longest gap, us": max(gaps),
    }


def top_kernels(spans: list[Span], steps: int) -> Rows:
    """The kernels that take the most time, by name, and all others in one row."""
    seconds: Counter[str] = Counter()
    for span in spans:
        seconds[span.name] += span.end - span.start  # type: ignore[assignment]
    calls, total = Counter(span.name for span in spans), sum(seconds.values())
    top = [name for name, _ in seconds.most_common(TOP)]
    groups = {name.replace("|", "/")[:90]: [name] for name in top}
    if len(calls) > TOP:
        groups["all others"] = [name for name in calls if name not in top]
    rows: Rows = {}
    for label, names in groups.items():
        time = sum(seconds[name] for name in names)
        rows[label] = {"calls": sum(calls[n] for n in names) / steps, "us": time / steps, "share": time / total}
    return rows


def profile_call(call: Callable[[], object], device: torch.device, smoke: bool) -> tuple[dict[str, float], Rows]:
    """(launches, times and gaps of a step, its kernels)."""
    steps = 1 if smoke else 3
    for _ in range(steps):
        call()
    events = traced(call, steps, device)
    spans = spans_of(events, device)
    return gaps_of(spans, steps) | {"host launches": host_launches(events) / steps}, top_kernels(spans, steps)


def profile_subject(record: Record, task: dict[str, Any]) -> dict[str, Any]:
    """One of the part `models`: on both of its batches; the kernels are those of the one with padding."""
    subject = Subject({**task, "smoke": record.smoke})
    profiled: Rows = {}
    kernels: Rows = {}
    for batch in BATCHES:
        subject.prepare(batch)
        profiled[batch], kernels = profile_call(subject.calls[batch], record.device, record.smoke)
    return {"numbers": kernels, "unit": f"a step, {batch}", "profiled": profiled}


def profile_short(record: Record, name: str) -> dict[str, Any]:
    calls, _ = short_calls(record, name)
    profiled: Rows = {}
    kernels: dict[str, Rows] = {}
    with torch.inference_mode():
        for contestant, call in calls.items():
            profiled[contestant], kernels[contestant] = profile_call(call, record.device, record.smoke)
    return {"numbers": kernels["fastbert"], "unit": "a forward, fastbert", "profiled": profiled}
