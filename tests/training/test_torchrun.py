"""`fastbert finetune` as people start it: by torchrun on two ranks, and stopped by a signal."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import ENVIRONMENT
from finetuning_runs import TEXTS, base, write_rows
from safetensors.torch import load_file
from training_runs import losses_of, steps_in

import fastbert

pytestmark = pytest.mark.full
ROWS = [{"text": text, "label": ("no", "yes")[i % 2]} for i, text in enumerate(TEXTS * 4)]
FLAGS = (
    "--max-length",
    "16",
    "--batch-size",
    "6",
    "--learning-rate",
    "3e-3",
    "--log-every",
    "1",
    "--precision",
    "fp32",
)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def command(folder: Path, output: str, *options: object, start: tuple[str, ...] = ()) -> list[str]:
    files = {"model": folder / "base", "train": folder / "train.jsonl", "eval": folder / "eval.jsonl"}
    given = [str(word) for name, value in files.items() for word in (f"--{name}", value)]
    words = [*start, "-m", "fastbert", "finetune", *given, *FLAGS, "--output", folder / output, *options]
    return [sys.executable, *map(str, words)]


def finetune(*given: Any, start: tuple[str, ...] = (), fails: bool = False) -> str:
    environment, words = {**ENVIRONMENT, "OMP_NUM_THREADS": "1"}, command(*given, start=start)
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=200)
    assert (done.returncode != 0) == fails, done.stderr
    return done.stderr


@pytest.fixture
def folder(tmp_path):
    base(tmp_path)
    write_rows(tmp_path / "train.jsonl", ROWS)
    write_rows(tmp_path / "eval.jsonl", ROWS[:6])
    return tmp_path


def logits(folder: Path) -> torch.Tensor:
    model = fastbert.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(torch.arange(5, 25)[None]).logits


@pytest.mark.parametrize("lora", (0, 4), ids=("all weights", "lora"))
@pytest.mark.parametrize("wrapping", ("ddp", "fsdp"))
def test_two_ranks_train_and_go_on_as_one_process(wrapping, lora, folder):
    """All six steps, and three of them that then go on; adapters are merged into what rank 0 saves."""
    options = ("--steps", 6, "--save-every", 3, "--lora-rank", lora)
    finetune(folder, "one", *options)
    finetune(folder, "two", *options, "--wrapping", wrapping, start=TORCHRUN)
    assert losses_of(folder / "two") == pytest.approx(losses_of(folder / "one"), rel=1e-6, abs=1e-5)
    # Outputs, not weights: of a key's bias, which changes no output, Adam makes steps out of rounding.
    torch.testing.assert_close(logits(folder / "two"), logits(folder / "one"), atol=1e-4, rtol=0)
    assert (folder / "two/adapter/adapter_model.safetensors").exists() == bool(lora)
    whole = load_file(folder / "two/model.safetensors")
    (folder / "two/checkpoints/step-000000006").rename(folder / "gone")
    finetune(folder, "two", "--resume", *options, "--wrapping", wrapping, start=TORCHRUN)
    again = load_file(folder / "two/model.safetensors")
    assert all(torch.equal(again[name], whole[name]) for name in whole)


def test_what_one_rank_refuses_ends_all(folder):
    said = finetune(folder, "two", "--lora-targets", "query", start=TORCHRUN, fails=True)
    assert "lora_targets was given without lora_rank" in said
    assert not (folder / "two").exists()


@pytest.mark.parametrize("stop,code,said", ((signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")))
def test_a_signal_ends_the_command_after_a_checkpoint(stop, code, said, folder):
    options = ("--steps", 100_000, "--save-every", 20, "--eval-every", 100_000)
    process = subprocess.Popen(command(folder, "run", *options), env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 100
    while not list((folder / "run").glob("checkpoints/step-*")) and time.monotonic() < end:
        time.sleep(0.1)
    process.send_signal(stop)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == code, errors
    last = steps_in(folder / "run")[-1]
    assert f"{stop.name}: stopped after step {last}, which is saved" in errors
    assert errors.rstrip().endswith(f"fastbert: {said}") and "Traceback" not in errors
    assert len(losses_of(folder / "run")) == last
