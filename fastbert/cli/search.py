"""`fastbert search` and `fastbert rerank`: the best texts beside a query, by their vectors or by a cross-encoder."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastbert.cli.loading import load_to_run
from fastbert.cli.outputs import ROW_KINDS, check_output, open_rows
from fastbert.cli.parser import (
    AGGREGATES,
    Parser,
    UsageError,
    add_command,
    add_model_option,
    add_running_options,
    add_source,
    add_windows_option,
    positive,
    windows_of,
)
from fastbert.cli.stopping import raise_if_stopped
from fastbert.data.text_files import check_source, name_of, read_texts
from fastbert.importing import without_collector

if TYPE_CHECKING:
    from fastbert.data.tokenized import Text
    from fastbert.sentences import SentenceEncoder

CHUNK_TEXTS = 1024
TOP = 10
VECTOR_KINDS = (".npy", ".parquet", ".safetensors")  # of what `encode` writes
SHOWN_MATCHES = 6


def add(commands: Any) -> None:
    _add_search(commands)
    _add_rerank(commands)


def _add_search(commands: Any) -> None:
    parser = add_command(
        commands,
        "search",
        run_search,
        "the texts that are closest to a query",
        """
        Shows the texts of FILE whose vectors are most similar to QUERY's: the score, the place in FILE, the text. The
        vectors are made on the way, or read from what `fastbert encode` has written of the same FILE (--vectors). With
        --windows each text is cut into passages of whole sentences, and stands for its best one, which is shown. A
        multi-vector model (ColBERT) scores by MaxSim, and the words that matched are shown, too.
        """,
        'fastbert search "how do I reset my password?" questions.txt --model all-MiniLM-L6-v2 --top 5',
    )
    _add_arguments(parser)
    parser.add_argument(
        "--vectors",
        metavar="V",
        type=Path,
        help="the vectors of FILE, from `fastbert encode`: a .npy, .parquet; a .safetensors of a multi-vector model",
    )
    add_windows_option(parser, "search in passages of texts")


def _add_rerank(commands: Any) -> None:
    parser = add_command(
        commands,
        "rerank",
        run_rerank,
        "texts by their score beside a query",
        """
        Scores every text of FILE together with QUERY, and shows the best: the score, the place in FILE, the text.
        MODEL is a cross-encoder, which has a head for sequence classification with one label, or a multi-vector model
        (ColBERT). With --windows a text is as good as its best passage, which is shown.
        """,
        'fastbert rerank "who wrote Emma?" passages.txt --model ./ms-marco-MiniLM-L6-v2 --top 5',
    )
    _add_arguments(parser)
    add_windows_option(parser, "read texts to their end", AGGREGATES[:2])


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
    check_source(options.file, options.delimiter)


class Best:
    """The `count` texts with the highest scores so far, the best first; equal ones in their order. A score of minus
    infinity is none.
    """

    def __init__(self, count: int):
        self.count, self.rows, self.seen = count, [], 0  # type: int, list[tuple[float, int, dict[str, Any]]], int

    def add(self, texts: list[str], scores: Any, places: Sequence[tuple[int, int]] | None = None) -> None:
        """places: of a passage in each text, which is what is shown."""
        new_rows = []
        for i, (score, text) in enumerate(zip(scores, texts, strict=True)):
            row: dict[str, Any] = {"text": text}
            if score == float("-inf"):
                continue
            if places is not None:
                start, end = places[i]
                row = {"text": text[start:end], "start": start, "end": end}
            new_rows.append((float(score), self.seen + i, row))
        self.rows = sorted([*self.rows, *new_rows], key=lambda row: (-row[0], row[1]))[: self.count]
        self.seen += len(texts)

    def show(self, output: Path | None, source: Path) -> None:
        """Raises UsageError where there were no texts."""
        if not self.seen:
            raise UsageError(f"{name_of(source)} holds no texts")
        if not self.rows:
            raise UsageError(f"{name_of(source)} holds no texts with words")
        if output is None:
            for score, index, row in self.rows:
                is_passage = "start" in row  # it may have several lines
                print(f"{score:9.4f}  {index:>8,}  {' '.join(row['text'].split()) if is_passage else row['text']}")
                if row.get("matches"):
                    pairs = [f"{one['query']} ~ {one['document']}" for one in row["matches"][:SHOWN_MATCHES]]
                    print(f"{'':21}{', '.join(pairs)}")
            return
        with open_rows(output) as rows:
            scores, indices, entries = zip(*self.rows, strict=True)
            columns = {name: [row[name] for row in entries] for name in entries[0]}
            rows.write({"index": list(indices), "score": list(scores), **columns})


def run_search(options: argparse.Namespace) -> int:
    _check(options)
    if options.vectors is not None and options.windows is not None:
        raise UsageError("--vectors are of whole texts, and --windows searches in their passages: give one of them")
    if options.vectors is not None and not options.vectors.is_file():
        raise UsageError(f"--vectors {options.vectors} is not a file")
    if options.vectors is not None and options.vectors.suffix not in VECTOR_KINDS:
        raise UsageError(f"--vectors {options.vectors}: the name must end in {' or '.join(VECTOR_KINDS)}")

    with without_collector():
        from fastbert.sentences import SentenceEncoder
        from fastbert.sentences.batches import bar_of, in_chunks, progress_bar
        from fastbert.sentences.documents import CHUNKS

    if _is_multi_vector(options.model):
        return _search_tokens(options, options.vectors)
    if options.vectors is not None and options.vectors.suffix == ".safetensors":
        raise UsageError(f"--vectors {options.vectors} is for a multi-vector model; {options.model} is none")
    windows = windows_of(options, CHUNKS)
    raise_if_stopped()
    encoder = load_to_run(SentenceEncoder, options)
    query, best = encoder.encode_query(options.query), Best(options.top)
    document = encoder._of_task("document", {})["prompt_name"]
    stored = None if options.vectors is None else _read_vectors(options.vectors, encoder.dim)
    with progress_bar(None, None, desc="searching", delay=0, **bar_of(windows)) as bar:
        for chunk in in_chunks(read_texts(options.file, options.column, delimiter=options.delimiter), CHUNK_TEXTS):
            if windows is not None:
                chosen = {"windows": windows, "prompt_name": document, "batch_tokens": options.batch_tokens}
                best.add(chunk, *_best_passages(encoder, query, chunk, on_tokens=bar.update, **chosen))
                raise_if_stopped()
                continue
            if stored is None:
                ((vectors, _),) = encoder.encode_stream(
                    chunk,
                    batch_tokens=options.batch_tokens,
                    chunk_texts=len(chunk),
                    prompt_name=document,
                    on_batch=bar.update,
                )
            else:
                vectors = stored[best.seen : best.seen + len(chunk)]
                bar.update(len(vectors))
            if len(vectors) != len(chunk):
                rows = best.seen + len(vectors)
                raise UsageError(f"--vectors {options.vectors} has {rows} rows; {options.file} has more texts")
            best.add(chunk, encoder.similarity(query, vectors)[0].tolist())
            raise_if_stopped()
    if stored is not None and len(stored) != best.seen:
        raise UsageError(f"--vectors {options.vectors} has {len(stored)} rows; {options.file} has {best.seen} texts")
    best.show(options.output, options.file)
    return 0


def _is_multi_vector(model: str) -> bool:
    from fastbert.data.sentence_folder import is_multi_vector
    from fastbert.hub import resolve

    return is_multi_vector(resolve(model))


def _search_tokens(options: argparse.Namespace, vectors: Path | None) -> int:
    """By MaxSim over all texts (Khattab & Zaharia 2020, eq. 3), whose vectors may be stored."""
    from fastbert.errors import InputError
    from fastbert.sentences import MultiVectorEncoder
    from fastbert.sentences.batches import in_chunks, progress_bar
    from fastbert.sentences.multi_vector.vectors import TokenVectors

    if getattr(options, "aggregate", None) is not None:
        raise UsageError("aggregate is for a cross-encoder; MaxSim takes the best token of all windows")
    windows, stored = windows_of(options), None
    if vectors is not None:
        if vectors.suffix != ".safetensors":
            raise UsageError(f"--vectors {vectors}: those of a multi-vector model are in a .safetensors")
        try:
            stored = TokenVectors.load(vectors)
        except InputError as error:
            raise UsageError(f"--vectors {error}") from None
    encoder = load_to_run(MultiVectorEncoder, options)
    if stored is not None and stored.vectors.shape[1] != encoder.dim:
        raise UsageError(f"--vectors {vectors} has {stored.vectors.shape[1]} numbers a token; the model {encoder.dim}")
    query, best = encoder.encode_query(options.query), Best(options.top)
    with progress_bar(None, None, desc="searching", delay=0) as bar:
        for chunk in in_chunks(read_texts(options.file, options.column, delimiter=options.delimiter), CHUNK_TEXTS):
            if stored is None:
                how = {"batch_tokens": options.batch_tokens, "windows": windows}
                found = encoder.encode_document(chunk, output="packed", **how)
            elif len(stored) < best.seen + len(chunk):
                raise UsageError(f"--vectors {vectors} has {len(stored)} texts; {options.file} has more")
            else:
                found = stored.part(best.seen, best.seen + len(chunk))
            bar.update(len(chunk))
            best.add(chunk, encoder.similarity(query, found)[0].tolist())
            raise_if_stopped()
    if stored is not None and len(stored) != best.seen:
        raise UsageError(f"--vectors {vectors} has {len(stored)} texts; {options.file} has {best.seen}")
    if encoder.recipe.token_pooling is None and windows is None:
        for _, _, row in best.rows:
            row["matches"] = encoder.matches(options.query, row["text"])
    best.show(options.output, options.file)
    return 0


def _best_passages(
    encoder: SentenceEncoder, query: Any, texts: list[str], **options: Any
) -> tuple[list[float], list[tuple[int, int]]]:
    """Of each text the score of its best passage, and where that is; minus infinity where it has no words."""
    scores, places = [float("-inf")] * len(texts), [(0, 0)] * len(texts)
    for chunks in encoder.encode_chunks_stream(texts, **options):
        if not len(chunks):
            continue
        chunk_scores = encoder.similarity(query, chunks.vectors)[0].tolist()
        for i, score, start, end in zip(chunks.documents, chunk_scores, chunks.starts, chunks.ends, strict=True):
            if score > scores[i]:
                scores[i], places[i] = score, (int(start), int(end))
    return scores, places


def _read_vectors(path: Path, dim: int) -> Any:
    """float32 (texts, dim). Raises UsageError."""
    import numpy as np

    try:
        if path.suffix == ".parquet":
            vectors = _read_embeddings(path)
        else:
            vectors = np.lib.format.open_memmap(path, mode="c")  # read as needed; c: torch wants what may be written to
    except UsageError:  # which is a ValueError, as Arrow's are
        raise
    except ValueError as error:
        raise UsageError(f"--vectors {path}: {str(error).splitlines()[0]}") from None
    if vectors.ndim != 2 or vectors.shape[1] != dim or vectors.dtype != np.float32:
        raise UsageError(
            f"--vectors {path} holds {vectors.dtype} {vectors.shape}; the model makes float32 (texts, {dim})"
        )
    return vectors


def _read_embeddings(path: Path) -> Any:
    """The column `embedding`, (texts, numbers of the first). Raises UsageError; ValueError, as Arrow's errors are."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    schema = pq.read_schema(path)
    dtype = schema.field("embedding").type if "embedding" in schema.names else pa.null()
    if not (pa.types.is_fixed_size_list(dtype) or pa.types.is_list(dtype) or pa.types.is_large_list(dtype)):
        raise UsageError(f"--vectors {path} has no column of vectors, embedding; it has: {', '.join(schema.names)}")
    if "document" in schema.names:
        raise UsageError(f"--vectors {path} has vectors of passages (--chunks), not of whole texts")
    column = pq.read_table(path, columns=["embedding"])["embedding"]
    if column.null_count:
        raise UsageError(f"--vectors {path}, row {column.is_null().index(True).as_py() + 1}: embedding is null")
    widths = pc.list_value_length(column).to_numpy()
    if (other := np.flatnonzero(widths != widths[:1])).size:
        row = other[0]
        raise UsageError(f"--vectors {path}, row {row + 1} has {widths[row]} numbers, and row 1 has {widths[0]}")
    flat = pa.chunked_array([chunk.flatten() for chunk in column.chunks], dtype.value_type)
    width = widths[0] if len(widths) else 0
    if flat.null_count:
        row = flat.is_null().index(True).as_py() // width
        raise UsageError(f"--vectors {path}, row {row + 1}: a number of embedding is missing")
    return np.require(flat.to_numpy().reshape(len(column), width), requirements="W")  # torch wants it


