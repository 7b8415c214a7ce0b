"""A run of the command line: parse, call the command, and turn what a user can mend into one line.

torch is imported by the commands that need it, when they run, so that --help is quick.
"""

from __future__ import annotations

import io
import os
import sys
import warnings

from fastbert.cli import bench, build, classify, doctor, encode, fill_mask, quantize, search, serve
from fastbert.cli.models import compare, info, inspect
from fastbert.cli.parser import A_MODEL, Parser, UsageError, add_commands
from fastbert.cli.stopping import BROKEN_PIPE, USER_ERROR, discard, say
from fastbert.cli.training import finetune, predict, pretrain
from fastbert.native.cores import keep_to_quota
from fastbert.version import __version__

COMMANDS = {
    "use a model": (encode, search, classify, fill_mask, inspect),
    "train": (finetune, predict, pretrain),
    "serve": (serve,),
    "measure and set up": (info, compare, bench, quantize, doctor, build),
}

# The errors that a user can mend, by their modules below fastbert.
USER_ERRORS = {
    "config": ("ConfigError",),
    "checkpoint.weight_files": ("CheckpointError",),
    "packing": ("InputError",),
    "data.text_files": ("TextFileError",),
    "backend": ("BackendError",),
    "training.loop": ("TrainingError",),
    "bench.compete": ("BenchmarkError", "WorkerError"),
}


def make_parser() -> Parser:
    parser = Parser(
        prog="fastbert",
        usage="fastbert COMMAND ...",
        description="Runs BERT encoders: turns texts into vectors, searches, ranks and classifies them.",
        epilog=f"`fastbert COMMAND --help` explains a command and gives an example. MODEL is {A_MODEL};"
        " --model M stands for it in every command.",
    )
    parser.add_argument("-V", "--version", action="version", version=f"fastbert {__version__}")
    add_commands(parser, COMMANDS)
    return parser


def _user_errors() -> tuple[type[Exception], ...]:
    """Those of modules that were never imported cannot have been raised."""
    loaded = ((sys.modules.get(f"fastbert.{module}"), names) for module, names in USER_ERRORS.items())
    errors = (vars(module)[name] for module, names in loaded if module is not None for name in names)
    return (UsageError, OSError, *errors)


def _check_choices() -> None:
    try:
        import fastbert.backend  # noqa: F401  (reads FASTBERT_BACKEND)
        from fastbert.native.availability import extension_error

        extension_error()  # reads FASTBERT_ISA
    except ValueError as error:
        raise UsageError(str(error)) from None


def _fill_standard_descriptors() -> None:
    """A file that is opened while one of them is closed would take its number, and get what is printed there."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def _flush_stdout() -> None:
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:  # a full disk
        discard(sys.stdout)
        raise UsageError(f"standard output: {error.strerror}") from None


def run(arguments: list[str] | None) -> int:
    """Run a command; an error that a user can correct becomes one line. Returns the exit code. Lets Ctrl-C through."""
    _fill_standard_descriptors()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a token that the terminal cannot show is no reason to fail
    warnings.showwarning = lambda message, *where, **options: say(f"warning: {message}")
    try:
        parser = make_parser()
        options = parser.parse_args(arguments)
        if "run" not in options:
            parser.print_help()
            return 0
        if "FASTBERT_BACKEND" in os.environ or "FASTBERT_ISA" in os.environ:
            _check_choices()
        keep_to_quota()
        code = options.run(options)
        _flush_stdout()
        return code
    except BrokenPipeError:
        discard(sys.stdout)
        return BROKEN_PIPE
    except _user_errors() as error:
        say(f"error: {' '.join(str(error).split())}")
        if isinstance(error, OSError):  # perhaps of stdout itself
            try:
                _flush_stdout()
            except (OSError, UsageError):
                discard(sys.stdout)
        return USER_ERROR
