"""The commands of `fastbert ...`. torch is imported by those that need it, so that --help is quick."""

from __future__ import annotations

import argparse
import io
import os
import shutil
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any, NoReturn

from fastbert import __version__
from fastbert.cli import BROKEN_PIPE, USER_ERROR, discard, raise_if_stopped, say
from fastbert.cli.bench import add_options as add_bench_options
from fastbert.cli.texts import TEXT_KINDS, UsageError

A_MODEL = "a folder, a hub id, or all-MiniLM-L6-v2"
LARGEST = 2**31 - 1  # of whatever is a number on the command line: counts are int32 further down

# --------------------------------------------------------------------------------------------------------------------
# fastbert encode


def run_encode(options: argparse.Namespace) -> int:
    from fastbert.cli.encode import Job, encode_file

    job = Job(
        source=options.file,
        output=options.output,
        model=options.model,
        column=options.column,
        dtype=options.dtype,
        device=options.device,
        batch_tokens=options.batch_tokens,
        force=options.force,
    )
    say(encode_file(job, say))
    return 0


# --------------------------------------------------------------------------------------------------------------------
# fastbert fill-mask


def run_fill_mask(options: argparse.Namespace) -> int:
    import torch

    from fastbert.checkpoint.pretrained import resolve
    from fastbert.data.tokenization import load_tokenizer, mask_token
    from fastbert.models.auto import AutoModelForMaskedLM

    raise_if_stopped()
    folder = resolve(options.model)
    tokenizer = load_tokenizer(folder)
    mask = mask_token(folder, tokenizer)
    if mask is None:
        raise UsageError(f"the tokenizer of {options.model} has no mask token")
    text = options.text.replace("[MASK]", mask).replace("<mask>", mask)
    ids = tokenizer.encode(text).ids
    places = [i for i, token in enumerate(ids) if token == tokenizer.token_to_id(mask)]
    if not places:
        raise UsageError(f'no mask in "{options.text}": write {mask} where a word is missing')
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of missing keys: below
        model = AutoModelForMaskedLM.from_pretrained(folder)
    if model.missing_keys:
        raise UsageError(f"{options.model} has no masked-LM head; missing: {', '.join(model.missing_keys[:3])}, ...")
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, places].float()
    top = logits.softmax(-1).topk(min(options.top, logits.shape[-1]))
    pieces = text.split(mask)
    for i, (probabilities, tokens) in enumerate(zip(top.values.tolist(), top.indices.tolist(), strict=True)):
        print(f"mask {i + 1} of {len(places)}" if len(places) > 1 else text)
        # A special token decodes to nothing.
        words = [tokenizer.decode([token]).strip() or str(tokenizer.id_to_token(token)) for token in tokens]
        width = max(map(len, words))
        before, after = mask.join(pieces[: i + 1]), mask.join(pieces[i + 1 :])
        for word, probability in zip(words, probabilities, strict=True):
            print(f"  {probability:7.2%}  {word:<{width}}  {_short(before + word + after, 85 - width)}")
    return 0


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


# --------------------------------------------------------------------------------------------------------------------
# Parser and errors


