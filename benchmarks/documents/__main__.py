"""What windows gain: `python -m benchmarks.documents --data FOLDER --output benchmarks/results/<machine>`.

all-MiniLM-L6-v2 over texts that are longer than it takes, with windows and cut off: chapters of novels found by a
paragraph, questions answered on whole articles, entities of documents. For the last two it is fine-tuned first; with
--work a folder keeps what was trained, and the next run takes it. Each part writes a file of its own, with intervals.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.documents import answers, bootstrap, entities, retrieval
from fastbert.bench.report import write_report
from fastbert.bench.timing import describe_machine

PARTS: dict[str, Any] = {"retrieval": retrieval, "answers": answers, "entities": entities}


def to_markdown(part: str, report: Mapping[str, Any]) -> str:
    machine = report["machine"]
    return "\n".join(
        [
            f"{machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}, commit {machine['commit']},"
            f" {machine['date']}; `python -m benchmarks.documents --parts {part}`.",
            "",
            *PARTS[part].to_markdown(report),
            "",
            f"In per cent; in brackets the interval of 95 % ({bootstrap.DRAWS:,} bootstrap samples). No difference: the"
            " interval of the paired difference includes 0.",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder with lm, qa and wnut17")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--work", type=Path, help="a folder that keeps trained models")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, help="a folder; in its documents/ are a json and a md of each part")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        for part in options.parts:
            machine, start = describe_machine(), time.perf_counter()
            found = PARTS[part].measure(options.data, work)
            report = {"machine": machine, "all seconds": time.perf_counter() - start, **found}
            page = to_markdown(part, report)
            print(page, end="\n\n")
            if options.output is not None:
                write_report(options.output / "documents", part, report, page)


if __name__ == "__main__":
    main()
