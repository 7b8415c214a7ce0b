"""A model that a part needs: fine-tuned where it is not in the folder yet."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastbert.bench.timing import describe_machine
from fastbert.files import write_text
from fastbert.training.finetuning import make_task
from fastbert.training.folder import METRICS
from fastbert.training.options import FinetuneOptions
from fastbert.training.run import execute

MODEL = "all-MiniLM-L6-v2"
MACHINE = "trained_on.json"


def trained(folder: Path, train: Sequence[Path], **options: Any) -> dict[str, Any]:
    """What is known of the run in `folder`: its options, its metrics, and the machine and the commit it was made with.

    A run that is there is taken only if its options are the same.
    """
    wanted = {"train": [path.name for path in train], **options}
    if (folder / MACHINE).is_file():
        run: dict[str, Any] = json.loads((folder / MACHINE).read_text(encoding="utf-8"))
        if run["options"] != wanted:
            raise SystemExit(f"{folder} holds another run: remove it, or give another --work")
        return run
    machine = describe_machine()
    files = tuple(map(str, train))
    execute(FinetuneOptions(model=MODEL, train=files, output=str(folder), save_every=10**9, **options), make_task)
    metrics = json.loads((folder / METRICS).read_text(encoding="utf-8"))
    run = {"options": wanted, "machine": machine, "metrics": metrics}
    write_text(folder / MACHINE, json.dumps(run, indent=1) + "\n")
    return run


def described(run: dict[str, Any]) -> str:
    options, metrics = run["options"], run["metrics"]
    return (
        f"{MODEL}, fine-tuned by `fastbert finetune` ({options['epochs']} epochs, learning rate"
        f" {options['learning_rate']:g}, batches of {options['batch_size']}, max_length {options['max_length']},"
        f" {metrics['steps']} steps; commit {run['machine']['commit']})"
    )
