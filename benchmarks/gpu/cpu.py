"""How a machine's CPU scales: an encoder in bf16 and int8 and a training step, on 1, 2, 4, 8 and 16 threads.

A count of threads has a process of its own, which does all three kinds and the products that are their ceiling; turns
go round the processes. `python -m benchmarks.gpu --part cpu` needs no GPU.
"""

from __future__ import annotations

import copy
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import fastbert
from benchmarks.gpu.record import Record
from fastbert.bench import ceiling
from fastbert.bench.compete import SETTLE_SECONDS, ContestantProcess
from fastbert.bench.fine_tuning import make_batches
from fastbert.bench.timing import measure_once
from fastbert.bench.worker import CHECKED_SEQUENCES, check, serve
from fastbert.testing.cases import MODELS, WORKLOADS, Workload

COUNTS = (1, 2, 4, 8, 16)
ROUNDS = 3
TURN_SECONDS = 0.3
ENCODERS = {"encoder bf16": "bfloat16", "encoder int8": "int8"}
TRAINING, PRODUCTS = "training step", "products bf16"
KINDS = (*ENCODERS, TRAINING, PRODUCTS)


def counts() -> list[int]:
    """Those of COUNTS that this process may use."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return [count for count in COUNTS if count <= there]


class Scaling:
    """A process's calls: {kind: (call, its tokens)}. Raises AssertionError where an encoder is wrong."""

    def __init__(self, task: dict[str, Any]):
        self.minimum = 0.0 if task["smoke"] else TURN_SECONDS
        workload = Workload("2x16", (16,) * 2) if task["smoke"] else next(w for w in WORKLOADS if w.id == "8x128")
        shape = MODELS["tiny" if task["smoke"] else "bert-base"]
        self.calls: dict[str, tuple[Callable[[], object], float]] = {}
        self.add_encoders(shape, workload)
        self.calls[TRAINING] = self.training(shape, 4 if task["smoke"] else 32)
        self.products = ceiling.gemms("bfloat16")

    def add_encoders(self, shape: dict[str, Any], workload: Workload) -> None:
        torch.manual_seed(0)
        model = fastbert.BertModel(fastbert.EncoderConfig.of_family("bert", **shape), add_pooling_layer=False).eval()
        input_ids, _ = workload.batch()
        expected = {}
        with torch.inference_mode(), fastbert.use_backend("torch"):
            for name in ("float64", "bfloat16"):
                literal = copy.deepcopy(model).to(getattr(torch, name))
                expected[name] = literal(input_ids[:CHECKED_SEQUENCES]).last_hidden_state.flatten(0, 1)
        model = model.to(torch.bfloat16)
        for kind, precision in ENCODERS.items():
            encoder = fastbert.quantize(copy.deepcopy(model), "int8") if precision == "int8" else model

            def call(encoder: Any = encoder) -> torch.Tensor:
                with torch.inference_mode():
                    out: torch.Tensor = encoder(input_ids).last_hidden_state
                return out

            check(kind, precision, call(), workload, expected)
            self.calls[kind] = call, input_ids.numel()

    @staticmethod
    def training(shape: dict[str, Any], batch_size: int) -> tuple[Callable[[], object], float]:
        """Ragged sentences, autocast to bf16 over fp32 weights, PyTorch's fused AdamW: what `fastbert bench` trains."""
        model = fastbert.BertForSequenceClassification(fastbert.EncoderConfig.of_family("bert", **shape)).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)
        ids, mask, labels = make_batches(str(batch_size))[0]

        def step() -> None:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        step()
        return step, float(mask.sum())

    def turn(self, kind: str) -> dict[str, float]:
        """A second's tokens; of products GFLOP/s."""
        if kind == PRODUCTS:
            with torch.inference_mode():
                return {"rate": statistics.harmonic_mean(ceiling.rates(self.products, self.minimum / 3))}
        call, tokens = self.calls[kind]
        return {"rate": tokens / measure_once(call, self.minimum)}


class Local:
    """One in this process, for smoke tests: starting one takes longer than what it does."""

    def __init__(self, task: dict[str, Any]):
        self.threads = task["threads"]
        self.scaling = self.on_its_threads(partial(Scaling, task))

    def on_its_threads(self, call: Callable[[], Any]) -> Any:
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            return call()
        finally:
            torch.set_num_threads(before)

    def answer(self) -> dict[str, Any]:
        return {}

    def ask(self, what: str) -> dict[str, Any]:
        found: dict[str, Any] = self.on_its_threads(partial(self.scaling.turn, what))
        return found

    def close(self) -> None:
        pass


def run_part(record: Record) -> None:
    """The part `cpu`."""
    record.run("scaling", partial(scaling, record))


def scaling(record: Record) -> dict[str, Any]:
    """Rates by threads; and over one thread's, beside them."""
    kind_of_worker = Local if record.smoke else partial(ContestantProcess, module="benchmarks.gpu.cpu")
    workers = {n: kind_of_worker({"threads": n, "smoke": record.smoke}) for n in counts()}
    rates: dict[tuple[str, int], list[float]] = {}
    try:
        for worker in workers.values():
            worker.answer()
        for _ in range(1 if record.smoke else ROUNDS):
            for kind in KINDS:
                for threads, worker in workers.items():
                    time.sleep(SETTLE_SECONDS)  # the last one's thread pool stops spinning
                    rates.setdefault((kind, threads), []).append(worker.ask(kind)["rate"])
    finally:
        for worker in workers.values():
            worker.close()
    medians = {key: statistics.median(found) for key, found in rates.items()}
    numbers: dict[str, dict[str, float]] = {}
    for (kind, threads), rate in medians.items():
        label = f"{kind}, {'GFLOP/s' if kind == PRODUCTS else 'tokens/s'}"
        numbers.setdefault(label, {})[f"{threads}"] = rate
        numbers.setdefault(f"{kind}, over one thread", {})[f"{threads}"] = rate / medians[kind, 1]
    return {"numbers": numbers, "unit": "by threads; BERT-base, 8 x 128, training on 32 sentences"}


def contest(task: dict[str, Any], answer: Callable[[dict[str, Any]], None]) -> None:
    """A worker's process: each line on stdin is the kind of a turn."""
    found = Scaling(task)
    answer({})
    for line in sys.stdin:
        answer(found.turn(line.strip()))


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # nothing here waits for a GPU
    serve(contest)
