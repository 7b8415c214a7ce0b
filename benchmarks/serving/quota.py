"""What a container's quota costs: `python benchmarks/serving/quota.py --output benchmarks/results/MACHINE`, as root.

A process encodes texts with a MiniLM of random weights: on one core; in a cgroup with a quota of one CPU, with as many
threads as the command line takes there; and in that cgroup with a thread for each core, as torch takes by itself. They
take turns, each in a process of its own. Texts a second, medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

SECONDS, ROUNDS = 6.0, 7
SIZES = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
WAYS = ("one core", "quota of 1 CPU, threads of the quota", "quota of 1 CPU, a thread for each core")


def make_cgroup() -> Path:
    """Of this machine's kind, with a quota of one CPU."""
    first = Path("/sys/fs/cgroup/cpu")
    folder = (first if first.exists() else first.parent) / f"fastbert-{os.getpid()}"
    folder.mkdir()
    if (folder / "cpu.max").exists():
        (folder / "cpu.max").write_text("100000 100000")
    else:
        (folder / "cpu.cfs_quota_us").write_text("100000")
    return folder


def work(way: str, folder: str) -> None:
    """Prints texts a second, and how many threads torch has."""
    if way == WAYS[0]:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    else:
        Path(folder, "cgroup.procs").write_text(str(os.getpid()))
    if way == WAYS[1]:
        from fastbert.native.cores import keep_to_quota

        keep_to_quota()
    import warnings

    warnings.simplefilter("ignore")  # what is said of too many threads
    import torch

    import fastbert

    torch.manual_seed(0)
    model = fastbert.BertModel(fastbert.EncoderConfig.of_family("bert", **SIZES)).eval()
    ids = torch.randint(5, 30000, (8, 64))
    with torch.inference_mode():
        model(ids)
        count, start = 0, time.perf_counter()
        while (seconds := time.perf_counter() - start) < SECONDS:
            model(ids)
            count += len(ids)
    print(count / seconds, torch.get_num_threads())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work(*options.work)
    from fastbert.bench.report import where, write_report
    from fastbert.bench.timing import describe_machine

    folder, rates, threads = make_cgroup(), {way: [] for way in WAYS}, {}
    try:
        for _ in range(ROUNDS):
            for way in WAYS:
                words = [sys.executable, __file__, "--work", way, str(folder)]
                rate, threads[way] = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
                rates[way].append(float(rate))
    finally:
        folder.rmdir()
    machine = {**describe_machine(), "packages": {"transformers": version("transformers")}}
    one = statistics.median(rates[WAYS[0]])
    lines = ["# A quota of one CPU", "", where(machine), "", "| | threads | texts/s | |", "|---|--:|--:|--:|"]
    for way in WAYS:
        rate = statistics.median(rates[way])
        lines.append(f"| {way} | {threads[way]} | {rate:.0f} | {rate / one:.2f} |")
    print("\n".join(lines))
    if options.output:
        write_report(
            options.output, "quota", {"machine": machine, "rates": rates, "threads": threads}, "\n".join(lines)
        )
    return None


if __name__ == "__main__":
    main()
