"""Reads texts from a file, one at a time: txt, jsonl, csv, tsv and parquet. The file may be larger than the memory."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


class UsageError(ValueError):
    """What was asked for on the command line cannot be done; the message says what to change."""


STDIN = Path("-")
MAX_LINE_BYTES = 16 << 20  # a longer line is taken for a binary file, and never read into memory
_USUAL_COLUMNS = ("text", "sentence")

Choose = Callable[[list[str]], Sequence[str]]  # of the names of all columns those that are read
# (path, columns or None, who chooses them) -> (the place in the file, the values) of each row
Reader = Callable[[Path, tuple[str, ...] | None, Choose], Iterator[tuple[str, tuple]]]


def read_texts(path: Path, column: str | None = None) -> Iterator[str]:
    """The texts of a file in its order, by its suffix.

    txt: a line is a text, empty ones too. csv, tsv (unquoted), jsonl and parquet: the values of `column`, which is
    found by itself where there is only one, or one called text or sentence; a jsonl line may be a bare string.
    `-` is standard input: lines, or with a `column` JSON lines.

    Raises UsageError, naming the file, the place in it and the value, for what is no text.
    """
    given = None if column is None else (column,)
    for place, (text,) in _reader_of(path, given)(path, given, lambda names: (pick_column(path, names, None),)):
        _check_text(path, place, text)
        yield text


def read_rows(path: Path, columns: Sequence[str] | None, choose: Choose) -> Iterator[tuple[Any, ...]]:
    """The rows of a file in its order: of each the values of `columns`, or of those that `choose` picks of the names
    that there are. A line of txt is a row of one value. A value is a text, or a list of texts.

    Raises UsageError as `read_texts`.
    """
    given = None if columns is None else tuple(columns)
    for place, values in _reader_of(path, given)(path, given, choose):
        for value in values:
            for text in value if isinstance(value, list) else (value,):
                _check_text(path, place, text)
        yield values


def _reader_of(path: Path, columns: tuple[str, ...] | None) -> Reader:
    reader = READERS.get(path.suffix.lower())
    if path == STDIN:
        reader = _read_txt if columns is None else _read_jsonl
    if reader is None:
        raise UsageError(f"{path}: unknown kind of file {path.suffix!r}; known are {', '.join(READERS)}")
    return reader


def _check_text(path: Path, place: str, text: Any) -> None:
    if not isinstance(text, str):
        raise UsageError(f"{name_of(path)}, {place}: the value is {_shown(text)}, not a text")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{name_of(path)}, {place}: {_shown(text)} is not valid Unicode") from None


def name_of(path: Path) -> str:
    """Of a source, in messages."""
    return "standard input" if path == STDIN else str(path)


@contextmanager
def _stdin() -> Iterator[IO[bytes]]:
    if sys.stdin is None:
        raise UsageError("standard input is closed")
    yield sys.stdin.buffer


def check_source(path: Path) -> None:
    """Raise UsageError unless there is such a file."""
    if path == STDIN:
        return
    if not path.exists():
        raise UsageError(f"{path} does not exist")
    if not path.is_file():
        raise UsageError(f"{path} is not a file")


def _shown(value: Any, limit: int = 40) -> str:
    try:
        shown = json.dumps(value)
    except RecursionError:
        return "nested too deeply to be shown"
    return shown if len(shown) <= limit else shown[:limit] + "..."


def pick_column(path: Path | str, names: Sequence[str], column: str | None) -> str:
    """`column`, or the one that can be meant. Raises UsageError, listing what there is."""
    if not names:
        raise UsageError(f"{name_of(Path(path))} has no columns in its first row")
    listed = ", ".join(names)
    if column is not None and column not in names:
        raise UsageError(f"{name_of(Path(path))} has no column {column!r}; it has: {listed}")
    usual = [name for name in _USUAL_COLUMNS if name in names]
    if column is None and len(names) > 1 and not usual:
        raise UsageError(f"{name_of(Path(path))} has several columns; choose one with --column: {listed}")
    return column if column is not None else names[0] if len(names) == 1 else usual[0]


def _lines(path: Path) -> Iterator[str]:
    """Lines with their ends. Raises UsageError, naming the line, for what is not UTF-8 text."""
    with path.open("rb") if path != STDIN else _stdin() as file:
        number = 0
        while raw := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(raw) > MAX_LINE_BYTES:
                raise UsageError(
                    f"{name_of(path)}, line {number}: longer than {MAX_LINE_BYTES >> 20} MiB; is this a text file?"
                )
            try:
                line = raw.decode()
            except UnicodeDecodeError as error:
                byte, place = raw[error.start], error.start + 1
                raise UsageError(
                    f"{name_of(path)}, line {number}: byte {place} is 0x{byte:02x}, which is not UTF-8"
                ) from None
            if "\0" in line:
                raise UsageError(f"{name_of(path)}, line {number}: holds a NUL byte; is this a text file?")
            yield line.removeprefix("\ufeff") if number == 1 else line


def _read_txt(path: Path, columns: tuple[str, ...] | None, choose: Choose) -> Iterator[tuple[str, tuple]]:
    if columns is not None:
        raise UsageError(f"{path} is a text file: it has no column {columns[0]!r}")
    for number, line in enumerate(_lines(path), 1):
        yield f"line {number}", (line.removesuffix("\n").removesuffix("\r"),)


def _start_of_number(digits: str) -> int:
    """Enough of a number to show it: none is used, and to convert 5,000 digits takes long, or is an error."""
    return int(digits[:100])


def _read_jsonl(path: Path, columns: tuple[str, ...] | None, choose: Choose) -> Iterator[tuple[str, tuple]]:
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line, parse_int=_start_of_number)
        except json.JSONDecodeError as error:
            raise UsageError(
                f"{name_of(path)}, line {number}: not JSON: {error.msg} at place {error.pos + 1}"
            ) from None
        except RecursionError:
            raise UsageError(f"{name_of(path)}, line {number}: nested too deeply") from None
        if isinstance(entry, dict):
            if columns is None:
                columns = tuple(choose(list(entry)))
            for column in columns:
                if column not in entry:
                    raise UsageError(f"{name_of(path)}, line {number}: has no {column!r}; it has: {', '.join(entry)}")
            values = tuple(map(entry.__getitem__, columns))
        elif columns is not None:
            raise UsageError(f"{name_of(path)}, line {number}: {_shown(entry)} is no object with a {columns[0]!r}")
        else:
            values = (entry,)
        yield f"line {number}", values


def _read_csv(path: Path, columns: tuple[str, ...] | None, choose: Choose) -> Iterator[tuple[str, tuple]]:
    # strict: a stray quote would otherwise swallow the lines up to the next one.
    yield from _read_table(path, columns, choose, strict=True)


def _read_tsv(path: Path, columns: tuple[str, ...] | None, choose: Choose) -> Iterator[tuple[str, tuple]]:
    yield from _read_table(path, columns, choose, delimiter="\t", quoting=csv.QUOTE_NONE)


def _read_table(
    path: Path, columns: tuple[str, ...] | None, choose: Choose, **dialect: Any
) -> Iterator[tuple[str, tuple]]:
    csv.field_size_limit(MAX_LINE_BYTES)
    rows = csv.reader(_lines(path), **dialect)
    header: list[str] | None = None
    try:
        for row in rows:
            if not row:  # a blank line
                continue
            if header is None:
                header = row
                places = [header.index(name) for name in _picked(path, header, columns, choose)]
                continue
            if len(row) != len(header):
                raise UsageError(f"{path}, line {rows.line_num}: {len(row)} fields, but {len(header)} in the header")
            yield f"line {rows.line_num}", tuple(row[place] for place in places)
    except csv.Error as error:
        raise UsageError(f"{path}, line {rows.line_num}: {error}") from None


def _picked(path: Path, names: list[str], columns: tuple[str, ...] | None, choose: Choose) -> Sequence[str]:
    return choose(names) if columns is None else [pick_column(path, names, column) for column in columns]


def _read_parquet(path: Path, columns: tuple[str, ...] | None, choose: Choose) -> Iterator[tuple[str, tuple]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise UsageError(f"{path}: reading parquet needs pyarrow: pip install pyarrow") from None
    row = 0
    try:
        with pq.ParquetFile(path) as file:
            names = list(_picked(path, file.schema_arrow.names, columns, choose))
            for name in names:
                kind = file.schema_arrow.field(name).type
                inner = kind.value_type if pa.types.is_dictionary(kind) or pa.types.is_list(kind) else kind
                if not (pa.types.is_string(inner) or pa.types.is_large_string(inner)):
                    raise UsageError(f"{path}: column {name!r} holds {kind}, not texts")
            for batch in file.iter_batches(batch_size=1024, columns=names):
                for values in zip(*(batch.column(name).to_pylist() for name in names), strict=True):
                    row += 1
                    yield f"row {row}", values
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}, after row {row}: {str(error).splitlines()[0]}") from None


READERS: dict[str, Reader] = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".parquet": _read_parquet,
}
*_kinds, _last = READERS
TEXT_KINDS = f"{', '.join(_kinds)} or {_last}"