def run_rerank(options: argparse.Namespace) -> int:
    _check(options)
    windows_of(options)  # what is wrong with it is said at once

    with without_collector():
        from fastbert.sentences import Reranker
        from fastbert.sentences.batches import bar_of, in_chunks, progress_bar
        from fastbert.sentences.text_model import InferenceOptions

    raise_if_stopped()
    if _is_multi_vector(options.model):
        return _search_tokens(options, None)
    reranker = load_to_run(Reranker, options)
    if reranker.num_labels != 1:
        raise UsageError(f"{options.model} has {reranker.num_labels} labels; a reranker has one")
    best = Best(options.top)
    windows = windows_of(options, reranker.windows) or reranker.windows
    settings = InferenceOptions(
        reranker.prompt(), options.batch_tokens, on_host=True, windows=windows, aggregate=options.aggregate
    )
    with progress_bar(None, None, desc="scoring", delay=0, **bar_of(windows)) as bar:
        for chunk in in_chunks(read_texts(options.file, options.column, delimiter=options.delimiter), CHUNK_TEXTS):
            pairs: list[Text] = [(options.query, text) for text in chunk]
            if windows is None:
                logits, places = reranker.rows(pairs, settings, bar.update), None
            else:
                job = reranker.passages_job(pairs, settings)
                logits, places = job.run(reranker.device, options.batch_tokens, on_tokens=bar.update)
            best.add(chunk, reranker.scores(logits).tolist(), places)
            raise_if_stopped()
    best.show(options.output, options.file)
    return 0
