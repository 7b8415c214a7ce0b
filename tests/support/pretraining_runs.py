"""Pre-training on a file of invented text: a document has few words, and each of them is followed by the same one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from seeds import numpy_generator
from training_runs import ALONE

from fastbert.training.distributed import ProcessGroup
from fastbert.training.loop import Loop, LoopOptions
from fastbert.training.optimizers import make_optimizer, parameter_groups
from fastbert.training.options import PretrainOptions
from fastbert.training.pretraining import MaskedLM
from fastbert.training.pretraining.phases import phases_of
from fastbert.training.schedules import Schedule

WORDS = [a + b for a in "bdfgkl" for b in "aeio"]  # 24


def write_text(path: Path, documents: int = 40, seed: int = 0) -> Path:
    """Documents of 24 words in lines of 8; document i has 6 of the words, those of i modulo 4."""
    draw, lines = numpy_generator(seed), []
    for document in range(documents):
        words, start = WORDS[document % 4 * 6 :][:6], int(draw.integers(6))
        text = [words[(start + i) % 6] for i in range(24)]
        lines += [" ".join(text[i : i + 8]) for i in range(0, 24, 8)] + [""]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def options(text: Path, **changes: Any) -> PretrainOptions:
    given: dict[str, Any] = {
        "preset": "baby",
        "vocab_size": 60,
        "vocab_kind": "wordpiece",
        "steps": 30,
        "max_length": 24,
        "step_tokens": 1000,
    }
    if changes.get("model") or changes.get("teacher") or changes.get("tokenizer"):
        del given["preset"], given["vocab_size"], given["vocab_kind"]
    return PretrainOptions(**{"train": (str(text),), "eval": (str(text),), **given, **changes})


def train(
    task: MaskedLM, given: PretrainOptions, folder: Path, lr: float = 1e-2, process_group: ProcessGroup = ALONE
) -> list[float]:
    """The losses of a run on one rank, without checkpoints in between."""
    optimizer = make_optimizer("adamw", parameter_groups(task.model, lr), (0.9, 0.98), 1e-6)
    folder.mkdir(parents=True, exist_ok=True)
    loop_options = LoopOptions(phases_of(given, given.steps), save_every=0)
    schedule, losses = Schedule(optimizer, "linear", given.steps, 3), list[float]()
    loop = Loop(task, task.model, task.hidden_size, optimizer, schedule, process_group, folder, loop_options)
    loop.on_log = lambda row: losses.extend(row["losses"])
    loop.run()
    return losses


def evaluated(task: MaskedLM) -> dict[str, float]:
    with torch.no_grad():
        return task.evaluate(task.model.eval())
