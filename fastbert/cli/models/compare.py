"""`fastbert compare`: several encoders side by side."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastbert.cli.parser import A_MODEL, UsageError, add_command, add_delimiter_option, add_model, dtype_name, positive
from fastbert.cli.stopping import USER_ERROR, raise_if_stopped, say
from fastbert.data.text_files import TEXT_KINDS, read_texts

if TYPE_CHECKING:
    from fastbert.bench.comparison import Candidate

ROUNDS = 5
DTYPES = ("float32", "bfloat16")


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "compare",
        run,
        "the size, cost and speed of several encoders, side by side",
        """
        Counts the parameters, operations and memory of each MODEL, and measures its speed here, all in turns, on the
        same mix of text lengths or on your --texts. A MODEL is a checkpoint (an encoder, a classifier, a reranker), a
        config.json, or the name of a shape with random weights, as bert-base, distilbert-base or modernbert-base. With
        --labelled, how good checkpoints are on such rows stands beside it: pairs of texts with scores judge encoders
        and rerankers, texts with labels judge encoders and classifiers. DIR gets comparison.json, .md and .png.
        """,
        "fastbert compare bert-base distilbert-base modernbert-base --output comparison",
    )
    add_model(parser, f"a shape, a config.json, {A_MODEL}", several=True)
    parser.add_argument(
        "--dtype",
        type=dtype_name,
        choices=DTYPES,
        default="float32",
        help="the number format to compute in (default float32)",
    )
    mix = parser.add_mutually_exclusive_group()
    mix.add_argument(
        "--workload", metavar="W", default="32-ragged", help="texts x tokens: 8x128, 4x512, ...; default 32-ragged"
    )
    mix.add_argument("--texts", metavar="FILE", type=Path, help=f"your texts instead: {TEXT_KINDS}")
    parser.add_argument(
        "--rounds", metavar="N", type=positive, default=ROUNDS, help=f"how often each model is timed (default {ROUNDS})"
    )
    parser.add_argument(
        "--labelled", metavar="FILE", type=Path, help="rows with a label each, or pairs of texts with a score each"
    )
    add_delimiter_option(parser)
    parser.add_argument("--output", metavar="DIR", type=Path, help="folder for comparison.json, .md and .png")


def run(options: argparse.Namespace) -> int:
    if options.output is not None and options.output.exists() and not options.output.is_dir():
        raise UsageError(f"--output {options.output} is no folder")
    if options.delimiter is not None and options.texts is None and options.labelled is None:
        raise UsageError("--delimiter is for the files of --texts and --labelled")

    import torch

    from fastbert.bench.comparison import compare, to_table, write_chart
    from fastbert.bench.report import write_report
    from fastbert.bench.timing import describe_machine
    from fastbert.cli.models.quality import quality_of, read_labelled
    from fastbert.errors import CheckpointError, ConfigError, InputError
    from fastbert.testing.cases import WORKLOADS

    raise_if_stopped()
    lengths = next((w.lengths for w in WORKLOADS if w.id == options.workload), None)
    if lengths is None:
        known = ", ".join(w.id for w in WORKLOADS)
        raise UsageError(f"--workload: unknown {options.workload!r}; known are {known}")
    data = None if options.labelled is None else read_labelled(options.labelled, _delimiter(options, "labelled"))
    texts = None if options.texts is None else list(read_texts(options.texts, delimiter=_delimiter(options, "texts")))
    if texts is not None and not texts:
        raise UsageError(f"{options.texts} holds no texts")
    candidates, failed = [], 0
    for name in dict.fromkeys(options.models):
        try:
            candidates.append(_load(name, getattr(torch, options.dtype), data is not None or texts is not None))
        except (CheckpointError, ConfigError, OSError) as error:
            say(f"error: {name}: {' '.join(str(error).split())}")
            failed += 1
        raise_if_stopped()
    if not candidates:
        return USER_ERROR
    wanted = [lengths] * len(candidates) if texts is None else _lengths(candidates, texts)
    rows, machine = compare(candidates, wanted, options.rounds), describe_machine()
    for candidate, row in zip(candidates, rows, strict=True):
        raise_if_stopped()
        if data is None or candidate.tokenizer is None:  # without one, the weights are random
            continue
        try:
            row["quality"] = quality_of(candidate.name, data, options.dtype)
        except InputError as error:
            say(f"error: {candidate.name}: {error}")
            failed += 1
    table = to_table(rows, machine, options.dtype)
    print(table, flush=True)
    if options.output is not None:
        mix = options.workload if texts is None else str(options.texts)
        report = {"machine": machine, "dtype": options.dtype, "workload": mix, "rows": rows}
        write_report(options.output, "comparison", report, table)
        try:
            write_chart(options.output / "comparison.png", rows, machine, options.dtype)
        except ImportError:
            say("no chart: it needs matplotlib (pip install matplotlib)")
        say(f"{len(rows)} models -> {options.output}")
    return USER_ERROR if failed else 0


def _delimiter(options: argparse.Namespace, name: str) -> str | None:
    from fastbert.data.sources import delimiter_for

    every = [str(path) for path in (options.texts, options.labelled) if path is not None]
    return delimiter_for([str(vars(options)[name])], every, options.delimiter)


def _load(name: str, dtype: Any, reads_texts: bool) -> Candidate:
    """Raises CheckpointError, ConfigError or OSError."""
    from fastbert.bench.comparison import Candidate
    from fastbert.bench.jobs import fields_without_type
    from fastbert.config import EncoderConfig
    from fastbert.data.sentence_folder import transformer_folder
    from fastbert.data.tokenization import load_tokenizer
    from fastbert.hub import resolve
    from fastbert.models.auto import AutoModel
    from fastbert.testing.cases import MODELS

    tokenizer = None
    if name in MODELS:
        fields = MODELS[name]
        config = EncoderConfig.of_family(fields.get("model_type", "bert"), **fields_without_type(fields))
        model = AutoModel.from_config(config)
    elif Path(name).is_file():
        model = AutoModel.from_config(EncoderConfig.from_file(name))
    else:
        folder = transformer_folder(resolve(name))
        model, tokenizer = AutoModel.from_pretrained(folder), load_tokenizer(folder) if reads_texts else None
    return Candidate(name, model.to(dtype).eval().base_model, tokenizer)


def _lengths(candidates: list[Candidate], texts: list[str]) -> list[list[int]]:
    """Of the texts, in the tokens of each model, or of the first model that has a tokenizer."""
    per_model = [candidate.lengths_of(texts) for candidate in candidates]
    if (first := next(filter(None, per_model), None)) is None:
        raise UsageError("--texts: none of these has a tokenizer; name a checkpoint, too")
    return [lengths or first for lengths in per_model]
