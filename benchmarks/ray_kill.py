"""One worker of two is killed on the way: `python benchmarks/ray_kill.py`, on a machine that does nothing else.

Encodes the same sentences three times: by `fastbert encode` in one process on all cores, by `fastbert encode --engine
ray` with a worker a core, and by the same again, when one worker gets SIGKILL once a third of the blocks is written.
The outputs must be equal bit by bit, complete, and without doubles. Needs the extras [ray] and [demo].
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from fastbert.bench.report import write_report
from fastbert.bench.timing import describe_machine

ROOT = Path(__file__).resolve().parents[1]
MODEL = "all-MiniLM-L6-v2"


def write_sentences(path: Path, count: int) -> None:
    """Sentences of 3 to 12 words, each with a number of its own, so that no two are the same: 13 tokens on average."""
    sentences = [line.split() for line in (ROOT / "examples" / "sentences.txt").read_text().splitlines()]
    draw = random.Random(0)
    texts = [" ".join(draw.choice(sentences)[: draw.randint(3, 12)]) + f" {i}" for i in range(count)]
    parquet.write_table(pa.table({"id": range(count), "text": texts}), path, row_group_size=16384)


def start(*words: object) -> subprocess.Popen:
    command = [sys.executable, "-m", "fastbert", "encode", *map(str, words), "--model", MODEL, "--device", "cpu"]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> tuple[int, float]:
    """(tokens, seconds without what starts before) of a run that must have succeeded, by its last line."""
    said = process.communicate()[1]
    assert process.returncode == 0, said[-3000:]
    last = said.strip().splitlines()[-1]
    found = re.search(r"([\d,]+) tokens in ([\d.]+) s", last)
    assert found is not None, last
    return int(found[1].replace(",", "")), float(found[2])


def workers() -> list[int]:
    """The processes in which Ray runs our workers."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has ended
            continue
        if line.startswith("ray::") and "BlockWorker" in line:
            found.append(int(folder.name))
    return found


def kill_one(process: subprocess.Popen, output: Path) -> str:
    """SIGKILL for one worker as soon as a third of the blocks is there; says when."""
    while process.poll() is None:
        parts = [path.name for path in output.glob("part-*")] if output.is_dir() else []
        total = int(parts[0].split("-of-")[1].partition(".")[0]) if parts else 0
        if parts and len(parts) >= total / 3 and (pids := workers()):
            os.kill(pids[0], signal.SIGKILL)
            return f"killed when {len(parts)} of {total} blocks were written"
        time.sleep(0.1)
    raise SystemExit(f"nothing was killed: the run was over. {finish(process)}")


def compare(output: Path, single: np.ndarray) -> dict[str, bool]:
    """What must hold of Ray's output, beside the vectors of one process."""
    table = parquet.read_table(output)
    ids = table.column("id").to_numpy()
    vectors = np.stack(table.column("embedding").to_numpy(zero_copy_only=False))
    return {
        "complete_without_doubles_in_order": np.array_equal(ids, np.arange(len(single))),
        "bits_equal": np.array_equal(vectors, single),
    }


def to_markdown(report: dict) -> str:
    machine, rows = report["machine"], report["runs"]
    lines = [
        f"{report['sentences']:,} sentences, {rows[0]['tokens']:,} tokens, {MODEL} in float32; {machine['cpu']},"
        f" {report['cores']} cores, torch {machine['torch']}, Ray {report['ray']}, commit {machine['commit']},"
        f" {machine['date']}.",
        "",
        "| | tokens/s | of one process | seconds | with all that starts before | complete, in order | bits equal |",
        "|---|--:|--:|--:|--:|---|---|",
    ]
    for row in rows:
        share = row["tokens_per_second"] / rows[0]["tokens_per_second"]
        holds = [
            {True: "yes", False: "NO", None: ""}[row.get(key)]
            for key in ("complete_without_doubles_in_order", "bits_equal")
        ]
        lines.append(
            f"| {row['name']} | {row['tokens_per_second']:,.0f} | {share:.2f} | {row['seconds']:.1f} |"
            f" {row['wall_seconds']:.1f} | {' | '.join(holds)} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sentences", type=int, default=200_000)
    parser.add_argument("--output", type=Path, help="a folder for ray.json and ray.md")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    runs: list[dict] = []
    with tempfile.TemporaryDirectory(prefix="fastbert-ray-") as name:
        source, single = Path(name) / "texts.parquet", Path(name) / "single.npy"
        write_sentences(source, options.sentences)
        ray_words = ("--engine", "ray", "--workers", cores)
        for title, output, words in (
            (f"one process, {cores} threads", single, ()),
            (f"Ray, {cores} workers", Path(name) / "ray", ray_words),
            (f"Ray, {cores} workers, one of them", Path(name) / "killed", ray_words),
        ):
            begin = time.perf_counter()
            process = start(source, "--column", "text", "--output", output, *words)
            if output.name == "killed":
                title += f": {kill_one(process, output)}"
            tokens, seconds = finish(process)
            row = {
                "name": title,
                "tokens": tokens,
                "seconds": seconds,
                "wall_seconds": time.perf_counter() - begin,
                "tokens_per_second": tokens / seconds,
            }
            runs.append({**row, **(compare(output, np.load(single)) if words else {})})
            print(runs[-1], flush=True)
    report = {
        "machine": describe_machine(),
        "cores": cores,
        "ray": version("ray"),
        "sentences": options.sentences,
        "runs": runs,
    }
    page = to_markdown(report)
    print(page)
    if options.output is not None:
        write_report(options.output, "ray", report, page)
    assert all(row[key] for row in runs[1:] for key in ("complete_without_doubles_in_order", "bits_equal"))


if __name__ == "__main__":
    main()
