"""What a step of training is made of; prints it and can write it to a folder.

The loop of `fastbert finetune` runs over sentences of log-normal length (mean 12, at most 64) with a MiniLM-sized
classifier, bfloat16 autocast, clipping and AdamW. The rate of the step's products, over all of its time, is compared
with the best rate of this machine's matrix products, which is measured between the steps.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fastbert
from fastbert.bench import ceiling
from fastbert.bench.fine_tuning import LONGEST, MEAN_LENGTH, SPREAD
from fastbert.bench.report import write_report
from fastbert.bench.timing import describe_machine
from fastbert.data.collator import PackingCollator
from fastbert.data.loader import make_loader
from fastbert.testing.cases import MODELS
from fastbert.training.distributed import ProcessGroup
from fastbert.training.loop import Loop, LoopOptions, TrainState, sampler_of
from fastbert.training.memory import keep_freed_memory
from fastbert.training.optimizers import AdamW, parameter_groups, use_sparse_gradients
from fastbert.training.schedules import Schedule
from fastbert.training.task import Phase, Task

EXAMPLES, WARM_UP, LOG_EVERY = 20_000, 20, 20
now = time.perf_counter


class Sentences(Task):
    """Random tokens with random labels."""

    def __init__(self, seconds: dict[str, list[float]]):
        torch.manual_seed(0)
        self.model = fastbert.BertForSequenceClassification(fastbert.EncoderConfig(**MODELS["minilm"])).train()
        self.seconds = seconds
        draw = np.random.default_rng(0)
        normal = draw.normal(np.log(MEAN_LENGTH) - SPREAD**2 / 2, SPREAD, EXAMPLES)
        self.lengths = np.exp(normal).round().clip(3, LONGEST).astype(np.int64)
        ids = np.split(draw.integers(1000, 30000, self.lengths.sum()), np.cumsum(self.lengths)[:-1])
        self.rows = [
            {"input_ids": row, "labels": int(label)}
            for row, label in zip(ids, draw.integers(0, 2, EXAMPLES), strict=True)
        ]

    def collate(self, phase: Phase) -> Any:
        return PackingCollator(padded_outputs=False)  # as the command has it

    def examples(self, epoch: int, phase: Phase) -> tuple[Any, Any]:
        return self.rows, self.lengths

    def counts(self, batch: Any) -> list[int]:
        return [batch["batch"].batch_size]

    def loss(self, model: Any, batch: Any, totals: list[float]) -> torch.Tensor:
        return model(**batch, num_items_in_batch=totals[0]).loss

    def backward(self, *arguments: Any) -> torch.Tensor:
        start = now()
        loss = super().backward(*arguments)
        self.seconds["forward and backward"].append(now() - start)
        return loss


class TimedAdamW(AdamW):
    seconds: list[float]  # of each step
    late = 0.0  # seconds of rows of the word table that did the steps they lacked, after the last step

    def catch_up(self, rows: torch.Tensor | None = None) -> None:
        start = now()
        super().catch_up(rows)
        self.late += now() - start

    def zero_grad(self, set_to_none: bool = True) -> None:
        start = now()
        super().zero_grad(set_to_none)
        self.seconds[-1] += now() - start

    def one_pass(self, max_norm: float) -> torch.Tensor | None:
        start = now()
        norm = super().one_pass(max_norm)
        self.seconds.append(now() - start + self.late)
        self.late = 0.0
        return norm


def measure(batch_size: int, steps: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {"step": [], "forward and backward": [], "optimizer": []}
    task = Sentences(seconds)
    config, process_group = task.model.config, ProcessGroup(0, 1, torch.device("cpu"))
    phase = Phase(WARM_UP + steps, batch_size * LONGEST, batch_size, LONGEST)
    options = LoopOptions((phase,), bf16=True, log_every=LOG_EVERY, save_every=10**9)
    use_sparse_gradients(task.model)
    optimizer = TimedAdamW(parameter_groups(task.model, 2e-5), fused=True)
    optimizer.seconds = seconds["optimizer"]
    products, rates, tokens = ceiling.gemms("bfloat16"), list[float](), list[int]()
    last = [now()]

    def on_step(count: int) -> None:
        seconds["step"].append(now() - last[0])
        tokens.append(count)
        last[0] = now()

    def on_log(row: dict[str, Any]) -> None:
        seconds["step"][-1] += now() - last[0]  # reading the loss, and writing the row
        rates.append(statistics.fmean(ceiling.rates(products, 0.02)))
        last[0] = now()

    with tempfile.TemporaryDirectory() as folder:
        schedule = Schedule(optimizer, "linear", WARM_UP + steps, 0)
        loop = Loop(
            task,
            task.model,
            config.hidden_size,
            optimizer,
            schedule,
            process_group,
            Path(folder),
            options,
            on_log=on_log,
            on_step=on_step,
        )
        loop._save = lambda: None  # type: ignore[method-assign]
        loop.run()
    means = {name: statistics.fmean(values[WARM_UP:]) for name, values in seconds.items()}
    for name in ("step", "optimizer"):  # what the last step left to be done is every step's
        means[name] += optimizer.late / (WARM_UP + steps)
    per_layer = 4 * config.hidden_size**2 + 2 * config.hidden_size * config.intermediate_size
    mean_tokens = statistics.fmean(tokens[WARM_UP:])
    operations = 3 * 2 * mean_tokens * config.num_hidden_layers * per_layer
    best = statistics.median(rates)
    return {
        "tokens": round(mean_tokens, 1),
        "ms": {name: round(1e3 * value, 2) for name, value in means.items()},
        "median_ms": round(1e3 * statistics.median(seconds["step"][WARM_UP:]), 2),
        "overhead": 1 - (means["forward and backward"] + means["optimizer"]) / means["step"],
        "gflops": operations / means["step"] / 1e9,
        "ceiling_gflops": best,
        "of_the_ceiling": operations / means["step"] / 1e9 / best,
        "tokens_per_second": mean_tokens / means["step"],
        "loader_tokens_per_second": {str(workers): loader_rate(task, phase, options, workers) for workers in (0, 2)},
    }


def loader_rate(task: Sentences, phase: Phase, options: LoopOptions, workers: int) -> float:
    """Tokens a second that the batches come at when nothing waits for them."""
    sampler, examples = sampler_of(task, phase, options, 384, ProcessGroup(0, 1, torch.device("cpu")), TrainState())
    loader = iter(make_loader(examples, sampler, task.collate(phase), workers=workers))
    next(loader)
    start = now()
    count = sum(batch["batch"].total_tokens for batch in loader)
    return count / (now() - start)


def to_markdown(report: dict[str, Any]) -> str:
    machine = report["machine"]
    lines = [
        "A step of `fastbert finetune` (loader, forward, backward, clipping, AdamW, log) of a MiniLM-sized sentence"
        " classifier: 6 layers of 384, bfloat16 autocast, dropout 0.1, sentences of log-normal length (mean 12, at most"
        f" 64). Means of {report['steps']} steps; {machine['cpu']}, {torch.get_num_threads()} threads, torch"
        f" {machine['torch']}, commit {machine['commit']}, {machine['date']}.",
        "",
        "| sentences | tokens | ms a step | forward and backward | optimizer with clipping | all else | products,"
        " GFLOP/s | of the ceiling | tokens/s | loader alone, tokens/s (0, 2 workers) |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for size, row in report["rows"].items():
        ms, loader = row["ms"], row["loader_tokens_per_second"]
        lines.append(
            f"| {size} | {row['tokens']:.0f} | {ms['step']:.1f} | {ms['forward and backward']:.1f} |"
            f" {ms['optimizer']:.1f} | {row['overhead']:.1%} | {row['gflops']:.0f} of {row['ceiling_gflops']:.0f} |"
            f" {row['of_the_ceiling']:.1%} | {row['tokens_per_second']:,.0f} |"
            f" {loader['0']:,.0f}, {loader['2']:,.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-sizes", default="32,128")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", type=Path, help="folder for training-step.json and training-step.md")
    args = parser.parse_args()
    keep_freed_memory()
    rows = {size: measure(int(size), args.steps) for size in args.batch_sizes.split(",")}
    report = {"machine": describe_machine(), "steps": args.steps, "rows": rows}
    print(to_markdown(report))
    if args.output:
        write_report(args.output, "training-step", report, to_markdown(report))


if __name__ == "__main__":
    main()
