"""`fastbert search` and `fastbert rerank`: the best texts beside a query, by their vectors or by a cross-encoder."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastbert.cli.outputs import ROW_KINDS, check_output, open_rows
from fastbert.cli.parser import (
    Parser,
    UsageError,
    add_command,
    add_model_option,
    add_running_options,
    add_source,
    positive,
)
from fastbert.cli.stopping import raise_if_stopped
from fastbert.data.text_files import check_source, name_of, read_texts

if TYPE_CHECKING:
    from fastbert.data.tokenized import Text

CHUNK_TEXTS = 1024
TOP = 10


def add(commands: Any) -> None:
    _add_search(commands)
    _add_rerank(commands)


def _add_search(commands: Any) -> None:
    parser = add_command(
        commands, "search", run_search, "the texts that are closest to a query",
        """
        Shows the texts of FILE whose vectors are most similar to QUERY's: the score, the place in FILE, the text. The
        vectors are made on the way, or read from what `fastbert encode` has written of the same FILE (--vectors).
        """,
        'fastbert search "how do I reset my password?" questions.txt --model all-MiniLM-L6-v2 --top 5',
    )  # fmt: skip
    _add_arguments(parser)
    parser.add_argument("--vectors", metavar="V.npy", type=Path, help="the vectors of FILE, from `fastbert encode`")


def _add_rerank(commands: Any) -> None:
    parser = add_command(
        commands, "rerank", run_rerank, "texts by their score beside a query",
        """
        Scores every text of FILE together with QUERY, and shows the best: the score, the place in FILE, the text.
        MODEL is a cross-encoder: it has a head for sequence classification with one label.
        """,
        'fastbert rerank "who wrote Emma?" passages.txt --model ./ms-marco-MiniLM-L6-v2 --top 5',
    )  # fmt: skip
    _add_arguments(parser)


def _add_arguments(parser: Parser) -> None:
    parser.add_argument("query", metavar="QUERY", help="what is looked for")
    add_source(parser)
    add_model_option(parser)
    parser.add_argument("--top", metavar="N", type=positive, default=TOP, help=f"how many to show (default {TOP})")
    parser.add_argument(
        "--output", metavar="OUT", type=Path, help="a .jsonl, a .parquet, or - for JSON lines; default: a table"
    )
    add_running_options(parser)
    parser.add_argument("--force", action="store_true", help="replace OUT")


def _check(options: argparse.Namespace) -> None:
    if options.output is not None:
        check_output(options.output, ROW_KINDS, options.force)
    check_source(options.file)


class Best:
    """The `count` texts with the highest scores so far, the best first; equal ones in their order."""

    def __init__(self, count: int):
        self.count, self.rows, self.seen = count, [], 0  # type: int, list[tuple[float, int, str]], int

    def add(self, texts: list[str], scores: Any) -> None:
        found = [(float(score), self.seen + i, text) for i, (score, text) in enumerate(zip(scores, texts, strict=True))]
        self.rows = sorted([*self.rows, *found], key=lambda row: (-row[0], row[1]))[: self.count]
        self.seen += len(texts)

    def show(self, output: Path | None, source: Path) -> None:
        """Raises UsageError where there were no texts."""
        if not self.seen:
            raise UsageError(f"{name_of(source)} holds no texts")
        if output is None:
            for score, place, text in self.rows:
                print(f"{score:9.4f}  {place:>8,}  {text}")
            return
        with open_rows(output) as rows:
            scores, places, texts = zip(*self.rows, strict=True)
            rows.write({"index": list(places), "score": list(scores), "text": list(texts)})


def run_search(options: argparse.Namespace) -> int:
    _check(options)
    if options.vectors is not None and not options.vectors.is_file():
        raise UsageError(f"--vectors {options.vectors} is not a file")

    from fastbert.sentences import SentenceEncoder
    from fastbert.sentences.batches import in_chunks, progress_bar

    raise_if_stopped()
    encoder = SentenceEncoder.from_pretrained(options.model, dtype=options.dtype, device=options.device)
    query, best = encoder.encode_query(options.query), Best(options.top)
    document = encoder._of_task("document", {})["prompt_name"]
    made = None if options.vectors is None else _read_vectors(options.vectors, encoder.dim)
    with progress_bar(None, None, desc="searching", delay=0) as bar:
        for chunk in in_chunks(read_texts(options.file, options.column), CHUNK_TEXTS):
            if made is None:
                ((vectors, _),) = encoder.encode_stream(
                    chunk,
                    batch_tokens=options.batch_tokens,
                    chunk_texts=len(chunk),
                    prompt_name=document,
                    on_batch=bar.update,
                )
            else:
                vectors = made[best.seen : best.seen + len(chunk)]
                bar.update(len(vectors))
            if len(vectors) != len(chunk):
                rows = best.seen + len(vectors)
                raise UsageError(f"--vectors {options.vectors} has {rows} rows; {options.file} has more texts")
            best.add(chunk, encoder.similarity(query, vectors)[0].tolist())
            raise_if_stopped()
    if made is not None and len(made) != best.seen:
        raise UsageError(f"--vectors {options.vectors} has {len(made)} rows; {options.file} has {best.seen} texts")
    best.show(options.output, options.file)
    return 0


def _read_vectors(path: Path, dim: int) -> Any:
    import numpy as np

    try:
        vectors = np.load(path, mmap_mode="c")  # read as it is needed; c: torch wants what may be written to
    except ValueError as error:
        raise UsageError(f"--vectors {path}: {str(error).splitlines()[0]}") from None
    if vectors.ndim != 2 or vectors.shape[1] != dim or vectors.dtype != np.float32:
        raise UsageError(
            f"--vectors {path} holds {vectors.dtype} {vectors.shape}; the model makes float32 (texts, {dim})"
        )
    return vectors


def run_rerank(options: argparse.Namespace) -> int:
    _check(options)

    from fastbert.sentences import Reranker
    from fastbert.sentences.batches import in_chunks, progress_bar
    from fastbert.sentences.text_model import InferenceOptions

    raise_if_stopped()
    reranker = Reranker.from_pretrained(options.model, dtype=options.dtype, device=options.device)
    if reranker.num_labels != 1:
        raise UsageError(f"{options.model} has {reranker.num_labels} labels; a reranker has one")
    best = Best(options.top)
    settings = InferenceOptions(prompt=reranker.prompt(), batch_tokens=options.batch_tokens, on_host=True)
    with progress_bar(None, None, desc="scoring", delay=0) as bar:
        for chunk in in_chunks(read_texts(options.file, options.column), CHUNK_TEXTS):
            pairs: list[Text] = [(options.query, text) for text in chunk]
            best.add(chunk, reranker.scores(reranker.rows(pairs, settings, bar.update)).tolist())
            raise_if_stopped()
    best.show(options.output, options.file)
    return 0
