"""Where examples come from: files of text, JSON lines, CSV and parquet, or a data set of Hugging Face's `datasets`.

`datasets` reads, caches and maps them; a file larger than the memory stays on the disk.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastbert.data import delimiters, text_files
from fastbert.errors import ConfigError, InputError, TextFileError
from fastbert.messages import install

if TYPE_CHECKING:
    from datasets import Dataset

Source = Any  # str | os.PathLike | list of these | datasets.Dataset

# An empty field is None. Every other one is a text, as it is written: "null", "7", and "01", which is not "1".
_CSV: dict[str, Any] = {"keep_default_na": False, "na_values": [""]}
# The end of a file's name, without .gz and the like -> the reader of `datasets`, and its options.
_READERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".txt": ("text", {}),
    ".raw": ("text", {}),
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".csv": ("csv", _CSV),
    ".tsv": ("csv", {**_CSV, "quoting": 3}),  # as GLUE's files are: a quotation mark is a character
    ".parquet": ("parquet", {}),
}
_MENDED = re.compile(r".+\.\d+")  # what pandas calls the second column of one name
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_BLOCK = 1 << 20  # bytes of a file that are hashed at a time
_BLOCK_ROWS = 10_000  # of a data set on the hub


def import_datasets() -> Any:
    """`datasets`. Raises ConfigError if it is not installed."""
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(f"this needs Hugging Face's datasets ({error}): {install('train')}") from None
    return datasets


def load_source(source: Source, split: str = "train", *, delimiter: str | None = None) -> Dataset:
    """The rows of a file, of files of one kind, of a `datasets` object, or of a data set on the hub.

    Args:
        source: a path or paths of .txt, .jsonl, .csv, .tsv or .parquet files, compressed or not (the fields of .csv and
            .tsv are texts, as they are written, and empty ones None);
            a `datasets.Dataset`;
            or the name of a data set on the hub, with a configuration behind a colon ("glue:sst2").
        split: which part of a data set on the hub; "validation" is "test" where there is none.
        delimiter: what is between the fields of .csv and .tsv files; by default, or if it is empty, their first lines
            say it (data/delimiters.py).

    Raises InputError: there is nothing there, files of several kinds, a file that cannot be read, or a delimiter for
    what has none.
    """
    datasets, delimiter = import_datasets(), delimiter or None
    if isinstance(source, (datasets.DatasetDict, datasets.IterableDatasetDict)):
        raise InputError(f"several splits were given ({', '.join(source)}): give one of them, such as ...['train']")
    if isinstance(source, datasets.Dataset):
        _check_delimiter(delimiter, "a Dataset")
        return source
    if isinstance(source, datasets.IterableDataset):
        raise InputError("an IterableDataset has no places to go back to: give it as a Dataset, or as its files")
    paths = [str(path) for path in ([source] if isinstance(source, (str, os.PathLike)) else source)]
    if not paths:
        raise InputError("no files were given")
    if not has_tables(paths):
        _check_delimiter(delimiter, paths[0])
    if len(paths) == 1 and _is_on_hub(paths[0]):
        return _from_hub(paths[0], split)
    if missing := [path for path in paths if not Path(path).is_file()]:
        raise InputError(f"{missing[0]} is not a file")
    if empty := [path for path in paths if not Path(path).stat().st_size]:
        raise InputError(f"{empty[0]} is empty")
    kinds = {suffix_of(path) for path in paths}
    if None in kinds or len(kinds) > 1:
        raise InputError(f"{', '.join(paths)}: files of one kind are needed: {', '.join(_READERS)}, compressed or not")
    suffix = str(kinds.pop())
    reader, options = _READERS[suffix]
    # Not load_dataset, which first tells the hub that its reader is used, and offline waits for its name each time.
    read = getattr(datasets.Dataset, f"from_{reader}")
    try:
        if reader == "csv":
            options = {**options, "sep": _delimiter(paths, suffix, delimiter)}
            options = {**options, "features": _texts_alone(paths, options, delimiter)}
        dataset = read(paths, **options)
        if reader == "json":
            dataset.data.table.validate(full=True)  # its strings may be no UTF-8
        return dataset
    except InputError:
        raise
    except (datasets.exceptions.DatasetGenerationError, StopIteration, ValueError, OSError, EOFError) as error:
        _explain(paths, delimiter)
        cause = str(error.__cause__ or error) or type(error).__name__
        raise InputError(f"{', '.join(paths)} cannot be read: {cause.splitlines()[0]}") from None


def suffix_of(path: str) -> str | None:
    """The end of a file's name that says what it holds (".txt" of "a.txt.gz"); None for what is no such file."""
    name = Path(path)
    suffix = (name.with_suffix("") if name.suffix.lower() in _COMPRESSED else name).suffix.lower()
    return suffix if suffix in _READERS else None


def has_tables(names: Sequence[str]) -> bool:
    """Whether any of these is a .csv or a .tsv."""
    return any(suffix_of(name) in delimiters.KINDS for name in names)


