"""Fine-tuning steps side by side; prints a table and can write it to a folder.

python benchmarks/training/fine_tuning.py --model deberta-v3-base --batches 32 4x512
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from fastbert.bench.compete import compete, step
from fastbert.bench.fine_tuning import CONTESTANTS
from fastbert.bench.report import write_report
from fastbert.bench.timing import Timing, describe_machine
from fastbert.testing.cases import MODELS


def measure(
    model: str, batch: str, contestants: tuple[str, ...], rounds: int, restarts: int, threads: int
) -> dict[str, Any]:
    """{contestant: its figures} on batches of one kind, or {"failed": why}."""
    task = {"action": "fine-tuning", "model": model, "batch": batch, "threads": threads}
    for name in contestants:
        step(**task, contestant=name, check=True)
    answers, failures = compete({n: {**task, "contestant": n, "check": False} for n in contestants}, rounds, restarts)
    results: dict[str, Any] = {}
    for name, given in answers.items():
        turns = [answer for answer in given if "seconds" in answer]
        if name in failures:
            results[name] = {"failed": failures[name]}
            continue
        timing = Timing.of([turn["seconds"] for turn in turns])
        results[name] = {
            "tokens_per_second": turns[0]["tokens"] / timing.median,
            "peak_memory": max(turn["peak_memory"] for turn in turns),
            "timing": timing.to_dict(),
        }
    return results


def to_markdown(report: dict[str, Any]) -> str:
    machine = report["machine"]
    lines = [
        f"A fine-tuning step (forward, backward, fused AdamW) of a sentence classifier of {report['model']}'s size,"
        " bfloat16 autocast, dropout 0.1. Batches of a number of sentences have log-normal lengths (mean 12, at most"
        " 64), 4x512 are four of one length. Real tokens/s;"
        f" {machine['cpu']}, {report['threads']} threads, torch {machine['torch']}, commit {machine['commit']},"
        f" {machine['date']}.",
        "",
        "| batch | contestant | tokens/s | ms a step | peak memory, MB |",
        "|--:|---|--:|--:|--:|",
    ]
    for size, results in report["rows"].items():
        base = results.get(CONTESTANTS[0], {}).get("tokens_per_second")
        for name, result in results.items():
            if "failed" in result:
                lines.append(f"| {size} | {name} | failed: {result['failed']} | | |")
                continue
            ratio = f" ({result['tokens_per_second'] / base:.2f}x)" if base else ""
            lines.append(
                f"| {size} | {name} | {result['tokens_per_second']:,.0f}{ratio} |"
                f" {1e3 * result['timing']['median']:.1f} | {result['peak_memory'] / 1e6:,.0f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="minilm", choices=sorted(MODELS))
    parser.add_argument("--batches", nargs="+", default=["32", "128"], help="sentences in a batch, or 4x512")
    parser.add_argument("--contestants", nargs="+", default=list(CONTESTANTS), choices=CONTESTANTS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--restarts", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, help="folder for fine-tuning.json and fine-tuning.md")
    args = parser.parse_args()
    contestants = tuple(args.contestants)
    rows = {n: measure(args.model, n, contestants, args.rounds, args.restarts, args.threads) for n in args.batches}
    report = {"machine": describe_machine(), "model": args.model, "threads": args.threads, "rows": rows}
    print(to_markdown(report))
    if args.output:
        write_report(args.output, "fine-tuning", report, to_markdown(report))


if __name__ == "__main__":
    main()
