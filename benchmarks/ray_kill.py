"""One worker of two is killed on the way: `python benchmarks/ray_kill.py`, on a machine that does nothing else.

Encodes the same sentences by `fastbert encode` in one process, and by `fastbert encode --engine ray` with a worker a
core, one of which gets SIGKILL when a third of the blocks is written. The outputs must be equal bit by bit, complete,
and without doubles. Prints both times. Needs the extras [ray] and [demo].
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
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet

ROOT = Path(__file__).resolve().parents[1]
MODEL = "all-MiniLM-L6-v2"


def write_sentences(path: Path, count: int) -> None:
    """Sentences of 3 to 40 words, each with a number of its own, so that no two are the same."""
    sentences = [line.split() for line in (ROOT / "examples" / "sentences.txt").read_text().splitlines()]
    draw = random.Random(0)
    texts = [" ".join(draw.choice(sentences)[: draw.randint(3, 40)]) + f" {i}" for i in range(count)]
    parquet.write_table(pa.table({"id": range(count), "text": texts}), path, row_group_size=16384)


def start(*words: object) -> subprocess.Popen:
    command = [sys.executable, "-m", "fastbert", "encode", *map(str, words), "--model", MODEL, "--device", "cpu"]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> tuple[float, str]:
    """(tokens per second, the last line) of a run that must have succeeded."""
    said = process.communicate()[1]
    assert process.returncode == 0, said[-3000:]
    last = said.strip().splitlines()[-1]
    found = re.search(r"([\d,]+) tokens in ([\d.]+) s", last)
    assert found is not None, last
    return int(found[1].replace(",", "")) / float(found[2]), last


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
    """SIGKILL for one worker as soon as a third of the blocks is there."""
    while process.poll() is None:
        parts = [path.name for path in output.glob("part-*")] if output.is_dir() else []
        total = int(parts[0].split("-of-")[1].partition(".")[0]) if parts else 0
        if parts and len(parts) >= total / 3 and (pids := workers()):
            os.kill(pids[0], signal.SIGKILL)
            return f"killed one of {len(pids)} workers when {len(parts)} of {total} blocks were written"
        time.sleep(0.1)
    return "nothing was killed: the run was over"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sentences", type=int, default=200_000)
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="fastbert-ray-") as name:
        source, single, out = Path(name) / "texts.parquet", Path(name) / "single.npy", Path(name) / "out"
        write_sentences(source, options.sentences)
        begin = time.perf_counter()
        alone, line = finish(start(source, "--column", "text", "--output", single))
        alone_s = time.perf_counter() - begin
        print(f"one process, {cores} threads: {line}", flush=True)
        begin = time.perf_counter()
        process = start(source, "--column", "text", "--output", out, "--engine", "ray", "--workers", cores)
        print(kill_one(process, out), flush=True)
        together, line = finish(process)
        ray_s = time.perf_counter() - begin
        print(f"Ray, {cores} workers: {line}", flush=True)
        table = parquet.read_table(out)
        ids = table.column("id").to_numpy()
        vectors = np.stack(table.column("embedding").to_numpy(zero_copy_only=False))
        complete = np.array_equal(np.sort(ids), np.arange(options.sentences))
        equal = np.array_equal(vectors[np.argsort(ids)], np.load(single))
        in_order = bool((np.diff(ids) == 1).all())
        print(f"complete and without doubles: {complete}; in order: {in_order}; bits equal: {equal}")
        print(f"throughput with Ray and a kill / in one process: {together / alone:.2f}")
        print(f"the same with what starts before: {alone_s:.1f} s / {ray_s:.1f} s = {alone_s / ray_s:.2f}")
        assert complete and equal


if __name__ == "__main__":
    main()
