"""`fastbert classify`: the label of each text."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fastbert.cli.loading import load_to_run
from fastbert.cli.outputs import ROW_KINDS, STDOUT, check_output, open_rows
from fastbert.cli.parser import (
    AGGREGATES,
    UsageError,
    add_command,
    add_model_option,
    add_running_options,
    add_source,
    add_windows_option,
    windows_of,
)
from fastbert.cli.stopping import raise_if_stopped, say
from fastbert.data.text_files import check_source, name_of, read_texts
from fastbert.importing import without_collector

CHUNK_TEXTS = 1024


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "classify",
        run,
        "the label of each text",
        """
        Gives every text of FILE its most probable label and the probability, a row a text, in the order of FILE.
        MODEL must have a head for sequence classification. OUT is a .jsonl or a .parquet; without it the rows go to
        standard output, as JSON lines, as soon as they are there.
        """,
        "fastbert classify reviews.csv --column text --model ./my-classifier --output labels.jsonl",
    )
    add_source(parser)
    add_model_option(parser)
    parser.add_argument(
        "--output", metavar="OUT", type=Path, default=STDOUT, help="a .jsonl, a .parquet, or - (default)"
    )
    parser.add_argument("--all", action="store_true", help="the probabilities of all labels, in a column each")
    add_windows_option(parser, "texts longer than the model takes are labelled by all their chunks", AGGREGATES)
    add_running_options(parser)
    parser.add_argument("--force", action="store_true", help="replace OUT")


def run(options: argparse.Namespace) -> int:
    check_output(options.output, ROW_KINDS, options.force)
    check_source(options.file, options.delimiter)
    windows_of(options)  # what is wrong with it is said at once

    with without_collector():
        from fastbert.sentences import TextClassifier
        from fastbert.sentences.batches import bar_of, in_chunks, progress_bar
        from fastbert.sentences.text_model import InferenceOptions

    raise_if_stopped()
    classifier = load_to_run(TextClassifier, options)
    windows = windows_of(options, classifier.windows) or classifier.windows
    settings = InferenceOptions("", options.batch_tokens, on_host=True, windows=windows, aggregate=options.aggregate)
    total, bar_options = 0, bar_of(windows)
    with open_rows(options.output) as rows, progress_bar(None, None, desc="classifying", delay=0, **bar_options) as bar:
        for chunk in in_chunks(read_texts(options.file, options.column, delimiter=options.delimiter), CHUNK_TEXTS):
            scores = classifier.probabilities(classifier.rows(chunk, settings, bar.update)).float().numpy()
            best = scores.argmax(-1)
            columns: dict[str, Any] = {"text": chunk, "label": [classifier.labels[i] for i in best]}
            if options.all:
                columns |= {label: scores[:, i] for i, label in enumerate(classifier.labels)}
            else:
                columns["score"] = scores.max(-1)
            rows.write(columns)
            raise_if_stopped()
            total += len(chunk)
        if not total:
            raise UsageError(f"{name_of(options.file)} holds no texts")
    say(f"{total:,} texts -> {options.output}")
    return 0
