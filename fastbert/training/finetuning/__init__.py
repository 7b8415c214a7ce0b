"""The tasks of fine-tuning: what a checkpoint learns from labelled examples."""

from __future__ import annotations

import importlib

from fastbert.training.options import FinetuneOptions
from fastbert.training.task import Task

# The value of --task -> the module that makes it.
TASKS = {
    "classification": "classification",
    "tokens": "tokens",
    "qa": "question_answering",
    "embedding": "embedding",
}


def make_task(options: FinetuneOptions) -> Task:
    """The task that the options ask for: data read and checked, model loaded. Raises ConfigError, InputError, and
    CheckpointError.
    """
    return importlib.import_module(f"{__name__}.{TASKS[options.task]}").make_task(options)
