"""Models of BERT-base's shape beside our own BERT-base, in turn: what relative attention costs.

    python benchmarks/beside_bert.py --output benchmarks/results/<machine>

All models are in one process and run packed batches one after the other, in an order that turns from round to round. A
figure is the ratio of two medians over the rounds. Word tables have 2,000 rows: a step on the large ones of DeBERTa and
of BERT would differ by what the optimizer has to read.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fastbert
from fastbert.bench.report import write_report
from fastbert.bench.timing import describe_machine
from fastbert.models.auto import model_class
from fastbert.testing.cases import MODELS

NAMES = ("bert-base", "mpnet-base", "deberta-v3-base")
SENTENCES = (12, 31, 55, 7, 90, 44, 167, 23, 61, 18, 102, 36, 5, 73, 49, 28) * 2
SHAPES = {"8x128": (128,) * 8, "32 sentences": SENTENCES, "4x512": (512,) * 4, "1x2048": (2048,)}
MODES = ("float32", "bfloat16", "training float32", "training autocast")
VOCABULARY, WARM_UP = 2000, 2


def make(name: str, mode: str) -> torch.nn.Module:
    fields = dict(MODELS[name])
    model_type = fields.pop("model_type", "bert")
    fields["vocab_size"] = VOCABULARY
    if fields.get("position_biased_input", True):  # it has a table of positions
        fields["max_position_embeddings"] = 2050
    torch.manual_seed(0)
    model = model_class(model_type, "Model")(fastbert.EncoderConfig.of_family(model_type, **fields))
    return model.train() if mode.startswith("training") else model.to(getattr(torch, mode)).eval()


def call_of(model: torch.nn.Module, mode: str, lengths: tuple[int, ...]) -> Callable[[], None]:
    """A forward pass, or a step of training with a fused AdamW."""
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    ids = torch.randint(5, VOCABULARY, (int(offsets[-1]),), generator=torch.Generator().manual_seed(1))

    def forward() -> None:
        with torch.inference_mode():
            model.encode_packed(ids, offsets, max(lengths))

    if not mode.startswith("training"):
        return forward
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=mode.endswith("autocast")):
            hidden = model.encode_packed(ids, offsets, max(lengths))
        hidden.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(mode: str, shape: str, rounds: int) -> dict[str, Any]:
    calls = {name: call_of(make(name, mode), mode, SHAPES[shape]) for name in NAMES}
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    for turn in range(WARM_UP + rounds):
        for name in (*NAMES[turn % len(NAMES) :], *NAMES[: turn % len(NAMES)]):
            start = time.perf_counter()
            calls[name]()
            if turn >= WARM_UP:
                seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    return {
        "milliseconds": {name: 1e3 * t for name, t in medians.items()},
        "over bert-base": {name: t / medians[NAMES[0]] for name, t in medians.items()},
    }


def to_markdown(report: dict[str, Any]) -> str:
    machine = report["machine"]
    lines = [
        "Time over BERT-base's of the same shape, both fastbert: 12 layers of 768, packed batches, medians of"
        f" {report['rounds']} rounds in turn; {machine['cpu']}, {report['threads']} threads, torch {machine['torch']},"
        f" commit {machine['commit']}, {machine['date']}. Training: forward, backward and fused AdamW.",
        "",
        f"| | batch | BERT, ms | {' | '.join(NAMES[1:])} |",
        f"|---|---|--:|{'--:|' * len(NAMES[1:])}",
    ]
    for mode, shapes in report["rows"].items():
        for shape, row in shapes.items():
            ratios = " | ".join(f"{row['over bert-base'][name]:.2f}" for name in NAMES[1:])
            lines.append(f"| {mode} | {shape} | {row['milliseconds'][NAMES[0]]:.0f} | {ratios} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--shapes", nargs="+", default=tuple(SHAPES), choices=tuple(SHAPES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, help="a folder for beside-bert.json and beside-bert.md")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows: dict[str, Any] = {}
    report = {"machine": describe_machine(), "rounds": options.rounds, "threads": options.threads, "rows": rows}
    for mode in options.modes:
        for shape in options.shapes:
            rows.setdefault(mode, {})[shape] = measure(mode, shape, options.rounds)
            print(mode, shape, rows[mode][shape], flush=True)
    print(to_markdown(report))
    if options.output is not None:
        write_report(options.output, "beside-bert", report, to_markdown(report))


if __name__ == "__main__":
    main()