def delimiter_for(names: Sequence[str], every: Sequence[str], delimiter: str | None) -> str | None:
    """What of a delimiter that is given for `every` file of a command is for `names` among them: it is for .csv and
    .tsv files. Where no file is one, it is left, and who reads refuses it.
    """
    return delimiter if has_tables(names) or not has_tables(every) else None


def _check_delimiter(delimiter: str | None, name: str) -> None:
    """Of what is no table."""
    try:
        delimiters.check_delimiter(delimiter, name, None)
    except TextFileError as error:
        raise InputError(str(error)) from None


def _delimiter(paths: Sequence[str], suffix: str, delimiter: str | None) -> str:
    """What is between the fields, as it was given or by the headers.

    Raises InputError: it is not clear, or not the same in all files.
    """
    import fsspec  # which `datasets` opens files with: compressed ones, too

    signs: dict[str, str] = {}
    for path in paths:
        with fsspec.open(path, "rt", compression="infer", encoding="utf-8-sig") as file:
            try:
                sign = delimiters.delimiter_of(Path(path), file, is_tsv=suffix == ".tsv", delimiter=delimiter)
            except TextFileError as error:
                raise InputError(str(error)) from None
            signs.setdefault(sign, path)
    if len(signs) > 1:
        (one, first), (other, second), *_ = signs.items()
        raise InputError(f"{first} has {one!r} between its fields, and {second} has {other!r}: make them alike")
    return next(iter(signs))


def _texts_alone(paths: Sequence[str], options: dict[str, Any], delimiter: str | None) -> Any:
    """The columns of .csv or .tsv files, as texts. Raises InputError: they have other columns, or longer rows."""
    import pandas as pd

    datasets, names = import_datasets(), list[str]()
    for path in paths:
        start = pd.read_csv(path, nrows=1, **options)
        header = list(map(str, start.columns))
        is_long = not isinstance(start.index, pd.RangeIndex)  # pandas takes the first fields for names of rows
        if is_long or any(map(_MENDED.fullmatch, header)):
            _explain(paths, delimiter)
        if is_long:
            raise InputError(f"{path}: its first row has more fields than the header")
        names = names or header
        if set(header) != set(names):
            raise InputError(f"{path} has the columns {', '.join(header)}; {paths[0]} has {', '.join(names)}")
    return datasets.Features({name: datasets.Value("string") for name in names})


def _explain(paths: Sequence[str], delimiter: str | None) -> None:
    """Raises InputError with the first line that is wrong, if a reader of lines finds one."""
    try:
        for path in map(Path, paths):
            if text_files.suffix_of(path) in (".txt", ".jsonl", ".csv", ".tsv"):
                text_files.check_rows(path, delimiter)
    except TextFileError as error:
        raise InputError(str(error)) from None


def digest_of(name: str, split: str = "train") -> str:
    """The SHA-256 of a file's bytes, or of the rows and the columns' types (names of classes among them) of a data set
    on the hub, in hexadecimal digits. All of it is read, a block at a time.

    Raises InputError: there is nothing there, or it cannot be read.
    """
    digest = hashlib.sha256()
    if not _is_on_hub(name):
        try:
            with open(name, "rb") as file:
                while block := file.read(_BLOCK):
                    digest.update(block)
        except OSError as error:
            raise InputError(f"{name}: {error.strerror}") from None
        return digest.hexdigest()
    rows = load_source(name, split)
    digest.update(repr(sorted(rows.features.items())).encode())
    for table in rows.with_format("arrow").iter(_BLOCK_ROWS):
        whole = table.replace_schema_metadata().combine_chunks()
        for batch in whole.to_batches():  # as a message, which has no bytes of rows beside these
            digest.update(batch.serialize())
    return digest.hexdigest()


def _is_on_hub(name: str) -> bool:
    return not Path(name).exists() and suffix_of(name) is None


def _from_hub(name: str, split: str) -> Dataset:
    path, _, config = name.partition(":")
    try:
        datasets = import_datasets()
        if split == "validation" and split not in datasets.get_dataset_split_names(path, config or None):
            split = "test"
        return datasets.load_dataset(path, config or None, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{name} is no file, and no data set that the hub gave: {str(error).splitlines()[0]}"
        ) from None


def check_columns(dataset: Dataset, names: Sequence[str], where: str) -> None:
    """Raises InputError, naming what there is, if a column is absent."""
    if missing := [name for name in names if name not in dataset.column_names]:
        raise InputError(f"{where} has no column {missing[0]!r}; it has: {', '.join(dataset.column_names)}")


def check_texts(texts: Sequence[Any], rows: Sequence[int], column: str, where: str) -> None:
    """Raises InputError for what is no text, naming its row; `rows` are the places of `texts`, from 0."""
    for row, text in zip(rows, texts, strict=True):
        if not isinstance(text, str):
            what = "missing" if text is None else f"{text!r:.60}, not a text"
            raise InputError(f"{where}, row {row + 1}: {column} is {what}")
