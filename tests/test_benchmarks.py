"""The timer and the benchmark's own honesty: a wrong output gets no time."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fastbert.testing.bench import Timing, describe_machine, interleave

RUN = Path(__file__).parents[1] / "benchmarks" / "run.py"


def test_timer_interleaves_and_orders():
    calls = []

    def sleeper(name, seconds):
        def call():
            calls.append(name)
            time.sleep(seconds)

        return call

    timings = interleave({"short": sleeper("short", 0.002), "long": sleeper("long", 0.02)}, rounds=3, warmup=1)
    assert calls == ["short", "long"] + ["short", "long"] * 3
    assert timings["long"].median > 3 * timings["short"].median
    assert timings["long"].low >= 0.02


def test_quantiles():
    assert Timing.of([5.0, 1.0, 3.0, 2.0, 4.0]) == Timing(3.0, 2.0, 4.0, 5)


def test_machine_description_is_whole():
    machine = describe_machine()
    assert machine["torch"] == torch.__version__ and machine["cpu"] and machine["threads"] >= 1


def test_a_whole_run(tmp_path):
    command = [sys.executable, str(RUN), "--model", "tiny", "--workloads", "1x16", "--dtypes", "float32"]
    options = ["--rounds", "2", "--contestants", "transformers-sdpa,fastbert", "--output", str(tmp_path)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    (row,) = json.loads((tmp_path / "results.json").read_text())["rows"]
    for name in ("transformers-sdpa", "fastbert"):
        assert row["results"][name]["tokens_per_second"] > 0
    assert "| float32 | fastbert |" in (tmp_path / "results.md").read_text()


def test_a_wrong_output_gets_no_time(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(RUN.parent))
    import run

    workload = next(w for w in run.WORKLOADS if w.id == "1x16")
    reference = tmp_path / "reference.pt"
    run.write_reference("tiny", [torch.float32], workload, str(reference))
    expected = torch.load(reference, weights_only=True)
    torch.save({key: value + 0.1 for key, value in expected.items()}, reference)  # as if the contestant were wrong
    results = run.compete("tiny", "float32", workload, ["fastbert"], 1, 1, str(reference))
    assert "max error" in results["fastbert"]["error"] and "timing" not in results["fastbert"]


@pytest.mark.parametrize("workload", ("8x128", "32-ragged"))
def test_workloads_are_those_of_the_design(workload):
    from fastbert.testing.cases import WORKLOADS

    lengths = next(w for w in WORKLOADS if w.id == workload).lengths
    assert len(lengths) == int(workload.split("x")[0].split("-")[0])
    if workload == "32-ragged":
        assert max(lengths) == 167 and sum(lengths) == 32 * 55
