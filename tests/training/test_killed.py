"""Processes that are killed: a run's own, one of its ranks; and a second run beside a living one."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from seeds import python_random
from training_runs import ALONE, losses_of, make_loop, steps_in

from fastbert.errors import ConfigError
from fastbert.training.folder import held

SUPPORT = Path(__file__).parents[1] / "support"

PROGRAM = """
    import os, sys
    sys.path.insert(0, {here!r})
    from pathlib import Path
    from training_runs import make_loop, make_model, until
    from fastbert.training.distributed import join

    folder = Path({folder!r})
    with join("cpu", 60.0) as world:
        options = until({until}, save_every={save}, log_every=1)
        loop = make_loop(folder, options, world, {wrapping!r}, model=make_model(0.1))
        loop.resume()
        print("ready", os.getpid(), flush=True)
        {first}
        loop.run()
"""


def program(folder: Path, steps: int, save: int, first: str = "pass", wrapping: str = "ddp") -> str:
    return textwrap.dedent(PROGRAM).format(
        here=str(SUPPORT), folder=str(folder), until=steps, save=save, first=first, wrapping=wrapping
    )


def start(code: str) -> subprocess.Popen:
    """A process that is about to train."""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline().startswith("ready")
    return process


def start_ranks(code: str) -> list[subprocess.Popen]:
    """Two ranks, as torchrun starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [
        subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **world, "RANK": rank}, **pipes)
        for rank in ("0", "1")
    ]
    for rank in ranks:
        assert rank.stdout is not None and rank.stdout.readline().startswith("ready")
    return ranks


@pytest.mark.full
def test_killed_at_any_moment(tmp_path):
    """Twenty times kill -9, a checkpoint being written nearly always: none is half there, and the bits are the same."""
    whole, killed, seed = tmp_path / "whole", tmp_path / "killed", random.randrange(10**6)
    sys.stderr.write(f"seed {seed}\n")
    draw, hit = python_random(seed), 0
    assert start(program(whole, 300, 1)).wait() == 0
    for _ in range(20):
        process = start(program(killed, 300, 1))
        time.sleep(draw.uniform(0.02, 0.6))
        process.kill()
        process.wait()
        hit += any(killed.glob("checkpoints/.writing*"))  # there is none before the first step's
    assert start(program(killed, 300, 1)).wait() == 0
    assert losses_of(killed) == losses_of(whole) and len(losses_of(whole)) == 300
    assert hit >= 3, f"writes that were hit: {hit}"


@pytest.mark.full
@pytest.mark.parametrize("wrapping", ["ddp", "fsdp"])
def test_a_rank_that_dies(wrapping, tmp_path):
    """The other one says so, and ends long before the timeout of a minute; its last checkpoint is whole."""
    dying, other = reversed(start_ranks(program(tmp_path, 10**6, 5, wrapping=wrapping)))
    while len(steps_in(tmp_path) if (tmp_path / "checkpoints").exists() else ()) < 2:
        time.sleep(0.05)
    dying.kill()
    said = other.communicate(timeout=50)[1]
    assert other.returncode == 1 and dying.wait() == -signal.SIGKILL
    assert "rank 0 lost the others: one of them has ended, or did not answer in time; the last good" in said
    assert make_loop(tmp_path).resume()


@pytest.mark.full
def test_a_signal_to_one_rank_stops_all(tmp_path):
    stop = "loop.on_step = lambda tokens: loop.state.step == 5 and world.rank == 1 and os.kill(os.getpid(), 15)"
    ranks = start_ranks(program(tmp_path, 10**6, 0, stop))
    said = [rank.communicate(timeout=100)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [-signal.SIGTERM] * 2
    assert "SIGTERM: stopped after step" in said[0] and steps_in(tmp_path)


@pytest.mark.full
def test_no_number_on_one_rank(tmp_path):
    """All ranks say which one it was, and end."""
    spoil = "loss = loop.task.loss; loop.task.loss = lambda *given: loss(*given) * (float('nan') if {} else 1.0)"
    ranks = start_ranks(program(tmp_path, 30, 4, spoil.format("loop.state.step == 5 and world.rank == 1")))
    for rank in ranks:
        said = rank.communicate(timeout=100)[1]
        assert rank.returncode == 1
        assert "TrainingError: the loss of step 6 is not a number (on rank 1 of 2); the last good" in said
    assert steps_in(tmp_path) == [4]


def test_a_second_run_in_the_folder_is_refused(tmp_path):
    """As long as the first one lives: a kill leaves nothing that has to be removed."""
    reader, writer = os.pipe()
    first = os.fork()
    if first == 0:
        with held(tmp_path, ALONE):
            os.write(writer, b"ready")
            time.sleep(300)
            os._exit(0)
    assert os.read(reader, 5) == b"ready"
    with pytest.raises(ConfigError, match="another process works on the run"), held(tmp_path, ALONE):
        pass
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    with held(tmp_path, ALONE):
        pass
