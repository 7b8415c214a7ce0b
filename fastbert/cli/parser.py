"""What the commands' parsers share; a command's own options are in its file."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fastbert.importing import without_collector
from fastbert.messages import did_you_mean

if TYPE_CHECKING:
    from fastbert.data.chunks import Windows

A_MODEL = "a folder, a hub id, or all-MiniLM-L6-v2"
AGGREGATES = ("probabilities", "logits", "vectors")  # of a classifier's chunks
LARGEST = 2**31 - 1  # of whatever is a number on the command line: counts are int32 further down


class UsageError(ValueError):
    """What was asked for on the command line cannot be done; the message says what to change."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and which names the option that was probably meant. Its help has what must be
    given first, in the usage and in a section of its own.
    """

    model: argparse.Action | None = None  # MODEL, for which --model may stand

    def __init__(self, *args: Any, **others: Any):
        super().__init__(*args, **others)
        self.required = self._positionals
        self.required.title = "required"

    def _add_action(self, action):
        if not action.required:
            return super()._add_action(action)
        self._positionals._add_action(action)
        return action

    def format_help(self) -> str:
        if self.usage is None:  # argparse's own has all options, and those that are required among the others
            # MODEL and FILE go before options that take several values.
            needed = sorted(self.required._group_actions, key=lambda action: bool(action.option_strings))
            self.usage = " ".join([self.prog, *map(_usage_of, needed), "[options]"])
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (`{self.prog} --help` explains)")

    def parse_known_args(self, args=None, namespace=None):
        """A command's parser is asked so by the one above it, which does not know the command's options.

        What is misspelt is said first: what is then missing follows from it.
        """
        words = list(args or ())
        own = [word.partition("=")[0] for word in words[: words.index("--") if "--" in words else None]]
        if self._subparsers is None:
            self._refuse([word for word in own if word[:2] == "--" and not self._options_of(word)])
        if self.model is not None and any(word[:2] == "--" and self._options_of(word) == ["--model"] for word in own):
            # An optional MODEL would not do: argparse gives `MODEL --device cpu FILE` none, and takes MODEL for FILE.
            self._remove_action(self.model)
        parsed, unknown = super().parse_known_args(args, namespace)
        self._refuse(unknown)
        return parsed, unknown

    def _options_of(self, word: str) -> list[str]:
        """The options that a word stands for: it may be the beginning of a name."""
        return [name for name in self._option_string_actions if name.startswith(word)]

    def _refuse(self, unknown: list[str]) -> None:
        if not unknown:
            return
        names = [name for name in self._option_string_actions if name.startswith("--")]
        meant = [near for word in unknown if (near := did_you_mean(word.partition("=")[0], names))]
        hint = f"; did you mean {', '.join(meant)}?" if meant else ""
        if self.model is not None and self.model not in self._actions:
            hint = "; MODEL is given by --model: name it once"
        self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")


def _usage_of(action: argparse.Action) -> str:
    values = f"{action.metavar} [{action.metavar} ...]" if action.nargs == "+" else f"{action.metavar}"
    return " ".join([*action.option_strings[:1], values])


def add_commands(parser: Parser, headings: Mapping[str, Sequence[Any]]) -> None:
    """The commands of each heading's modules, below it in the help."""
    # Its own list has all commands under one heading.
    commands = parser.add_subparsers(prog=parser.prog, metavar="COMMAND", help=argparse.SUPPRESS)
    for heading, modules in headings.items():
        section, before = parser.add_argument_group(heading), len(commands._choices_actions)
        for module in modules:
            module.add(commands)
        section._group_actions += commands._choices_actions[before:]
    parser._action_groups.sort(key=lambda group: group is parser._optionals)  # -h and -V go last


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str, description: str, example: str
) -> Parser:
    """A command's parser, whose options are then added to it; `run(options)` returns the exit code."""
    width = min(100, shutil.get_terminal_size().columns) - 2
    parser = commands.add_parser(
        name,
        help=summary,
        description=textwrap.fill(" ".join(description.split()), width),
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def add_model(parser: Parser, what: str = A_MODEL, *, several: bool = False) -> None:
    """MODEL, or --model in its place, of a command that works on a model: `options.model`; `models`, of several."""
    name, count = ("models", "+") if several else ("model", None)
    parser.model = parser.add_argument(name, metavar="MODEL", nargs=count, help=what)
    parser.add_argument(
        "--model",
        metavar="M",
        dest=name,
        nargs=count,
        action="extend" if several else "store",
        default=argparse.SUPPRESS,
        help="the same, in place of MODEL",
    )


def add_model_option(parser: Parser) -> None:
    parser.add_argument("--model", metavar="M", required=True, help=A_MODEL)


def add_source(parser: Parser) -> None:
    from fastbert.data.text_files import TEXT_KINDS

    parser.add_argument("file", metavar="FILE", type=Path, help=f"the texts: {TEXT_KINDS}, or - for standard input")
    add_column_option(parser)


def add_column_option(parser: Parser) -> None:
    parser.add_argument("--column", metavar="NAME", help="the column that holds the texts; with -, JSON lines are read")
    add_delimiter_option(parser)


def add_delimiter_option(parser: Parser) -> None:
    from fastbert.data.delimiters import HELP

    parser.add_argument("--delimiter", metavar="C", type=_delimiter, help=HELP)


def _delimiter(text: str) -> str:
    from fastbert.data.delimiters import sign_of
    from fastbert.errors import TextFileError

    try:
        return sign_of(text)
    except TextFileError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def dtype_name(text: str) -> str:
    """The long name of a dtype: torch has several (half, float), and others write fp16."""
    from fastbert.checkpoint.dtypes import NAMES

    return str(NAMES.get(text, text)).removeprefix("torch.")


def add_running_options(parser: Parser) -> None:
    parser.add_argument(
        "--dtype",
        type=dtype_name,
        choices=("auto", "float32", "bfloat16", "float16", "int8"),
        default="auto",
        help="the number format to compute in; auto (the default) is the model's own",
    )
    parser.add_argument("--device", metavar="D", help="cpu, cuda or cuda:1; by default a GPU if there is one")
    parser.add_argument("--batch-tokens", metavar="N", type=positive, help="tokens in a batch; fewer need less memory")


_WINDOWS: dict[str, Callable[[str], Any]] = {"length": int, "overlap": float, "pool": str, "limit": int, "at": str}


def add_windows_option(parser: Parser, what: str, aggregates: Sequence[str] = ()) -> None:
    """--chunks, and --aggregate where a command has a choice of what of them is combined."""
    parser.add_argument(
        "--windows",
        metavar="KEY=VALUE",
        nargs="*",
        type=_key_and_value,
        help=f"{what}. Chunks have length=N tokens, overlap=N, and end at=tokens or at=sentences; pool=mean, max, top3"
        " or first combines them; limit=N is the most that a text may have. What is left out is the model's own",
    )
    if aggregates:
        parser.add_argument("--aggregate", choices=aggregates, help="which values of a text's chunks are combined")


def _key_and_value(word: str) -> tuple[str, Any]:
    name, _, value = word.partition("=")
    if name not in _WINDOWS:
        known = "=, ".join(_WINDOWS)
        raise argparse.ArgumentTypeError(f"{short(word, 60)!r} is none of {known}=; a FILE goes before --windows")
    try:
        return name, _WINDOWS[name](value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{short(word, 60)!r} is no number") from None


def windows_of(options: argparse.Namespace, own: Windows | None = None) -> Windows | None:
    """What --chunks says, beside the `own` chunks of a command; None without the option. Raises InputError."""
    with without_collector():
        from fastbert.data.chunks import Windows

    return None if options.windows is None else replace(own or Windows(), **dict(options.windows))


def positive(text: str) -> int:
    if not text.isdecimal() or not text.strip("0"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    if len(text) > len(str(LARGEST)) or int(text) > LARGEST:
        raise argparse.ArgumentTypeError(f"{short(text, 20)} is above {LARGEST}")
    return int(text)


def short(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."
