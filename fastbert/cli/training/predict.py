"""`fastbert predict`: the answers of a fine-tuned model."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fastbert.cli.loading import load_to_run
from fastbert.cli.outputs import NESTED_ROW_KINDS, STDOUT, check_output, open_rows
from fastbert.cli.parser import (
    AGGREGATES,
    UsageError,
    add_command,
    add_delimiter_option,
    add_model,
    add_running_options,
    add_windows_option,
    windows_of,
)
from fastbert.cli.stopping import raise_if_stopped, say
from fastbert.data.text_files import TEXT_KINDS, check_source, name_of, read_rows, suffix_of
from fastbert.messages import absent, install
from fastbert.training.options import HASH_LINES, HASH_LINES_HELP

_CONLL = (".conll", ".bio", ".iob", ".iob2")  # a .txt has texts here


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "predict",
        run,
        "what a fine-tuned model says of each row of a file",
        """
        Runs what `fastbert finetune` made, or transformers, over FILE, and writes a row for each of its rows, in its
        order. Classification: the label and its probability, all labels above --threshold, or a number. Tokens: the
        entities with their places in the text. Question answering: the answer, its probability, and its place. OUT is a
        .jsonl, a .csv (with lists as JSON) or a .parquet; without it the rows go to standard output, as JSON lines.
        """,
        "fastbert predict ./my-model reviews.csv --output labels.jsonl",
    )
    add_model(parser, "a folder, or a hub id")
    parser.add_argument(
        "file",
        metavar="FILE",
        type=Path,
        help=f"{TEXT_KINDS}, or - for standard input; a SQuAD .json of questions, or a .conll of words, too",
    )
    parser.add_argument(
        "--columns",
        metavar="NAME",
        nargs="+",
        help="the columns of the texts: one, or two; by default those of the training data, or by their usual names",
    )
    add_delimiter_option(parser)
    parser.add_argument(
        "--output", metavar="OUT", type=Path, default=STDOUT, help="a .jsonl, a .csv, a .parquet, or - (default)"
    )
    parser.add_argument("--hash-lines", choices=HASH_LINES, default="auto", help=f"{HASH_LINES_HELP} (the default)")
    parser.add_argument("--all", action="store_true", help="the probabilities of all labels, in a column each")
    parser.add_argument(
        "--threshold",
        metavar="P",
        type=_share,
        default=0.5,
        help="of several labels at once: those with a probability above P (default 0.5)",
    )
    add_windows_option(parser, "how longer texts are cut", ("core", *AGGREGATES))
    add_running_options(parser)
    parser.add_argument("--force", action="store_true", help="replace OUT")


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 < value < 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number between 0 and 1")
    return value


def run(options: argparse.Namespace) -> int:
    check_output(options.output, NESTED_ROW_KINDS, options.force)
    check_source(options.file, options.delimiter)
    windows_of(options)  # what is wrong with it is said at once
    if missing := absent("scipy"):
        raise UsageError(f"predict needs {', '.join(missing)}: {install('train')}")

    from fastbert.data.sentence_folder import transformer_folder
    from fastbert.data.tokenized import CHUNK_INPUTS
    from fastbert.data.usage import read_usage
    from fastbert.hub import resolve
    from fastbert.sentences.batches import in_chunks, progress_bar
    from fastbert.training.finetuning.readers import READERS

    raise_if_stopped()
    usage = read_usage(transformer_folder(resolve(options.model)), options.model)
    task, total = READERS[usage.task], 0
    _check_options(options, usage)
    model = load_to_run(task.model, options)
    if usage.max_length is not None:
        model.max_seq_length = usage.max_length
    windows = windows_of(options, model.windows)
    extra = {"batch_tokens": options.batch_tokens, "windows": windows, "aggregate": options.aggregate}
    if usage.task == "classification":
        extra |= {"threshold": options.threshold, "every": options.all}
    with open_rows(options.output, task.examples) as rows, progress_bar(None, None, desc="predicting", delay=0) as bar:
        for chunk in in_chunks(_rows(options, usage), CHUNK_INPUTS):
            columns = {name: [row[name] for row in chunk] for name in chunk[0]}
            rows.write(task.columns(model, columns, **extra))
            bar.update(len(chunk))
            raise_if_stopped()
            total += len(chunk)
        if not total:
            raise UsageError(f"{name_of(options.file)} holds no rows")
    say(f"{total:,} rows -> {options.output}")
    return 0


def _check_options(options: argparse.Namespace, usage: Any) -> None:
    """Options that would be ignored."""
    if options.all and usage.task != "classification":
        raise UsageError(f"--all is for classification; {options.model} is for {usage.task}")
    if options.hash_lines != "auto" and not _is_conll(options.file, usage):
        what = f"CoNLL files ({', '.join(_CONLL)}) and models of tokens"
        raise UsageError(f"--hash-lines is for {what}; {options.file} for {options.model} is read without it")
    if options.columns and (_is_conll(options.file, usage) or _is_squad(options.file, usage)):
        raise UsageError(f"--columns is for files that have columns; {options.file} has none")


def _is_conll(path: Path, usage: Any) -> bool:
    return usage.task == "tokens" and suffix_of(path) in _CONLL


def _is_squad(path: Path, usage: Any) -> bool:
    return usage.task == "qa" and path.suffix == ".json"


def _rows(options: argparse.Namespace, usage: Any) -> Iterator[dict[str, Any]]:
    """What the model reads of each row, by the columns' names."""
    from fastbert.training.finetuning.inputs.squad import load_questions
    from fastbert.training.finetuning.inputs.tagged import read_conll
    from fastbert.training.finetuning.readers import input_columns

    path, columns = options.file, options.columns
    if _is_squad(path, usage):
        dataset = load_questions([str(path)], "test", with_answers=False)
        for question, context in zip(dataset.questions, dataset.contexts, strict=True):
            yield {"question": question, "context": context}
        return
    if _is_conll(path, usage):
        for text in read_conll(path, with_tags=False, hash_lines=options.hash_lines):
            yield {"text": [word for word, _ in text]}
        return
    names: tuple[str, ...] = tuple(columns or ())

    def choose(there: list[str]) -> Sequence[str]:
        nonlocal names
        names = input_columns(usage, there, name_of(path))
        return names

    wanted = _number_of_texts(usage)
    if columns is not None and len(columns) not in wanted:
        raise UsageError(f"--columns has {len(columns)} names; this model reads {' or '.join(map(str, wanted))}")
    for values in read_rows(path, columns, choose, delimiter=options.delimiter):
        names = names or ("text",)
        if len(values) != len(names) or len(values) not in wanted:
            raise UsageError(
                f"{name_of(path)} has {len(values)} text in a row, and this model reads"
                f" {' or '.join(map(str, wanted))}: give a .jsonl, a .csv or a .parquet"
            )
        if usage.task != "tokens" and any(isinstance(value, list) for value in values):
            raise UsageError(f"{name_of(path)}: a value is a list; this model reads texts")
        yield dict(zip(names, values, strict=True))


def _number_of_texts(usage: Any) -> tuple[int, ...]:
    if usage.task == "classification":
        return (len(usage.text_columns),) if usage.text_columns else (1, 2)
    return (2,) if usage.task == "qa" else (1,)
