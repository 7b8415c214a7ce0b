"""`fastbert bench`: turns the options of the command line into a run of the benchmark."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fastbert.cli.parser import UsageError, add_command, positive
from fastbert.cli.stopping import raise_if_stopped, say

ROUNDS = 9
OTHERS = "albert-base, bert-large, bge-small, deberta-v3-base, distilbert-base, electra-base, minilm, modernbert-base"
OTHERS += ", mpnet-base, nomic-base, tiny"


def add(commands: Any) -> None:
    parser = add_command(
        commands, "bench", run, "measure the speed of encoders on this machine, beside other engines",
        """
        Times BERT encoders with random weights beside transformers, ONNX Runtime and OpenVINO on the CPU. Each runs in
        a process of its own, and they take turns. Prints real tokens/s, the ratio to the fastest other engine, and the
        share of the best matrix product of this machine. Outputs are checked against float64 first. All of it takes
        about 25 minutes for bert-base on 2 cores, which must do nothing else. To install the other engines: pip
        install '.[bench]' in a clone.
        """,
        "fastbert bench --dtypes bfloat16 --workloads 8x128,32-ragged --output results",
    )  # fmt: skip
    parser.add_argument("--model", metavar="M", default="bert-base", help=f"bert-base (default), {OTHERS}")
    parser.add_argument("--dtypes", metavar="D,D", default="all", help="float32, bfloat16, int8; default: all")
    parser.add_argument(
        "--workloads",
        metavar="W,W",
        default="all",
        help="1x16, 1x128, 8x128, 4x512, 32-ragged, 1x8192; default: all that the model has positions for",
    )
    parser.add_argument("--contestants", metavar="C,C", default="all", help="who competes; default: all")
    parser.add_argument("--rounds", metavar="N", type=positive, default=ROUNDS, help=f"turns (default {ROUNDS})")
    parser.add_argument("--restarts", metavar="N", type=positive, default=1, help="starts a contestant (default 1)")
    parser.add_argument("--threads", metavar="N", type=positive, help="default: what torch takes, one a core")
    parser.add_argument("--output", metavar="DIR", type=Path, help="folder for results.json, .md and .png")
    parser.add_argument("--resume", action="store_true", help="keep what an interrupted run left in DIR")


def run(options: argparse.Namespace) -> int:
    print(run_bench(options, say))
    return 0


def run_bench(options: argparse.Namespace, say: Callable[[str], None]) -> str:
    """The Markdown table. Raises UsageError or BenchmarkError."""
    import torch

    from fastbert.bench import compete
    from fastbert.bench.contestants import CONTESTANTS
    from fastbert.bench.jobs import PRECISIONS
    from fastbert.bench.report import to_markdown
    from fastbert.testing.cases import MODELS, WORKLOADS

    raise_if_stopped()
    if options.threads is not None and options.threads > (cores := os.cpu_count() or 1):
        raise UsageError(f"--threads {options.threads}: this machine has {cores} cores")
    if options.resume and options.output is None:
        raise UsageError("--resume needs --output: the folder of the run to go on with")
    (model,) = _choose("--model", options.model, tuple(MODELS))
    longest = MODELS[model].get("max_position_embeddings", 512)
    workloads = {workload.id: workload for workload in WORKLOADS if max(workload.lengths) <= longest}
    settings = compete.BenchSettings(
        model=model,
        precisions=_choose("--dtypes", options.dtypes, PRECISIONS),
        workloads=tuple(workloads[name] for name in _choose("--workloads", options.workloads, tuple(workloads))),
        contestants=_choose("--contestants", options.contestants, tuple(CONTESTANTS)),
        rounds=options.rounds,
        restarts=options.restarts,
        threads=options.threads or torch.get_num_threads(),
        output=options.output,
        resume=options.resume,
    )
    return to_markdown(compete.run(settings, say))


def _choose(option: str, text: str, known: Sequence[Any]) -> tuple[Any, ...]:
    """The names of a comma-separated list, in the order of `known`; "all" is all of them."""
    names = text.split(",")
    if text == "all":
        return tuple(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(f"{option}: unknown {', '.join(map(repr, unknown))}; known are {', '.join(known)}")
    return tuple(name for name in known if name in names)
