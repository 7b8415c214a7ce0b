"""What `fastbert finetune` and `fastbert pretrain` share: options from their dataclass, and from a YAML file."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastbert.cli.parser import Parser
from fastbert.training.options import Options, RunOptions, options_of, read_yaml, types_of

_GROUPS = {
    "task": "task and data",
    "embedding": "sentence embeddings",
    "run": "the run",
    "length": "length and batches",
    "optimizer": "optimizer",
    "machine": "machine",
    "reports": "reports",
}


def add_options(parser: Parser, cls: type[RunOptions], required: Sequence[str]) -> None:
    """An option for each field of the dataclass. What is not given is absent from the result. `required`: the fields
    that have no default; argparse does not ask for them, because --config may have them.
    """
    parser.required.title = "required, here or in the file of --config"
    parser.add_argument(
        "--config", metavar="FILE", type=Path, help="a YAML file of these options; the command line wins"
    )
    types = types_of(cls)
    sections = {name: parser.add_argument_group(title) for name, title in _GROUPS.items()}
    for entry in dataclasses.fields(cls):
        flag, value_type, metadata = f"--{entry.name.replace('_', '-')}", types[entry.name], entry.metadata
        section = parser.required if entry.name in required else sections[metadata["group"]]
        shown = metadata["help"].replace("%", "%%")
        if value_type is bool:
            section.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=shown)
            continue
        if entry.default not in ("", ()):
            shown += f" (default {entry.default})"
        options: dict[str, Any] = {"help": shown, "default": argparse.SUPPRESS}
        if metadata["choices"]:
            options["choices"] = metadata["choices"]
        else:
            options["metavar"] = {int: "N", float: "X", str: "NAME", tuple: "NAME"}[value_type]
        if value_type is tuple:
            options["nargs"] = "+"
        else:
            options["type"] = value_type
        section.add_argument(flag, **options)
    parser.required._group_actions.sort(key=lambda action: required.index(action.dest))


def read_options(cls: type[Options], arguments: argparse.Namespace) -> Options:
    """Defaults, then the YAML file, then the command line; a run that goes on has its own file, if no other is given.

    Raises ConfigError, OSError.
    """
    from fastbert.training.folder import RUN  # here: it imports torch, and --help is to be quick

    said = {name: vars(arguments)[name] for name in types_of(cls) if name in arguments}
    path = arguments.config
    if path is None and said.get("resume") and (Path(said.get("output", "")) / RUN).is_file():
        path = Path(said["output"]) / RUN
    in_file = {} if path is None else {str(name).replace("-", "_"): value for name, value in read_yaml(path).items()}
    return options_of(cls, in_file | said, "the command line" if path is None else str(path))


def print_metrics(metrics: dict[str, Any], folder: str) -> None:
    """Of a run; a dry run has none."""
    if not metrics:
        return
    for name, value in metrics.items():
        if name.startswith("eval_") or name in ("train_loss", "tokens_per_second"):
            print(f"{name.removeprefix('eval_'):>20} {value:.4f}" if abs(value) < 1000 else f"{name:>20} {value:,.0f}")
    chart = ", chart.png" if (Path(folder) / "chart.png").is_file() else ""
    print(f"{folder} holds the model, metrics.json{chart} and README.md")
