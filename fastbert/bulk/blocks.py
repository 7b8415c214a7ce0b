"""What a bulk run consists of: parquet files cut into blocks of rows, and a file of vectors for each.

A block's file has its final name only once it is whole, and the same rows always stand in the same block. So a run that
starts again leaves out what is there, and a block that is encoded twice (its first worker died) replaces itself.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastbert.errors import InputError
from fastbert.files import writing

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.fs import FileSystem

# Texts are encoded in chunks of so many, which decides what shares a batch: the last bits of a float32 depend on it.
CHUNK_TEXTS = 1024
BLOCK_TEXTS = 64 * CHUNK_TEXTS  # at most: 100 MB of vectors of 384 numbers
BLOCKS_A_WORKER = 32  # at least, while there are texts: the last ones end at nearly the same time, a kill costs little
MANIFEST = "_fastbert.json"
READERS = 16  # footers read at a time: each is a round trip to an object store


@dataclass(frozen=True)
class Block:
    """Rows start to stop of a file; `name` is its output's."""

    name: str
    path: str
    start: int
    stop: int


@dataclass(frozen=True)
class BlockPlan:
    """All blocks of a run, in the order of the files and their rows, and those whose output is there."""

    blocks: list[Block]
    finished: frozenset[str]

    @property
    def texts(self) -> int:
        return sum(block.stop - block.start for block in self.blocks)

    @property
    def left(self) -> list[Block]:
        return [block for block in self.blocks if block.name not in self.finished]


def open_location(location: str) -> tuple[FileSystem, str]:
    """(file system, path in it) of a folder, a file, or a URL: pyarrow's own kinds, and those of fsspec.

    Raises InputError for a URL that neither knows.
    """
    import pyarrow as pa
    from pyarrow.fs import FileSystem, FSSpecHandler, LocalFileSystem, PyFileSystem

    if "://" not in location:
        return LocalFileSystem(), absolute(location)
    try:
        return FileSystem.from_uri(location)
    except pa.ArrowInvalid as refused:
        try:
            import fsspec

            system, path = fsspec.core.url_to_fs(location)
        except (ImportError, ValueError) as error:
            raise InputError(f"{location}: {str(refused).splitlines()[0]}; {error}") from None
        return PyFileSystem(FSSpecHandler(system)), path


