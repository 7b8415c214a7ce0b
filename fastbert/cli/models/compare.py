"""`fastbert compare`: several encoders side by side."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastbert.cli.parser import A_MODEL, UsageError, add_command, positive
from fastbert.cli.stopping import USER_ERROR, raise_if_stopped, say

if TYPE_CHECKING:
    from fastbert.bench.comparison import Candidate

ROUNDS = 5
DTYPES = ("float32", "bfloat16")


def add(commands: Any) -> None:
    parser = add_command(
        commands, "compare", run, "the size, cost and speed of several encoders, side by side",
        """
        Counts the parameters, operations and memory of each MODEL, and measures its speed here, all in turns, on the
        same mix of text lengths. A MODEL is a checkpoint, a config.json, or the name of a shape with random weights, as
        bert-base, distilbert-base or modernbert-base. With --pairs, how well the cosines of checkpoints follow the
        scores of pairs of texts stands beside it. DIR gets comparison.json, .md and .png.
        """,
        "fastbert compare bert-base distilbert-base modernbert-base --output comparison",
    )  # fmt: skip
    parser.add_argument("models", metavar="MODEL", nargs="+", help=f"a shape, a config.json, {A_MODEL}")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="to compute in (default float32)")
    parser.add_argument("--workload", metavar="W", default="32-ragged", help="8x128, 4x512, ...; default 32-ragged")
    parser.add_argument("--rounds", metavar="N", type=positive, default=ROUNDS, help=f"turns (default {ROUNDS})")
    parser.add_argument(
        "--pairs", metavar="FILE", type=Path, help="pairs of texts with scores (columns sentence1, sentence2, score)"
    )
    parser.add_argument("--output", metavar="DIR", type=Path, help="folder for comparison.json, .md and .png")


def run(options: argparse.Namespace) -> int:
    if options.output is not None and options.output.exists() and not options.output.is_dir():
        raise UsageError(f"--output {options.output} is no folder")

    import torch

    from fastbert.bench.comparison import compare, to_table, write_chart
    from fastbert.bench.report import write_report
    from fastbert.bench.timing import describe_machine
    from fastbert.errors import CheckpointError, ConfigError
    from fastbert.testing.cases import WORKLOADS

    raise_if_stopped()
    lengths = next((w.lengths for w in WORKLOADS if w.id == options.workload), None)
    if lengths is None:
        known = ", ".join(w.id for w in WORKLOADS)
        raise UsageError(f"--workload: unknown {options.workload!r}; known are {known}")
    pairs = None if options.pairs is None else _read_pairs(options.pairs)
    candidates, failed = [], 0
    for name in dict.fromkeys(options.models):
        try:
            candidates.append(_load(name, getattr(torch, options.dtype)))
        except (CheckpointError, ConfigError, OSError) as error:
            say(f"error: {name}: {' '.join(str(error).split())}")
            failed += 1
        raise_if_stopped()
    if not candidates:
        return USER_ERROR
    rows, machine = compare(candidates, lengths, options.rounds), describe_machine()
    for row in rows if pairs is not None else ():
        raise_if_stopped()
        row["spearman"] = _spearman(row["name"], pairs, options.dtype)
    table = to_table(rows, machine, options.dtype)
    print(table, flush=True)
    if options.output is not None:
        report = {"machine": machine, "dtype": options.dtype, "workload": options.workload, "rows": rows}
        write_report(options.output, "comparison", report, table)
        try:
            write_chart(options.output / "comparison.png", rows, machine, options.dtype)
        except ImportError:
            say("no chart: it needs matplotlib (pip install matplotlib)")
        say(f"{len(rows)} models -> {options.output}")
    return USER_ERROR if failed else 0


def _load(name: str, dtype: Any) -> Candidate:
    """Raises CheckpointError, ConfigError or OSError."""
    from fastbert.bench.comparison import Candidate
    from fastbert.bench.jobs import fields_without_type
    from fastbert.config import EncoderConfig
    from fastbert.data.sentence_folder import transformer_folder
    from fastbert.hub import resolve
    from fastbert.models.auto import AutoModel
    from fastbert.testing.cases import MODELS

    if name in MODELS:
        fields = MODELS[name]
        config = EncoderConfig.of_family(fields.get("model_type", "bert"), **fields_without_type(fields))
        model = AutoModel.from_config(config)
    elif Path(name).is_file():
        model = AutoModel.from_config(EncoderConfig.from_file(name))
    else:
        model = AutoModel.from_pretrained(transformer_folder(resolve(name)))
    return Candidate(name, model.to(dtype).eval().base_model)


def _read_pairs(path: Path) -> tuple[list[str], list[str], Any]:
    """Both texts of each row, and the scores. Raises InputError or TextFileError."""
    import numpy as np

    from fastbert.data.sources import load_source
    from fastbert.errors import InputError
    from fastbert.training.finetuning.inputs.rows import label_column, text_columns, texts_of

    rows, where = load_source([str(path)]), str(path)
    names = rows.column_names
    columns, scored = text_columns(names, (), where), label_column(names, "", where)
    if len(columns) != 2:
        raise InputError(f"{where} has one text a row, {columns[0]!r}; pairs have two, as sentence1 and sentence2")
    try:
        scores = np.array(rows[scored][:], dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError(f"{where}: {scored} holds what is no number") from None
    if len(scores) < 2 or not np.isfinite(scores).all():
        raise InputError(f"{where}: at least two rows with a finite {scored} are needed")
    return texts_of(rows, columns[0], where), texts_of(rows, columns[1], where), scores


def _spearman(name: str, pairs: Any, dtype: str) -> float | None:
    """Of the cosines of a checkpoint's vectors with the scores; None of a shape, whose weights are random."""
    import torch
    from scipy.stats import spearmanr

    from fastbert.sentences import SentenceEncoder
    from fastbert.testing.cases import MODELS

    if name in MODELS or Path(name).is_file():
        return None
    first, second, scores = pairs
    encoder = SentenceEncoder(name, dtype=dtype)
    vectors = [encoder.encode(texts, convert_to_tensor=True).float() for texts in (first, second)]
    cosines = torch.nn.functional.cosine_similarity(*vectors)
    return float(spearmanr(cosines.cpu().numpy(), scores)[0])
