"""`fastbert bench`: turns the options of the command line into a run of the benchmark."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastbert.cli.parser import Parser, UsageError, add_command, add_delimiter_option, positive
from fastbert.cli.stopping import raise_if_stopped, say
from fastbert.data.text_files import TEXT_KINDS, check_source, read_texts
from fastbert.errors import TextFileError
from fastbert.native.cores import cores

if TYPE_CHECKING:
    from fastbert.bench.texts.run import TextSettings

ROUNDS, CORPUS_ROUNDS = 9, 3
# Options that not every mode has -> the option of each mode that has them; "" is the one without such an option.
_BELONGS: dict[str, tuple[str, ...]] = {
    "workloads": ("",),
    "resume": ("",),
    "lengths": ("--latency",),
    "processes": ("--latency",),
    "texts": ("--corpus",),
    "column": ("--corpus",),
    "delimiter": ("--corpus",),
}
OTHERS = "albert-base, bert-base-2048, bert-large, bge-small, deberta-v3-base, distilbert-base, electra-base"
OTHERS += ", embeddinggemma-6-layers, minilm, modernbert-base, mpnet-base, nomic-base, qwen3-0.6b-2-layers, tiny"


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "bench",
        run,
        "measure the speed of encoders on this machine, beside other engines",
        """
        Times BERT encoders with random weights beside transformers, ONNX Runtime and OpenVINO on the CPU. Each runs in
        a process of its own, and they take turns. Prints real tokens/s, the ratio to the fastest other engine, and the
        share of the best matrix product of this machine. Outputs are checked against float64 first. All of it takes
        about 25 minutes for bert-base on 2 cores, which must do nothing else. With --latency: what one short text
        takes, from its string and from its token ids to its vector, beside what the machine allows. With --corpus: how
        many texts of a file become vectors in a second. Both have the tokenizer in it, and sentence-transformers and
        CTranslate2 beside the others. To install the other engines: pip install -e '.[bench]' in a clone.
        """,
        "fastbert bench --dtypes bfloat16 --workloads 8x128,32-ragged --output results\n"
        "  fastbert bench --latency --threads 1 --lengths 8,128 --output results\n"
        "  fastbert bench --corpus texts.txt --texts 2000 --model bge-small --output results",
    )
    parser.add_argument(
        "--model",
        metavar="M",
        help=f"bert-base (default), {OTHERS}; with --latency or --corpus: minilm (default), another shape of BERT's, a"
        " folder, a hub id, or all-MiniLM-L6-v2",
    )
    parser.add_argument("--dtypes", metavar="D,D", default="all", help="float32, bfloat16, int8; default: all")
    parser.add_argument(
        "--workloads",
        metavar="W,W",
        help="1x16, 1x128, 8x128, 4x512, 32-ragged, 1x2048, 1x8192; default: all that the model has positions for",
    )
    parser.add_argument("--contestants", metavar="C,C", default="all", help="which engines are timed; default: all")
    parser.add_argument(
        "--rounds",
        metavar="N",
        type=positive,
        help=f"how often each contestant is timed (default {ROUNDS}; with --corpus {CORPUS_ROUNDS})",
    )
    parser.add_argument(
        "--restarts", metavar="N", type=positive, default=1, help="how often each contestant is started (default 1)"
    )
    parser.add_argument(
        "--threads", metavar="N", type=_threads, help="threads of each process; default: all, one for each core"
    )
    parser.add_argument(
        "--output",
        metavar="DIR",
        type=Path,
        help="folder for results.json, .md and .png; with --latency and --corpus latency.* and corpus.*",
    )
    parser.add_argument("--resume", action="store_true", help="keep what an interrupted run left in DIR")
    _add_texts(parser)


def _add_texts(parser: Parser) -> None:
    """The options of --latency and --corpus."""
    parser.add_argument("--latency", action="store_true", help="time calls with one text")
    parser.add_argument(
        "--lengths",
        metavar="N,N",
        help="with --latency: tokens of a text; default: 8, 16, 32, 64, 128, 250 and 512"
        " as far as the model takes them",
    )
    parser.add_argument(
        "--processes", metavar="N", type=positive, help="with --latency: processes of a contestant that run at once"
    )
    parser.add_argument(
        "--corpus", metavar="FILE", type=Path, help=f"time the vectors of the texts of a file: {TEXT_KINDS}"
    )
    parser.add_argument("--column", metavar="NAME", help="with --corpus: the column that holds the texts")
    add_delimiter_option(parser)
    parser.add_argument("--texts", metavar="N", type=positive, help="with --corpus: the first N; default: all")


def run(options: argparse.Namespace) -> int:
    print(run_bench(options, say))
    return 0


def run_bench(options: argparse.Namespace, say: Callable[[str], None]) -> str:
    """The Markdown table. Raises UsageError, BenchmarkError or TextFileError."""
    raise_if_stopped()
    _check(options)
    if options.latency:
        return _run_latency(options, say)
    return _run_batches(options, say) if options.corpus is None else _run_corpus(options, say)


def _check(options: argparse.Namespace) -> None:
    """What does not depend on a model."""
    usable = cores().usable
    if options.threads is not None and options.threads > usable:
        raise UsageError(f"--threads {options.threads}: this process may use {usable} cores")
    if options.latency and options.corpus is not None:
        raise UsageError("--latency and --corpus are different runs: give one of them")
    mode = "--latency" if options.latency else "--corpus" if options.corpus is not None else ""
    for option, modes in _BELONGS.items():
        if getattr(options, option) not in (None, False) and mode not in modes:
            needs = " or ".join(filter(None, modes))
            raise UsageError(f"--{option} needs {needs}" if needs else f"--{option} does not go with {mode}")
    if options.resume and options.output is None:
        raise UsageError("--resume needs --output: the folder of the run to go on with")
    processes = options.processes or 1
    if processes * (options.threads or 1) > usable:
        threads = f" with --threads {options.threads}" if options.threads else ""
        raise UsageError(f"--processes {processes}{threads}: this process may use {usable} cores")


def _run_batches(options: argparse.Namespace, say: Callable[[str], None]) -> str:
    import torch

    from fastbert.bench import compete
    from fastbert.bench.contestants import CONTESTANTS
    from fastbert.bench.jobs import PRECISIONS
    from fastbert.bench.report import to_markdown
    from fastbert.testing.cases import MODELS, WORKLOADS

    (model,) = _choose("--model", options.model or "bert-base", tuple(MODELS))
    longest = MODELS[model].get("max_position_embeddings", 512)
    workloads = {workload.id: workload for workload in WORKLOADS if max(workload.lengths) <= longest}
    chosen = _choose("--workloads", options.workloads or "all", tuple(workloads))
    settings = compete.BenchSettings(
        model=model,
        precisions=_choose("--dtypes", options.dtypes, PRECISIONS),
        workloads=tuple(workloads[name] for name in chosen),
        contestants=_choose("--contestants", options.contestants, tuple(CONTESTANTS)),
        rounds=options.rounds or ROUNDS,
        restarts=options.restarts,
        threads=options.threads or torch.get_num_threads(),
        output=options.output,
        resume=options.resume,
    )
    return to_markdown(compete.run(settings, say))


def _run_latency(options: argparse.Namespace, say: Callable[[str], None]) -> str:
    from fastbert.bench.texts import latency, tables
    from fastbert.bench.texts.contestants import latency_contestants

    settings = _text_settings(options, latency_contestants(), ROUNDS)
    longest = settings.source.longest
    if options.lengths is None:
        lengths = tuple(length for length in latency.LENGTHS if length <= longest)
    else:
        lengths = tuple(sorted({_length(text) for text in options.lengths.split(",")}))
        if lengths[-1] > longest:
            raise UsageError(f"--lengths: {lengths[-1]} is too long: {settings.source.name} takes {longest} tokens")
        if lengths[0] <= (special := settings.source.special):
            raise UsageError(f"--lengths: {lengths[0]} is too short: {special} tokens of each text are special ones")
    return tables.latency(latency.run(replace(settings, lengths=lengths, processes=options.processes or 1), say))


def _run_corpus(options: argparse.Namespace, say: Callable[[str], None]) -> str:
    from fastbert.bench.texts import corpus, tables
    from fastbert.bench.texts.contestants import corpus_contestants

    check_source(options.corpus, options.delimiter)
    texts = tuple(islice(read_texts(options.corpus, options.column, delimiter=options.delimiter), options.texts))
    if not texts:
        raise TextFileError(f"{options.corpus} holds no texts")
    settings = _text_settings(options, corpus_contestants(), CORPUS_ROUNDS)
    return tables.corpus(corpus.run(replace(settings, texts=texts), say))


def _text_settings(options: argparse.Namespace, contestants: tuple[str, ...], rounds: int) -> TextSettings:
    import torch

    from fastbert.bench.jobs import PRECISIONS
    from fastbert.bench.texts.folder import find
    from fastbert.bench.texts.run import TextSettings

    return TextSettings(
        precisions=_choose("--dtypes", options.dtypes, PRECISIONS),
        contestants=_choose("--contestants", options.contestants, contestants),
        source=find(options.model or "minilm"),
        rounds=options.rounds or rounds,
        restarts=options.restarts,
        threads=options.threads or max(1, torch.get_num_threads() // (options.processes or 1)),
        output=options.output,
    )


def _threads(text: str) -> int | None:
    """None: all."""
    return None if text == "all" else positive(text)


def _length(text: str) -> int:
    try:
        return positive(text)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"--lengths: {error}") from None


def _choose(option: str, text: str, known: Sequence[Any]) -> tuple[Any, ...]:
    """The names of a comma-separated list, in the order of `known`; "all" is all of them."""
    names = text.split(",")
    if text == "all":
        return tuple(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(f"{option}: unknown {', '.join(map(repr, unknown))}; known are {', '.join(known)}")
    return tuple(name for name in known if name in names)