class Parser(argparse.ArgumentParser):
    """One whose errors are one line, like every other."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (`{self.prog} --help` explains)")


def make_parser() -> Parser:
    parser = Parser(
        prog="fastbert",
        description="BERT-family encoders, packed and fused: text to vectors, masked words, what your machine can do.",
        epilog=f"`fastbert COMMAND --help` explains a command and gives an example. MODEL is {A_MODEL}.",
    )
    parser.add_argument("-V", "--version", action="version", version=f"fastbert {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    encode = _command(
        commands, "encode", run_encode, "turn a file of texts into a .npy of vectors",
        f"""
        Encodes every text of FILE and writes the vectors, in the file's order, as a float32 array that numpy.load
        reads. FILE is {TEXT_KINDS} (of .txt a line is a text), and may be larger than the memory. A run
        that was killed goes on where it stopped when the same command is given again.
        """,
        "fastbert encode reviews.csv --column text --model all-MiniLM-L6-v2 --output reviews.npy",
    )  # fmt: skip
    encode.add_argument("file", metavar="FILE", type=Path, help=f"the texts: {TEXT_KINDS}")
    _add_model(encode)
    encode.add_argument("--output", metavar="OUT.npy", type=Path, required=True, help="where the vectors go")
    encode.add_argument("--column", metavar="NAME", help="which column holds the texts, where there are several")
    encode.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16", "int8"), default="auto",
        help="what to compute in; auto (the default) is the model's own; the vectors are written as float32",
    )  # fmt: skip
    encode.add_argument("--device", metavar="D", help="cpu, cuda or cuda:1; default: a GPU if there is one")
    encode.add_argument("--batch-tokens", metavar="N", type=_positive, help="tokens in a batch; fewer need less memory")
    encode.add_argument("--force", action="store_true", help="replace OUT.npy, and begin again what cannot be resumed")

    fill_mask = _command(
        commands, "fill-mask", run_fill_mask, "guess the words behind [MASK]",
        "Shows the most probable tokens for every [MASK] (or <mask>) in TEXT. MODEL needs its masked-LM head.",
        'fastbert fill-mask "The [MASK] sat on the mat." --model ./bert-base-uncased --top 5',
    )  # fmt: skip
    fill_mask.add_argument("text", metavar="TEXT", help="a text with one [MASK] or more")
    _add_model(fill_mask)
    fill_mask.add_argument("--top", metavar="N", type=_positive, default=5, help="how many tokens to show (default 5)")

    quantize = _command(
        commands, "quantize", _run_quantize, "write a model with its layers in int8",
        """
        Writes MODEL's folder to OUTPUT, which must not be there yet, with the products of its layers in int8: a quarter
        of the size of float32. fastbert loads it like any other folder. --report shows what int8 costs each layer, on
        your own texts; a layer that loses too much stays as it was by its name, or a pattern of it, after --keep.
        """,
        "fastbert quantize all-MiniLM-L6-v2 ./minilm-int8 --report reviews.txt --keep '*.layer.0.*'",
    )  # fmt: skip
    quantize.add_argument("model", metavar="MODEL", help=A_MODEL)
    quantize.add_argument("output", metavar="OUTPUT", type=Path, help="the folder to write")
    quantize.add_argument(
        "--keep", metavar="NAME", action="append", default=[], help="a layer to keep; may be repeated"
    )
    quantize.add_argument(
        "--report", metavar="TEXTS", type=Path,
        help=f"texts to measure each layer's error on: {TEXT_KINDS}",
    )  # fmt: skip

    info = _command(
        commands, "info", _run_info, "size, cost per token and memory of a model",
        "Says what a model is and costs, from its config.json alone: no weights are read.",
        "fastbert info all-MiniLM-L6-v2",
    )  # fmt: skip
    info.add_argument("model", metavar="MODEL", help=f"a config.json, {A_MODEL}")

    _command(
        commands, "doctor", _run_doctor, "what this machine has, and which kernels would run",
        "Shows versions, processor and GPU, and for every operation which backend would serve it and why the others"
        " would not. Exits with 1 when something needs mending.",
        "fastbert doctor",
    )  # fmt: skip

    bench = _command(
        commands, "bench", _run_bench, "speed of whole encoders on this machine, beside its peers",
        """
        Times BERT encoders with random weights against transformers, ONNX Runtime and OpenVINO on the CPU, each in a
        process of its own and in turn, and prints real tokens/s, the ratio to the best peer and the share of the
        machine's own GEMM ceiling. Outputs are checked against float64 first. All of it for bert-base takes about 25
        minutes on 2 cores; the machine must be quiet. Peers: pip install 'fastbert-kernels[bench]'.
        """,
        "fastbert bench --dtypes bfloat16 --workloads 8x128,32-ragged --output results",
    )  # fmt: skip
    add_bench_options(bench, _positive)
    return parser


def _command(commands: Any, name: str, run: Any, summary: str, description: str, example: str) -> Parser:
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


def _add_model(parser: Parser) -> None:
    parser.add_argument("--model", metavar="M", required=True, help=A_MODEL)


def _positive(text: str) -> int:
    if not text.isdecimal() or not text.strip("0"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    if len(text) > len(str(LARGEST)) or int(text) > LARGEST:
        raise argparse.ArgumentTypeError(f"{_short(text, 20)} is above {LARGEST}")
    return int(text)


def _run_quantize(options: argparse.Namespace) -> int:
    from fastbert.cli.quantize import Job, quantize_folder

    raise_if_stopped()
    say(quantize_folder(Job(options.model, options.output, options.keep, options.report), print))
    return 0


def _run_info(options: argparse.Namespace) -> int:
    from fastbert.cli.report import info_lines

    raise_if_stopped()
    print("\n".join(info_lines(options.model)))
    return 0


def _run_doctor(options: argparse.Namespace) -> int:
    from fastbert.cli.report import doctor_lines

    raise_if_stopped()
    lines, healthy = doctor_lines()
    print("\n".join(lines))
    return 0 if healthy else 1


def _run_bench(options: argparse.Namespace) -> int:
    from fastbert.cli.bench import run_bench

    raise_if_stopped()
    print(run_bench(options, say))
    return 0


def _user_errors() -> tuple[type[Exception], ...]:
    """The errors that a user can mend. Those of modules that were never imported cannot have been raised."""
    names = {
        "config": ["ConfigError"],
        "checkpoint.weight_files": ["CheckpointError"],
        "packing": ["InputError"],
        "backend": ["BackendError"],
        "bench.compete": ["BenchmarkError", "WorkerError"],
    }
    loaded = ((sys.modules.get(f"fastbert.{module}"), of_module) for module, of_module in names.items())
    found = (vars(module)[name] for module, of_module in loaded if module is not None for name in of_module)
    return (UsageError, OSError, *found)


def _check_choices() -> None:
    try:
        import fastbert.backend  # noqa: F401  (reads FASTBERT_BACKEND)
        from fastbert.ops._library import extension_error

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
    """Parse, run, and turn what a user can mend into one line. Returns the exit code; Ctrl-C is the caller's."""
    _fill_standard_descriptors()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a token that the terminal cannot show is no reason to fail
    warnings.showwarning = lambda message, *where, **options: say(f"warning: {message}")
    try:
        options = make_parser().parse_args(arguments)
        if "FASTBERT_BACKEND" in os.environ or "FASTBERT_ISA" in os.environ:
            _check_choices()
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
