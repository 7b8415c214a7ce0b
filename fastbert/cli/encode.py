"""`fastbert encode`: turns texts into vectors, in a .npy, a .parquet, a .jsonl or on standard output.

Chunks depend on the texts alone: a run that continues after a kill writes the same bits as one without a stop. Vectors
for a .parquet or a .jsonl stand in an array, too, until all are there. What is written anew: rows of --chunks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastbert.cli.loading import load_to_run, rate_of, say_cut
from fastbert.cli.outputs import ROW_KINDS, STDOUT, check_output, open_rows
from fastbert.cli.outputs.growing_array import GrowingArray, fingerprint
from fastbert.cli.parser import (
    UsageError,
    add_column_option,
    add_command,
    add_model_option,
    add_running_options,
    add_windows_option,
    positive,
    windows_of,
)
from fastbert.cli.stopping import raise_if_stopped, say
from fastbert.data.text_files import STDIN, TEXT_KINDS, check_source, name_of, read_kept, read_texts, refuse
from fastbert.errors import TextFileError
from fastbert.importing import without_collector

if TYPE_CHECKING:
    from fastbert.data.chunks import Windows
    from fastbert.sentences import SentenceEncoder

_NUMBER_BYTES = {".parquet": 4, ".jsonl": 10}  # on the disk, at least; texts come on top
_FLOAT_INT = 2**53  # up to which a float64 holds all whole numbers
CHUNK_TEXTS = 1024  # what a kill can cost at most, beside growing_array.COMMIT_S


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "encode",
        run,
        "turn texts into vectors",
        f"""
        Turns every text of FILE into a vector, in the order of FILE, which is {TEXT_KINDS} (each line of a .txt is a
        text), or - for standard input. FILE may be larger than the memory. OUT.npy gets a float32 array that numpy.load
        reads, OUT.parquet and OUT.jsonl a row a text, with text and embedding; - writes JSON lines to standard output.
        If a run into a file is stopped, the same command continues it, but for --chunks. A multi-vector model (ColBERT)
        writes OUT.safetensors, a vector for each token, all of which must fit into the memory.
        """,
        "fastbert encode reviews.csv --column text --model all-MiniLM-L6-v2 --output reviews.npy",
    )
    parser.add_argument(
        "file",
        metavar="FILE",
        help=f"the texts: {TEXT_KINDS}, or - for standard input; a folder or a URL with --engine ray",
    )
    add_column_option(parser)
    add_model_option(parser)
    _add_output_options(parser)
    add_windows_option(parser, "texts longer than the model takes have one vector of all their chunks")
    parser.add_argument(
        "--chunks",
        action="store_true",
        help="a vector for each passage of whole sentences, as --windows says, instead of one a text: OUT has a row a"
        " passage, with its text, the number of its document, and where it starts and ends there",
    )
    parser.add_argument(
        "--late", action="store_true", help="with --chunks: passages as the whole text makes them (late chunking)"
    )
    add_running_options(parser)
    parser.add_argument(
        "--skip-bad-rows",
        action="store_true",
        help="go on past a row of FILE that cannot be read, or is no text, and name it: OUT has no row for it",
    )
    parser.add_argument(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="ray: parquet files, or a folder of them, into a folder of parquet files, on all of a Ray cluster",
    )
    parser.add_argument("--workers", metavar="N", type=positive, help="with --engine ray: how many models are loaded")


def _add_output_options(parser: Any) -> None:
    parser.add_argument(
        "--output",
        metavar="OUT",
        required=True,
        help="where the vectors go: a .npy, .parquet, .jsonl, or -; a .safetensors of a multi-vector model; a folder"
        " or a URL with --engine ray",
    )
    parser.add_argument(
        "--precision",
        choices=("float32", "bfloat16", "int8"),
        help="of the vectors in a .safetensors (default bfloat16)",
    )
    parser.add_argument(
        "--keep",
        metavar="NAME",
        nargs="+",
        default=[],
        help="other columns of FILE that stay, in a .parquet, a .jsonl or -: texts, numbers, true and false",
    )
    parser.add_argument("--force", action="store_true", help="replace OUT; start again if a run cannot go on")


def run(options: argparse.Namespace) -> int:
    if options.engine == "ray":
        if options.windows is not None or options.chunks:
            raise UsageError("--windows and --chunks are for --engine local")
        if options.skip_bad_rows or options.keep or options.delimiter:
            raise UsageError("--skip-bad-rows, --keep and --delimiter are for --engine local")
        from fastbert.cli.encode_ray import encode_on_ray

        what = ("model", "column", "dtype", "device", "batch_tokens", "workers", "force")
        chosen = {name: getattr(options, name) for name in what}
        say(encode_on_ray(options.file, options.output, **chosen))
        return 0
    if options.workers is not None:
        raise UsageError("--workers is for --engine ray")
    if options.late and not options.chunks:
        raise UsageError("--late is for --chunks")
    if options.precision is not None and Path(options.output).suffix != ".safetensors":
        raise UsageError("--precision is for a .safetensors, of a multi-vector model")
    job = EncodeJob(
        source=Path(options.file),
        output=Path(options.output),
        model=options.model,
        column=options.column,
        delimiter=options.delimiter,
        dtype=options.dtype,
        device=options.device,
        batch_tokens=options.batch_tokens,
        force=options.force,
        windows=_windows(options),
        chunks=options.chunks,
        late=options.late,
        skip_bad_rows=options.skip_bad_rows,
        keep=tuple(options.keep),
        precision=options.precision or "bfloat16",
    )
    say(encode_tokens(job, say) if job.output.suffix == ".safetensors" else encode_file(job, say))
    return 0


def _windows(options: argparse.Namespace) -> Windows | None:
    if not options.chunks:
        return windows_of(options)
    from fastbert.sentences.documents import CHUNKS

    return windows_of(options, CHUNKS) or CHUNKS


@dataclass(frozen=True)
class EncodeJob:
    """The arguments of one `fastbert encode`."""

    source: Path
    output: Path
    model: str
    column: str | None
    dtype: str
    device: str | None
    batch_tokens: int | None
    force: bool
    windows: Windows | None = None
    chunks: bool = False  # a row for each of the chunks
    late: bool = False
    skip_bad_rows: bool = False
    keep: tuple[str, ...] = ()
    delimiter: str | None = None
    precision: str = "bfloat16"  # of tokens' vectors
    piped: str | None = None  # of texts from standard input, which the source holds now: what they are known by


def encode_file(job: EncodeJob, say: Callable[[str], None]) -> str:
    """Encode `job.source` into `job.output`; returns a one-line summary. `say` shows the user a line meanwhile.

    Raises UsageError, before anything is written, for a source or an output that cannot be had; the errors of
    SentenceEncoder.from_pretrained; OSError.
    """
    check_output(job.output, ROW_KINDS if job.chunks else (".npy", *ROW_KINDS), job.force)
    check_source(job.source, job.delimiter)
    if job.keep and (job.output.suffix == ".npy" or job.chunks):
        raise UsageError("--keep is for rows of whole texts: a .parquet, a .jsonl or -, without --chunks")
    if taken := [name for name in job.keep if name in ("text", "embedding") or job.keep.count(name) > 1]:
        raise UsageError(f"--keep {taken[0]}: OUT has a column of this name already")
    if job.output == STDOUT or job.chunks:
        return _encode_rows(job, say)
    if job.source == STDIN:  # the height of an array comes first in its file
        with tempfile.TemporaryDirectory() as folder:
            spooled, digest = Path(folder, "texts.jsonl"), hashlib.sha256()
            with spooled.open("w", encoding="utf-8") as file:
                for text, *kept in _rows(job, say):
                    line = json.dumps({"text": text, **dict(zip(job.keep, kept, strict=True))}) + "\n"
                    digest.update(line.encode())
                    file.write(line)
            if not spooled.stat().st_size:
                raise UsageError(f"{name_of(STDIN)} holds no texts")
            return encode_file(replace(job, source=spooled, column="text", piped=digest.hexdigest()), say)
    total, examples = _count_texts(job, say)

    with without_collector():
        import torch

        from fastbert.sentences import SentenceEncoder

    raise_if_stopped()
    encoder = load_to_run(SentenceEncoder, job)
    batch_tokens = encoder.default_batch_tokens if job.batch_tokens is None else job.batch_tokens
    identity = _identity(job, encoder, total, batch_tokens)
    more = _NUMBER_BYTES.get(job.output.suffix, 0) * total * encoder.dim
    with GrowingArray.open(job.output, (total, encoder.dim), identity, job.force, more) as array:
        done_before, start = array.rows, time.perf_counter()
        if done_before:
            say(f"{done_before:,} of {total:,} texts were encoded before: going on from there")
        try:
            tokens, cut = _encode_into(array, encoder, job, batch_tokens)
            seconds = time.perf_counter() - start
            if job.output.suffix == ".npy":
                array.finish()
            else:
                array.finish_as_rows(lambda vectors: _write_rows(job, vectors, examples))
        except KeyboardInterrupt:
            say(f"stopped; the same command goes on with what {array.partial} has")
            raise
        except torch.OutOfMemoryError:
            raise UsageError(f"the GPU's memory is too small for --batch-tokens {batch_tokens}: choose fewer") from None
    say_cut(cut, encoder.max_seq_length, say)
    what = f"{total - done_before:,} texts{rate_of(tokens, seconds)}"
    return f"{what} -> {job.output} float32 ({total}, {encoder.dim})"


def encode_tokens(job: EncodeJob, say: Callable[[str], None]) -> str:
    """A vector for each token of `job.source`'s texts, into `job.output`; returns a one-line summary. Raises UsageError
    before anything is written, and as encode_file.
    """
    check_output(job.output, (".safetensors",), job.force)
    check_source(job.source, job.delimiter)
    if job.keep or job.chunks:
        raise UsageError("--keep and --chunks are not for a .safetensors, which holds vectors of tokens alone")

    with without_collector():
        import torch

        from fastbert.data.sentence_folder import is_multi_vector
        from fastbert.hub import resolve
        from fastbert.sentences import MultiVectorEncoder
        from fastbert.sentences.batches import in_chunks, progress_bar
        from fastbert.sentences.multi_vector.vectors import TokenVectors

    if not is_multi_vector(resolve(job.model)):
        raise UsageError(f"{job.output} is for a multi-vector model; {job.model} is none: name a .npy or a .parquet")
    raise_if_stopped()
    encoder, parts, cut, start = load_to_run(MultiVectorEncoder, job), list[TokenVectors](), 0, time.perf_counter()
    options = {"output": "packed", "batch_tokens": job.batch_tokens, "windows": job.windows}
    prompt = encoder.prompt(encoder._of_task("document", {})["prompt_name"])
    with progress_bar(None, None, delay=0) as bar:
        for chunk in in_chunks((text for text, *_ in _rows(job, say)), CHUNK_TEXTS):
            cut += len(encoder.tokenize(chunk, prompt, "document").cut) if job.windows is None else 0
            found: TokenVectors = encoder.encode_document(chunk, **options).to("cpu")
            halves = replace(found, vectors=found.vectors.to(torch.bfloat16)) if job.precision == "bfloat16" else found
            parts.append(found.in_int8() if job.precision == "int8" else halves)
            bar.update(len(chunk))
            raise_if_stopped()
    if not parts:
        raise UsageError(f"{name_of(job.source)} holds no texts")
    joined, seconds = TokenVectors.joined(parts), time.perf_counter() - start
    joined.save(job.output)
    say_cut(cut, (encoder.tokenizer_of("document").truncation or {})["max_length"], say)
    what = f"{len(joined):,} texts{rate_of(joined.vectors.shape[0], seconds)}"
    return f"{what} -> {job.output} {job.precision} ({joined.vectors.shape[0]}, {encoder.dim})"


def _encode_into(array: GrowingArray, encoder: SentenceEncoder, job: EncodeJob, batch_tokens: int) -> tuple[int, int]:
    """Encode the texts that the array has no rows for yet; returns how many tokens they had, and how many texts were
    cut.
    """
    from fastbert.sentences.batches import bar_of, progress_bar

    texts = (text for text, *_ in islice(_rows(job), array.rows, None))
    tokens, cut = 0, list[int]()
    counted = {"total": array.shape[0], "initial": array.rows} if job.windows is None else {"total": None}
    with progress_bar(show=None, delay=0, **counted, **bar_of(job.windows)) as bar:
        chunks = encoder.encode_stream(
            texts,
            batch_tokens=batch_tokens,
            chunk_texts=CHUNK_TEXTS,
            windows=job.windows,
            on_batch=lambda count: _advance(bar, count),
            on_cut=cut.append,
        )
        for vectors, count in chunks:
            array.append(vectors)
            raise_if_stopped()
            tokens += count
    return tokens, sum(cut)


def _write_rows(job: EncodeJob, vectors: Any, examples: dict[str, Any]) -> None:
    """The texts, and what is kept, beside their vectors, (texts, dim). Raises UsageError if the source has changed."""
    from fastbert.sentences.batches import in_chunks

    done = 0
    with open_rows(job.output, examples) as rows:
        for chunk in in_chunks(_rows(job), CHUNK_TEXTS):
            done += len(chunk)
            if done <= len(vectors):
                rows.write(_columns(chunk, job, vectors[done - len(chunk) : done]))
            raise_if_stopped()
        if done != len(vectors):
            raise UsageError(f"the input changed while it was read: {done} texts now, {len(vectors)} at first")


def _advance(bar: Any, count: int) -> None:
    raise_if_stopped()
    bar.update(count)


def _encode_rows(job: EncodeJob, say: Callable[[str], None]) -> str:
    """Into what takes a row after the other: standard output, whose reader waits for them; passages, whose number is
    not known before.
    """
    with without_collector():
        from fastbert.sentences import SentenceEncoder
        from fastbert.sentences.batches import bar_of, in_chunks, progress_bar

    raise_if_stopped()
    encoder = load_to_run(SentenceEncoder, job)
    total, cut, start = 0, list[int](), time.perf_counter()
    with open_rows(job.output) as rows, progress_bar(None, None, delay=0, **bar_of(job.windows)) as bar:
        for read in in_chunks(_rows(job, say), CHUNK_TEXTS):
            chunk = [text for text, *_ in read]
            if job.chunks:
                for columns in _chunk_rows(encoder, chunk, job, total, lambda count: _advance(bar, count)):
                    rows.write(columns)
            else:
                ((vectors, _),) = encoder.encode_stream(
                    chunk,
                    batch_tokens=job.batch_tokens,
                    chunk_texts=len(chunk),
                    windows=job.windows,
                    on_batch=lambda count: _advance(bar, count),
                    on_cut=cut.append,
                )
                rows.write(_columns(read, job, vectors))
            total += len(chunk)
        if not total:
            raise UsageError(f"{name_of(job.source)} holds no texts")
    say_cut(sum(cut), encoder.max_seq_length, say)
    seconds = time.perf_counter() - start
    return f"{total:,} texts in {seconds:.1f} s -> {job.output} float32 ({total}, {encoder.dim})"


def _chunk_rows(
    encoder: SentenceEncoder, texts: list[str], job: EncodeJob, before: int, on_tokens: Callable[[int], Any]
) -> Iterator[dict[str, Any]]:
    """A row for each chunk of texts, `before` which others stand in the file; some at a time."""
    for chunks in encoder.encode_chunks_stream(
        texts, job.windows, late=job.late, on_tokens=on_tokens, batch_tokens=job.batch_tokens
    ):
        places = list(zip(chunks.documents.tolist(), chunks.starts.tolist(), chunks.ends.tolist(), strict=True))
        yield {
            "document": [before + i for i, _, _ in places],
            "start": [start for _, start, _ in places],
            "end": [end for _, _, end in places],
            "text": [texts[i][start:end] for i, start, end in places],
            "embedding": chunks.vectors,
        }


def _columns(read: list[tuple[Any, ...]], job: EncodeJob, vectors: Any) -> dict[str, Any]:
    names = ("text", *job.keep)
    return {**dict(zip(names, map(list, zip(*read, strict=True)), strict=True)), "embedding": vectors}


def _rows(job: EncodeJob, say: Callable[[str], None] = lambda line: None) -> Iterator[tuple[Any, ...]]:
    """The texts of the source, each with what is kept of its row. With --skip-bad-rows `say` is told of each row that
    is left out, and how many were.
    """
    left_out = 0

    def leave_out(error: TextFileError) -> None:
        nonlocal left_out
        left_out += 1
        say(f"left out: {error}")

    bad = leave_out if job.skip_bad_rows else refuse
    if job.keep:
        yield from read_kept(job.source, job.column, job.keep, bad, delimiter=job.delimiter)
    else:
        yield from zip(read_texts(job.source, job.column, bad, delimiter=job.delimiter))
    if left_out:
        say(f"{left_out:,} bad row{'s were' if left_out > 1 else ' was'} left out")


def _count_texts(job: EncodeJob, say: Callable[[str], None]) -> tuple[int, dict[str, Any]]:
    """Reads the file once, which checks every text before anything is written, and gives the array's height, and a
    value of the type of each column that is kept.
    """
    total, kinds = 0, {name: set[type]() for name in job.keep}
    exact = set[str]()  # columns with whole numbers that a float does not hold: beside floats they are of another type
    for _, *kept in _rows(job, say):
        total += 1
        for name, value in zip(job.keep, kept, strict=True):
            is_long = type(value) is int and not -(2**63) <= value < 2**63
            kinds[name].update((int, str) if is_long else (type(value),))  # as a text alone it would fit
            if type(value) is int and abs(value) > _FLOAT_INT:
                exact.add(name)
    if total == 0:
        raise UsageError(f"{name_of(job.source)} holds no texts")
    return total, {name: _example(name, types - {type(None)}, name in exact, job) for name, types in kinds.items()}


def _example(name: str, types: set[type], is_exact: bool, job: EncodeJob) -> Any:
    if len(types) > 1 and (types != {int, float} or is_exact) and job.output.suffix == ".parquet":
        raise UsageError(
            f"--keep {name}: the column holds values of several types, which a .parquet cannot: use a .jsonl"
        )
    return None if not types else (float if float in types else min(types, key=str))()


def _identity(job: EncodeJob, encoder: SentenceEncoder, total: int, batch_tokens: int) -> dict[str, Any]:
    """What the vectors depend on; rows of one identity may stand in one file."""
    from fastbert.models.quantized import is_quantized
    from fastbert.version import __version__

    stat = job.source.stat()
    return {
        "input": str(job.source.resolve()) if job.piped is None else name_of(STDIN),
        "input size": stat.st_size,
        "input time": stat.st_mtime_ns if job.piped is None else job.piped,
        "column": job.column,
        "delimiter": job.delimiter,
        "texts": total,
        "dim": encoder.dim,
        "model": str(encoder.folder.resolve()),
        "model files": fingerprint(encoder.folder),
        "dtype": "int8" if is_quantized(encoder.model) else str(encoder.dtype).removeprefix("torch."),
        "device": str(encoder.device),
        "batch tokens": batch_tokens,
        "windows": None if job.windows is None else asdict(job.windows),
        "fastbert": __version__,
    }
