"""`fastbert pretrain`: from text to an encoder, from scratch or from a checkpoint."""

from __future__ import annotations

import argparse
from typing import Any

from fastbert.cli.parser import add_command
from fastbert.cli.stopping import raise_if_stopped
from fastbert.cli.training import add_options, print_metrics, read_options


def add(commands: Any) -> None:
    from fastbert.training.options import PretrainOptions

    parser = add_command(
        commands,
        "pretrain",
        run,
        "pre-train a model on text",
        """
        Trains a new model, or goes on with --model, on the text files of --train: a sentence or a paragraph a line, a
        blank line between documents. --output is a checkpoint that transformers loads, too, with metrics, a chart and a
        model card. Under `torchrun` all ranks share the work.
        """,
        "fastbert pretrain --preset baby --train novels.txt --output baby",
    )
    add_options(parser, PretrainOptions, required=("train", "output"))


def run(options: argparse.Namespace) -> int:
    from fastbert.training.options import PretrainOptions
    from fastbert.training.pretraining import make_task
    from fastbert.training.pretraining.phases import phases_of
    from fastbert.training.run import execute

    raise_if_stopped()
    settings = read_options(PretrainOptions, options)
    print_metrics(execute(settings, make_task, phases_of), settings.output)
    return 0
