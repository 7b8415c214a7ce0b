"""Ray itself: a worker that is killed, a run that goes on, a dataset with vectors.

Ray gives up if it takes 30 s to start, which a busy machine can take, so these are left to `make test-full`;
tests/bulk/test_blocks.py has all but the pool.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import tiny
from command_line import ENVIRONMENT, command, run
from pyarrow import parquet

from fastbert import SentenceEncoder
from fastbert.bulk.blocks import CHUNK_TEXTS

pytestmark = [pytest.mark.full, pytest.mark.dear_to_set_up]
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
BLOCKS = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("encoder"), hidden_size=128, num_hidden_layers=4)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    words = tiny.WORDS.split()
    return [" ".join(words[(i * j) % len(words)] for j in range(1 + i % 40)) for i in range(BLOCKS * CHUNK_TEXTS)]


@pytest.fixture(scope="module")
def source(tmp_path_factory, texts) -> Path:
    path = tmp_path_factory.mktemp("source") / "texts.parquet"
    parquet.write_table(pa.table({"id": range(len(texts)), "text": texts}), path, row_group_size=5000)
    return path


@pytest.fixture(scope="module")
def expected(model, texts) -> np.ndarray:
    encoder = SentenceEncoder.from_pretrained(model, device="cpu")
    return np.concatenate([rows for rows, _ in encoder.encode_stream(texts, chunk_texts=CHUNK_TEXTS)])


def check(table: pa.Table, expected: np.ndarray) -> None:
    ids = table.column("id").to_numpy()
    assert np.array_equal(ids, np.arange(len(expected)))  # complete, in order, without doubles
    assert np.array_equal(np.stack(table.column("embedding").to_numpy(zero_copy_only=False)), expected)


def test_a_killed_worker_and_a_killed_run(tmp_path, model, source, expected):
    from ray_kill import workers

    out = tmp_path / "out"
    words = ("encode", source, "--engine", "ray", "--workers", 2, "--model", model, "--device", "cpu", "--output", out)
    process = subprocess.Popen(command(*words), stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    killed = False
    while process.poll() is None and len(list(out.glob("part-*"))) < BLOCKS // 2:
        if not killed and list(out.glob("part-*")) and (pids := workers()):
            os.kill(pids[0], signal.SIGKILL)
            killed = True
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    stderr = process.communicate(timeout=300)[1]
    assert killed and process.returncode == 130, stderr
    assert stderr.endswith("stopped; the same command goes on with the blocks that are left\nfastbert: interrupted\n")
    done = run(*words)
    assert done.returncode == 0, done.stderr
    assert f"of {BLOCKS * CHUNK_TEXTS:,} texts were encoded before: going on from there" in done.stderr
    assert len(list(out.glob("part-*"))) == BLOCKS
    check(parquet.read_table(out), expected)
    again = run(*words)
    assert again.returncode == 0 and f"0 texts -> {out}" in again.stderr


DATASET = """
import sys
import ray
import fastbert
dataset = ray.data.read_parquet(sys.argv[2])
fastbert.ray_encode(dataset, sys.argv[1], workers=1).write_parquet(sys.argv[3])
"""


def test_ray_encode_adds_a_column_to_a_dataset(tmp_path, model, source, expected):
    words = [sys.executable, "-c", DATASET, str(model), str(source), str(tmp_path / "out")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=ENVIRONMENT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    table = parquet.read_table(tmp_path / "out").sort_by("id")
    vectors = np.stack(table.column("embedding").to_numpy(zero_copy_only=False))
    assert np.array_equal(table.column("id").to_numpy(), np.arange(len(expected)))
    assert np.abs(vectors - expected).max() < 1e-6  # Ray's blocks may begin elsewhere