def make_plan(source: str, output: str, column: str, identity: dict[str, Any], workers: int, force: bool) -> BlockPlan:
    """The plan of a new run, or of one that is in `output` already. Writes its manifest.

    Raises InputError for a source without texts in `column`, or an output of another identity if not `force`.
    """
    from pyarrow.fs import FileSelector, FileType

    files = _count_rows(source, column)
    identity = {**identity, "column": column, "files": [[path, rows, size] for path, rows, size in files]}
    system, folder = open_location(output)
    if (info := system.get_file_info(folder)).type == FileType.File:
        raise InputError(f"{output} is a file; a folder is needed, for a file a block")
    there = [] if info.type == FileType.NotFound else system.get_file_info(FileSelector(folder))
    names = frozenset(entry.base_name for entry in there)
    texts = sum(rows for _, rows, _ in files)
    chunks = -(-texts // (CHUNK_TEXTS * BLOCKS_A_WORKER * workers))
    manifest: dict[str, Any] = {"identity": identity, "block_texts": min(chunks * CHUNK_TEXTS, BLOCK_TEXTS)}
    if MANIFEST in names and not force:
        with system.open_input_file(f"{folder}/{MANIFEST}") as file:
            manifest = _read_manifest(output, file.read())
        if differing := [key for key in identity if manifest["identity"].get(key) != identity[key]]:
            raise InputError(
                f"{output} was begun with another {', '.join(differing)}; --force starts again, or take another folder"
            )
    elif names and not force:
        raise InputError(f"{output} is not empty, and no run of this began there; --force writes into it")
    else:
        system.create_dir(folder, recursive=True)
        for name in names:
            if name == MANIFEST or name.startswith("part-"):
                system.delete_file(f"{folder}/{name}")
        write_whole(system, f"{folder}/{MANIFEST}", json.dumps(manifest).encode())
        names = frozenset()
    return BlockPlan(_cut(files, manifest["block_texts"]), names)


def _read_manifest(output: str, content: bytes) -> dict[str, Any]:
    try:
        manifest = json.loads(content)
        return {"identity": dict(manifest["identity"]), "block_texts": int(manifest["block_texts"])}
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{output}/{MANIFEST} is damaged ({error!r}): --force starts again") from None


def list_files(source: str) -> tuple[FileSystem, list[Any]]:
    """The parquet files of a folder, or one by itself, by name. Raises InputError if there are none."""
    from pyarrow.fs import FileSelector, FileType

    system, path = open_location(source)
    info = system.get_file_info(path)
    if info.type == FileType.NotFound:
        raise InputError(f"{source} does not exist")
    entries = [info] if info.type == FileType.File else system.get_file_info(FileSelector(path, recursive=True))
    entries = [entry for entry in entries if entry.type == FileType.File and entry.extension == "parquet"]
    entries = [entry for entry in entries if not entry.base_name.startswith(("_", "."))]
    if not entries:
        raise InputError(f"{source} has no .parquet file")
    return system, sorted(entries, key=lambda entry: entry.path)


def column_names(source: str) -> list[str]:
    """Of the first file. Raises InputError."""
    import pyarrow as pa
    from pyarrow import parquet

    system, (first, *_) = list_files(source)
    try:
        with system.open_input_file(first.path) as file:
            return list(parquet.ParquetFile(file).schema_arrow.names)
    except pa.ArrowInvalid as error:
        raise InputError(f"{first.path}: {str(error).splitlines()[0]}") from None


def _count_rows(source: str, column: str) -> list[tuple[str, int, int]]:
    """(path, rows, bytes) of every file of the source. Raises InputError, naming the file."""
    import pyarrow as pa
    from pyarrow import parquet

    system, entries = list_files(source)

    def rows(entry: Any) -> int:
        try:
            with system.open_input_file(entry.path) as file:
                read = parquet.ParquetFile(file)
                check_column(read.schema_arrow, column, entry.path)
                return read.metadata.num_rows
        except pa.ArrowInvalid as error:
            raise InputError(f"{entry.path}: {str(error).splitlines()[0]}") from None

    with ThreadPoolExecutor(READERS) as pool:
        counts = list(pool.map(rows, entries))
    if not sum(counts):
        raise InputError(f"{source} holds no texts")
    return [(entry.path, count, entry.size) for entry, count in zip(entries, counts, strict=True)]


def check_column(schema: pa.Schema, column: str, where: str) -> None:
    """Raises InputError if there is no column of texts of this name."""
    import pyarrow as pa

    if column not in schema.names:
        raise InputError(f"{where} has no column {column!r}; it has: {', '.join(schema.names)}")
    dtype = schema.field(column).type
    dtype = dtype.value_type if pa.types.is_dictionary(dtype) else dtype
    if not (pa.types.is_string(dtype) or pa.types.is_large_string(dtype)):
        raise InputError(f"{where}: column {column!r} holds {dtype}, not texts")


def _cut(files: list[tuple[str, int, int]], block_texts: int) -> list[Block]:
    places = [
        (path, start, min(start + block_texts, rows))
        for path, rows, _ in files
        for start in range(0, rows, block_texts)
    ]
    return [
        Block(f"part-{i:05d}-of-{len(places):05d}.parquet", path, start, stop)
        for i, (path, start, stop) in enumerate(places)
    ]


def read_rows(system: FileSystem, path: str, start: int, stop: int) -> pa.Table:
    """Rows start to stop; of the row groups that hold them, no more than is needed stays in memory."""
    import pyarrow as pa
    from pyarrow import parquet

    with system.open_input_file(path) as file:
        read = parquet.ParquetFile(file)
        groups, first, position = [], 0, 0
        for group in range(read.num_row_groups):
            rows = read.metadata.row_group(group).num_rows
            if position + rows <= start:
                first += rows
            elif position < stop:
                groups.append(group)
            position += rows
        pieces, at = [], first
        for batch in read.iter_batches(CHUNK_TEXTS, row_groups=groups):
            end = at + batch.num_rows
            if end > start:
                skip = max(start - at, 0)
                pieces.append(batch.slice(skip, min(stop, end) - at - skip))
            at = end
            if at >= stop:
                break
        return pa.Table.from_batches(pieces, read.schema_arrow)


def write_whole(system: FileSystem, path: str, content: Any) -> None:
    """A file under its name only once it is whole: renamed where it is a disk; a store shows no object before."""
    from pyarrow.fs import LocalFileSystem

    with ExitStack() as stack:
        where = stack.enter_context(writing(Path(path))) if isinstance(system, LocalFileSystem) else path
        with system.open_output_stream(str(where)) as stream:
            stream.write(content)


def absolute(location: str) -> str:
    """A URL, a name, or the whole path of what is there or will be: a worker's current folder is another."""
    return location if "://" in location else str(Path(location).absolute())
