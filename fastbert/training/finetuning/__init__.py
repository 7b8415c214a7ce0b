"""The tasks of fine-tuning: what a checkpoint learns from labelled examples."""

from __future__ import annotations

import dataclasses
import importlib

from fastbert.errors import ConfigError
from fastbert.messages import absent, install
from fastbert.training.options import FinetuneOptions
from fastbert.training.task import Task

# The value of --task -> the module that makes it.
TASKS = {
    "classification": "classification",
    "tokens": "tokens",
    "qa": "question_answering",
    "embedding": "embedding",
}

# What the metrics of a task's evaluation are computed by, which is imported when the first one comes.
_JUDGED_BY = {"classification": ("sklearn",), "tokens": ("seqeval",)}

_WITH_HEAD = ("classification", "tokens", "qa")
# The options that some tasks alone read.
_READ_BY: dict[str, tuple[str, ...]] = {
    "text_columns": ("classification", "tokens", "embedding"),
    "label_column": ("classification", "tokens", "embedding"),
    "problem_type": ("classification",),
    "label_type": ("classification",),
    "hash_lines": ("tokens",),
    "class_weights": ("classification",),
    "windows": ("classification",),
    "doc_stride": _WITH_HEAD,
    **dict.fromkeys(("lora_rank", "lora_alpha", "lora_targets"), _WITH_HEAD),
    **dict.fromkeys(("loss", "scale", "symmetric", "dims", "pooling"), ("embedding",)),
}


def make_task(options: FinetuneOptions) -> Task:
    """The task that the options ask for: data read and checked, model loaded. Raises ConfigError, InputError, and
    CheckpointError.
    """
    for entry in dataclasses.fields(options):
        tasks, value = _READ_BY.get(entry.name, (options.task,)), getattr(options, entry.name)
        if options.task not in tasks and value != entry.default:
            raise ConfigError(f"{entry.name} is for the tasks {', '.join(tasks)}, and the task is {options.task}")
    if missing := absent("scipy", *(_JUDGED_BY.get(options.task, ()) if options.eval else ())):
        raise ConfigError(f"the task {options.task} needs {', '.join(missing)}: {install('train')}")
    return importlib.import_module(f"{__name__}.{TASKS[options.task]}").make_task(options)
