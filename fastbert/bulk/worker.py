"""What runs on a worker: it loads the model once, and then turns tables of texts into tables with vectors."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fastbert.bulk.blocks import CHUNK_TEXTS, check_column, open_location, read_rows, write_whole
from fastbert.errors import InputError
from fastbert.native.cores import cores

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class WorkerSettings:
    """What all workers of a run have in common; `threads` is of one."""

    model: str
    column: str
    output_column: str
    dtype: str
    device: str
    batch_tokens: int | None
    normalize: bool | None
    prompt_name: str | None
    threads: int


class Worker:
    """Adds the column of vectors, float32 of a fixed length, to a table."""

    def __init__(self, settings: WorkerSettings):
        os.environ["RAYON_NUM_THREADS"] = str(settings.threads)  # of the tokenizer, which counts the machine's cores
        import torch

        from fastbert.sentences import SentenceEncoder

        torch.set_num_threads(min(settings.threads, cores().usable))
        self.settings = settings
        self.encoder = SentenceEncoder.from_pretrained(settings.model, dtype=settings.dtype, device=settings.device)

    def __call__(self, table: pa.Table) -> pa.Table:
        return self.encode(table)[0]

    def encode(self, table: pa.Table, where: str = "the dataset") -> tuple[pa.Table, int, int]:
        """The table with its vectors, how many tokens its texts had, and how many of them were cut.

        Raises InputError, naming the row.
        """
        import pyarrow as pa

        s = self.settings
        check_column(table.schema, s.column, where)
        if s.output_column in table.column_names:
            raise InputError(f"{where} has a column {s.output_column!r} already")
        column = table.column(s.column)
        if column.null_count:
            raise InputError(
                f"{where}: row {column.is_null().to_pylist().index(True)} of {s.column!r} is null, no text"
            )
        parts, tokens, cut = [np.empty((0, self.encoder.dim), np.float32)], 0, list[int]()
        stream = self.encoder.encode_stream(
            column.to_pylist(),
            batch_tokens=s.batch_tokens,
            normalize=s.normalize,
            prompt_name=s.prompt_name,
            chunk_texts=CHUNK_TEXTS,
            on_cut=cut.append,
        )
        for vectors, count in stream:
            parts.append(vectors)
            tokens += count
        flat = pa.array(np.concatenate(parts).reshape(-1))
        vectors = pa.FixedSizeListArray.from_arrays(flat, self.encoder.dim)
        return table.append_column(s.output_column, vectors), tokens, sum(cut)


class BlockWorker(Worker):
    """Reads a block, encodes it, and writes its file. It returns numbers (texts, tokens, texts that
    were cut, max_length to which), so that nothing large goes through Ray."""

    def __init__(self, settings: WorkerSettings, source: str, output: str):
        super().__init__(settings)
        self.source, _ = open_location(source)
        self.output, self.folder = open_location(output)

    def __call__(self, block: dict[str, Any]) -> dict[str, Any]:
        from pyarrow import BufferOutputStream, parquet

        done: dict[str, Any] = {"name": block["name"], "texts": block["stop"] - block["start"], "tokens": 0, "cut": 0}
        done |= {"max_length": self.encoder.max_seq_length, "error": ""}
        where = f"{block['path']}, rows from {block['start']}"
        try:
            table, done["tokens"], done["cut"] = self.encode(
                read_rows(self.source, block["path"], block["start"], block["stop"]), where
            )
        except InputError as error:  # the user's, for whom the driver makes one line of it
            return {**done, "error": str(error)}
        sink = BufferOutputStream()
        parquet.write_table(table, sink)
        write_whole(self.output, f"{self.folder}/{block['name']}", sink.getvalue())
        return done
