"""Where a command's rows go: JSON lines, CSV or parquet, in a file that appears when it is whole, or on stdout."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from fastbert.cli.parser import UsageError
from fastbert.cli.stopping import held
from fastbert.files import writing

STDOUT = Path("-")
ROW_KINDS = (".jsonl", ".parquet")
NESTED_ROW_KINDS = (".jsonl", ".csv", ".parquet")  # of rows that may hold lists: JSON in a field of a .csv


class Rows(Protocol):
    """What takes rows of the same fields, many at a time."""

    def write(self, columns: Mapping[str, Any]) -> None: ...


class _JsonLines:
    def __init__(self, file: Any):
        self.file = file

    def write(self, columns: Mapping[str, Any]) -> None:
        for values in zip(*columns.values(), strict=True):
            row = {name: _plain(value) for name, value in zip(columns, values, strict=True)}
            self.file.write(json.dumps(row, ensure_ascii=False) + "\n")


class _Stdout:
    """Standard output, with errors that say so. Ctrl-C leaves whole lines there."""

    def write(self, line: str) -> None:
        try:
            with held():
                self._write(line)
                sys.stdout.flush()
        except BrokenPipeError:  # the reader has gone, which is no error
            raise
        except OSError as error:
            raise OSError(error.errno, error.strerror, "standard output") from None

    @staticmethod
    def _write(line: str) -> None:
        raw = getattr(sys.stdout, "buffer", None)  # which a notebook's has not
        if not isinstance(raw, io.RawIOBase):
            sys.stdout.write(line)
            return
        left = memoryview(line.encode(sys.stdout.encoding, "backslashreplace"))
        while left:  # PYTHONUNBUFFERED: of a write that a signal interrupts a part is done
            left = left[raw.write(left) :]


class _Csv:
    def __init__(self, file: Any):
        self.writer = csv.writer(file, lineterminator="\n")
        self.has_header = False

    def write(self, columns: Mapping[str, Any]) -> None:
        if not self.has_header:
            self.writer.writerow(columns)
            self.has_header = True
        for values in zip(*columns.values(), strict=True):
            plain = map(_plain, values)
            self.writer.writerow([json.dumps(x, ensure_ascii=False) if isinstance(x, list) else x for x in plain])


class _Parquet:
    def __init__(self, path: Path, examples: Mapping[str, Any]):
        self.path, self.examples = path, examples
        self.writer: Any = None

    def write(self, columns: Mapping[str, Any]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        types = {name: pa.array([example]).type for name, example in self.examples.items()}
        table = pa.table({name: _arrow(values, types.get(name)) for name, values in columns.items()})
        if self.writer is None:
            self.writer = pq.ParquetWriter(self.path, table.schema)
        self.writer.write_table(table)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


def _plain(value: Any) -> Any:
    """As JSON has it. A float32 is written with the fewest digits that give it back."""
    if hasattr(value, "tolist"):
        return [float(str(x)) for x in value] if value.ndim else float(str(value))
    return value


def _arrow(values: Any, arrow_type: Any = None) -> Any:
    import pyarrow as pa

    if hasattr(values, "ndim") and values.ndim == 2:
        return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
    return pa.array(values, arrow_type)


def check_output(path: Path, kinds: Sequence[str], force: bool) -> None:
    """Raise UsageError unless `path` can be written: standard output, or a new file of one of `kinds`."""
    if path == STDOUT:
        if sys.stdout is None:
            raise UsageError("--output -: standard output is closed")
        return
    folder = path.parent
    if path.suffix not in kinds:
        raise UsageError(f"--output {path}: the name must end in {' or '.join(kinds)}")
    if not folder.is_dir():
        raise UsageError(f"--output {path}: {folder} is not a folder")
    if path.is_dir():
        raise UsageError(f"--output {path} is a folder")
    if path.exists() and not force:
        raise UsageError(f"{path} exists already; --force replaces it")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"--output {path}: no right to write into {folder}")
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError:
            raise UsageError(f"{path}: writing parquet needs pyarrow: pip install pyarrow") from None


@contextmanager
def open_rows(path: Path, examples: Mapping[str, Any] | None = None) -> Iterator[Rows]:
    """The rows of `path`, which has its name once all are written; what an error leaves is removed.

    `examples`: a value of each column that holds lists, from which parquet has its type.
    """
    if path == STDOUT:
        yield _JsonLines(_Stdout())
        return
    with writing(path) as new:
        if path.suffix == ".parquet":
            rows = _Parquet(new, examples or {})
            try:
                yield rows
            finally:
                rows.close()
        else:
            is_csv = path.suffix == ".csv"
            with new.open("w", encoding="utf-8", newline="" if is_csv else None) as file:
                yield _Csv(file) if is_csv else _JsonLines(file)
