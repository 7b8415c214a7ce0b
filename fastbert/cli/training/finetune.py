"""`fastbert finetune`: from a pre-trained encoder and labelled examples to a model for a task."""

from __future__ import annotations

import argparse
from typing import Any

from fastbert.cli.parser import add_command
from fastbert.cli.stopping import raise_if_stopped
from fastbert.cli.training import add_options, print_metrics, read_options


def add(commands: Any) -> None:
    from fastbert.training.options import FinetuneOptions

    parser = add_command(
        commands,
        "finetune",
        run,
        "fine-tune a model on labelled texts",
        """
        Trains MODEL on the examples of --train, judges it on those of --eval, and leaves in --output a checkpoint that
        transformers loads, too, with metrics, a chart and a model card. Under `torchrun` all ranks share the work.
        `fastbert predict` runs the result over a file.
        """,
        "fastbert finetune --model bert-base-uncased --train train.tsv --eval dev.tsv --output sst2",
    )
    add_options(parser, FinetuneOptions, required=("model", "train", "output"))


def run(options: argparse.Namespace) -> int:
    from fastbert.training.finetuning import make_task
    from fastbert.training.options import FinetuneOptions
    from fastbert.training.run import execute

    raise_if_stopped()
    settings = read_options(FinetuneOptions, options)
    print_metrics(execute(settings, make_task), settings.output)
    return 0
