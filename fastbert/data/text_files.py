"""Reads texts from a file, one at a time: txt, jsonl, csv, tsv (.gz, too) and parquet. The file may be larger than the
memory. Nothing here imports torch: the command line looks at files before it does.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

from fastbert.data.delimiters import MAX_LINE_BYTES, check_delimiter, delimiter_of
from fastbert.errors import TextFileError

STDIN = Path("-")
_LINE_ENDS = re.compile(rb"(?<=\r)(?=[^\n])")  # of CR alone; what is read ends at LF
_DIGITS = 100  # of a number in JSON that are read
_USUAL_COLUMNS = ("text", "sentence")
_VALUE = "the value"  # what a text is called in messages; with others in its row it has its column's name

Choose = Callable[[list[str]], Sequence[str]]  # of the names of all columns those that are read
Bad = Callable[[TextFileError], None]  # is told of a row that cannot be read; where it returns, the row is left out
# (path, columns or None, who chooses them, what to do of a bad row), delimiter= of a table
# -> (location, values) of rows
Reader = Callable[..., Iterator[tuple[str, tuple]]]


def refuse(error: TextFileError) -> None:
    """The first bad row ends the reading."""
    raise error


def read_texts(
    path: Path, column: str | None = None, bad: Bad = refuse, *, delimiter: str | None = None
) -> Iterator[str]:
    """The texts of a file in its order, by its suffix.

    txt: a line is a text, empty ones too. csv, tsv (unquoted), jsonl and parquet: the values of `column`, which is
    found by itself where there is only one, or one called text or sentence; a jsonl line may be a bare string. What
    is between the fields of a csv or a tsv is its `delimiter`, or what its first lines say (data/delimiters.py).
    `-` is standard input: lines, or with a `column` JSON lines.

    Raises TextFileError, naming the file, the place in it and the value, for what is no text, unless `bad` takes it.
    """
    columns = None if column is None else (column,)
    reader = _reader_of(path, columns, delimiter)
    for location, (text,) in reader(path, columns, lambda names: (pick_column(path, names, None),), bad):
        try:
            _check_text(path, location, text)
        except TextFileError as error:
            bad(error)
            continue
        yield text


def read_kept(
    path: Path, column: str | None, keep: Sequence[str], bad: Bad = refuse, *, delimiter: str | None = None
) -> Iterator[tuple[Any, ...]]:
    """The text of each row, as of `read_texts`, and the values of the columns `keep`: texts, numbers, bools and None.

    Raises TextFileError as `read_texts`, and where a column of `keep` is absent or holds something else.
    """

    def choose(names: list[str]) -> Sequence[str]:
        return pick_column(path, names, column), *(pick_column(path, names, name) for name in keep)

    reader = _reader_of(path, tuple(keep), delimiter)
    for location, (text, *kept) in reader(path, (column, *keep) if column and path == STDIN else None, choose, bad):
        try:
            _check_text(path, location, text)
            if len(kept) < len(keep):
                raise TextFileError(f"{name_of(path)}, {location}: has a text alone, and no {keep[0]!r}")
            for name, value in zip(keep, kept, strict=True):
                if not (value is None or isinstance(value, (str, int, float))) or _is_cut(value):
                    raise TextFileError(f"{name_of(path)}, {location}: {name} is {_shown(value)}, which cannot be kept")
                if isinstance(value, str):
                    _check_text(path, location, value, name)
        except TextFileError as error:
            bad(error)
            continue
        yield text, *kept


def read_rows(
    path: Path, columns: Sequence[str] | None, choose: Choose, *, delimiter: str | None = None
) -> Iterator[tuple[Any, ...]]:
    """The rows of a file in its order: of each the values of `columns`, or of those that `choose` picks of the names
    that there are. A line of txt is a row of one value. A value is a text, or a list of texts.

    Raises TextFileError as `read_texts`.
    """
    wanted = None if columns is None else tuple(columns)
    names = list(wanted or ())

    def chosen(there: list[str]) -> Sequence[str]:
        names.extend(choose(there))
        return names

    for location, values in _reader_of(path, wanted, delimiter)(path, wanted, chosen, refuse):
        for value, what in zip(values, names if len(values) > 1 else (_VALUE,), strict=True):
            for text in value if isinstance(value, list) else (value,):
                _check_text(path, location, text, what)
        yield values


def check_rows(path: Path, delimiter: str | None = None) -> None:
    """Read a .txt, .jsonl, .csv or .tsv to its end, for a faster reader that has failed and does not say where.

    Raises TextFileError, naming the first line that is no row, whatever the columns hold; or there are no rows.
    """

    def choose(names: list[str]) -> Sequence[str]:
        return names if suffix_of(path) in (".csv", ".tsv") else ()  # rows of a .jsonl may lack some

    if not sum(1 for _ in _reader_of(path, None, delimiter)(path, None, choose, refuse)):
        raise TextFileError(f"{path} holds no rows")


def _reader_of(path: Path, columns: tuple[str, ...] | None, delimiter: str | None) -> Reader:
    reader = READERS.get(suffix_of(path))
    check_delimiter(delimiter, name_of(path), suffix_of(path))
    if path == STDIN:
        reader = _read_txt if columns is None else _read_jsonl
    if reader is None:
        known = f"{', '.join(READERS)}, and .gz behind these but .parquet"
        raise TextFileError(f"{path}: unknown kind of file {suffix_of(path)!r}; known are {known}")
    return reader if delimiter is None else partial(reader, delimiter=delimiter)


def suffix_of(path: Path) -> str:
    """The suffix that says how a file is read: ".csv" of "a.csv.gz". Parquet is compressed inside."""
    inner = path.with_suffix("").suffix.lower() if _is_compressed(path) else ""
    return inner if inner not in ("", ".parquet") else path.suffix.lower()


def _is_compressed(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


def _check_text(path: Path, location: str, text: Any, what: str = _VALUE) -> None:
    if not isinstance(text, str):
        raise TextFileError(f"{name_of(path)}, {location}: {what} is {_shown(text)}, not a text")
    try:
        text.encode()
    except UnicodeEncodeError:
        shown = f"{_shown(text)}, which is not valid Unicode"
        raise TextFileError(f"{name_of(path)}, {location}: {what} is {shown}") from None


def name_of(path: Path) -> str:
    """Of a source, in messages."""
    return "standard input" if path == STDIN else str(path)


@contextmanager
def _open(path: Path) -> Iterator[IO[bytes]]:
    if path != STDIN:
        with gzip.open(path) if _is_compressed(path) else path.open("rb") as file:
            yield file  # type: ignore[misc]
        return
    if sys.stdin is None:
        raise TextFileError("standard input is closed")
    yield sys.stdin.buffer


def check_source(path: Path, delimiter: str | None = None) -> None:
    """Raise TextFileError unless there is such a file, which may have a delimiter if one is given."""
    check_delimiter(delimiter, name_of(path), suffix_of(path))
    if path != STDIN and not path.exists():
        raise TextFileError(f"{path} does not exist")
    if path != STDIN and not path.is_file():
        raise TextFileError(f"{path} is not a file")


def _shown(value: Any, limit: int = 40) -> str:
    try:
        shown = json.dumps(value, default=str)
    except RecursionError:
        return "nested too deeply to be shown"
    return shown if len(shown) <= limit else shown[:limit] + "..."


def pick_column(path: Path | str, names: Sequence[str], column: str | None) -> str:
    """`column`, or the one that can be meant. Raises TextFileError, listing what there is."""
    if not names:
        raise TextFileError(f"{name_of(Path(path))} has no columns in its first row")
    listed = ", ".join(names)
    if column is not None and column not in names:
        raise TextFileError(f"{name_of(Path(path))} has no column {column!r}; it has: {listed}")
    usual = [name for name in _USUAL_COLUMNS if name in names]
    if column is None and len(names) > 1 and not usual:
        raise TextFileError(f"{name_of(Path(path))} has several columns; choose one with --column: {listed}")
    return column if column is not None else names[0] if len(names) == 1 else usual[0]


def lines_of(path: Path) -> Iterator[str]:
    """Lines with their ends, without a byte order mark. Raises TextFileError, naming the line, for what is not UTF-8
    text, or not what gzip writes.
    """
    return (line for _, line in _numbered(path, refuse))


def _numbered(path: Path, bad: Bad) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        with _open(path) as file:
            for raw in _raw_lines(file):
                number += 1
                try:
                    line = _decoded(raw, f"{name_of(path)}, line {number}")
                except TextFileError as error:
                    bad(error)
                    continue
                yield number, line.removeprefix("\ufeff") if number == 1 else line
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise TextFileError(f"{name_of(path)}, after line {number}: {error}") from None


def _raw_lines(file: IO[bytes]) -> Iterator[bytes]:
    """Lines with their ends: LF, CRLF, or CR alone, as the readers of `datasets` have them. Of one that is too long, as
    much as shows that it is.
    """
    rest, is_skipped = b"", False
    while block := file.readline(MAX_LINE_BYTES + 1 - len(rest)):
        whole = rest + block
        lines = _LINE_ENDS.split(whole) if b"\r" in whole else [whole]
        rest = b"" if lines[-1].endswith(b"\n") else lines.pop()
        if lines and is_skipped:
            del lines[0]
            is_skipped = False
        yield from lines
        if len(rest) > MAX_LINE_BYTES:
            if not is_skipped:
                yield rest
            rest, is_skipped = rest[-1:], True  # a CR, which may be half of the line's end
    if rest and not is_skipped:
        yield rest


def _decoded(raw: bytes, where: str) -> str:
    if len(raw) > MAX_LINE_BYTES:
        raise TextFileError(f"{where}: longer than {MAX_LINE_BYTES >> 20} MiB; is this a text file?")
    try:
        line = raw.decode()
    except UnicodeDecodeError as error:
        byte, position = raw[error.start], error.start + 1
        raise TextFileError(f"{where}: byte {position} is 0x{byte:02x}, which is not UTF-8") from None
    if "\0" in line:
        raise TextFileError(f"{where}: holds a NUL byte; is this a text file?")
    return line


def _read_txt(path: Path, columns: tuple[str, ...] | None, choose: Choose, bad: Bad) -> Iterator[tuple[str, tuple]]:
    if columns is not None:
        raise TextFileError(f"{path} is a text file: it has no column {columns[0]!r}")
    for number, line in _numbered(path, bad):
        yield f"line {number}", (line.removesuffix("\n").removesuffix("\r"),)


def _start_of_number(digits: str) -> int:
    """Enough of a number to show it: none so long is used, and to convert 5,000 digits takes long, or is an error."""
    return int(digits[:_DIGITS])


def _is_cut(value: Any) -> bool:
    return isinstance(value, int) and abs(value) >= 10 ** (_DIGITS - 2)


def _read_jsonl(path: Path, columns: tuple[str, ...] | None, choose: Choose, bad: Bad) -> Iterator[tuple[str, tuple]]:
    for number, line in _numbered(path, bad):
        if not line.strip():
            continue
        where = f"{name_of(path)}, line {number}"
        try:
            entry = _parsed(line, where)
        except TextFileError as error:
            bad(error)
            continue
        if isinstance(entry, dict) and columns is None:
            columns = tuple(choose(list(entry)))
        try:
            values = _values_of(entry, columns, where)
        except TextFileError as error:
            bad(error)
            continue
        yield f"line {number}", values


def _parsed(line: str, where: str) -> Any:
    try:
        return json.loads(line, parse_int=_start_of_number)
    except json.JSONDecodeError as error:
        raise TextFileError(f"{where}: not JSON: {error.msg} at place {error.pos + 1}") from None
    except RecursionError:
        raise TextFileError(f"{where}: nested too deeply") from None


def _values_of(entry: Any, columns: tuple[str, ...] | None, where: str) -> tuple:
    if columns is None:
        return (entry,)
    if not isinstance(entry, dict):
        wanted = f" with a {columns[0]!r}" if columns else ""
        raise TextFileError(f"{where}: {_shown(entry)} is no object{wanted}")
    for column in columns:
        if column not in entry:
            raise TextFileError(f"{where}: has no {column!r}; it has: {', '.join(entry)}")
    return tuple(map(entry.__getitem__, columns))


def _read_csv(
    path: Path, columns: tuple[str, ...] | None, choose: Choose, bad: Bad, delimiter: str | None = None
) -> Iterator[tuple[str, tuple]]:
    # strict: a stray quote would otherwise swallow the lines up to the next one.
    sign = delimiter_of(path, _good_lines(path), is_tsv=False, delimiter=delimiter)
    yield from _read_table(path, columns, choose, bad, delimiter=sign, strict=True)


def _read_tsv(
    path: Path, columns: tuple[str, ...] | None, choose: Choose, bad: Bad, delimiter: str | None = None
) -> Iterator[tuple[str, tuple]]:
    sign = delimiter_of(path, _good_lines(path), is_tsv=True, delimiter=delimiter)
    yield from _read_table(path, columns, choose, bad, delimiter=sign, quoting=csv.QUOTE_NONE)


def _good_lines(path: Path) -> Iterator[str]:
    """For a first look: what cannot be read is told when the rows are."""
    return (line for _, line in _numbered(path, lambda error: None))


def _read_table(
    path: Path, columns: tuple[str, ...] | None, choose: Choose, bad: Bad, **dialect: Any
) -> Iterator[tuple[str, tuple]]:
    csv.field_size_limit(MAX_LINE_BYTES)
    sign = dialect["delimiter"]  # a column by itself whose name has one is to be in quotation marks
    between = f", by the {sign!r} in it" if sign in ";|" else ""
    header: list[str] | None = None

    def bad_row(error: TextFileError) -> None:
        (refuse if header is None else bad)(error)  # without it, the next row would be taken for it

    lines = _Lines(_numbered(path, bad_row))
    rows = csv.reader(lines, **dialect)
    while True:
        lines.taken.clear()
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            begins = "" if len(lines.taken) == 1 else f"; the row begins in line {lines.taken[0][0]}"
            bad_row(TextFileError(f"{path}, line {lines.number}: {error}{begins}"))
            lines.give_back()
            continue
        if not row:  # a blank line
            continue
        if header is None:
            header, picked = row, _picked(path, row, columns, choose)
            if doubled := next((name for name in picked if name and header.count(name) > 1), None):
                raise TextFileError(f"{path}, line {lines.number}: two columns are called {doubled!r}")
            places = [header.index(name) for name in picked]
        elif len(row) != len(header):
            what = f"{len(row)} fields, but {len(header)} in the header{between}"
            bad_row(TextFileError(f"{path}, line {lines.number}: {what}"))
        else:
            yield f"line {lines.number}", tuple(row[i] for i in places)


class _Lines:
    """The lines of a table. A row that cannot be read may have taken many, up to the next quotation mark: all but its
    first are given back.
    """

    def __init__(self, numbered: Iterator[tuple[int, str]]):
        self.numbered, self.number = numbered, 0
        self.taken, self.waiting = deque[tuple[int, str]](), deque[tuple[int, str]]()  # of this row; of the next ones

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        one = self.waiting.popleft() if self.waiting else next(self.numbered)
        self.taken.append(one)
        self.number = one[0]
        return one[1]

    def give_back(self) -> None:
        self.number = self.taken.popleft()[0]
        self.waiting.extendleft(reversed(self.taken))


def _picked(path: Path, names: list[str], columns: tuple[str, ...] | None, choose: Choose) -> Sequence[str]:
    return choose(names) if columns is None else [pick_column(path, names, column) for column in columns]


def _read_parquet(path: Path, columns: tuple[str, ...] | None, choose: Choose, bad: Bad) -> Iterator[tuple[str, tuple]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise TextFileError(f"{path}: reading parquet needs pyarrow: pip install pyarrow") from None
    row = 0
    try:
        with pq.ParquetFile(path) as file:
            names = list(_picked(path, file.schema_arrow.names, columns, choose))
            for batch in file.iter_batches(batch_size=1024, columns=names):
                for values in zip(*(batch.column(name).to_pylist() for name in names), strict=True):
                    row += 1
                    yield f"row {row}", values
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise TextFileError(f"{path}, after row {row}: {str(error).splitlines()[0]}") from None


READERS: dict[str, Reader] = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".parquet": _read_parquet,
}
*_kinds, _last = READERS
TEXT_KINDS = f"{', '.join(_kinds)} or {_last}, all but the last also as .gz"
