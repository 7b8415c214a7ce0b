"""Plans, workers and files of a bulk run, without Ray: the same bits as one process, wherever a run was stopped."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import tiny
from command_line import fails, run_here
from pyarrow import parquet
from pyarrow.fs import LocalFileSystem

import fastbert.bulk.blocks as blocks
import fastbert.bulk.ray_engine as ray_engine
from fastbert import ConfigError, InputError, SentenceEncoder
from fastbert.bulk.blocks import CHUNK_TEXTS, BlockPlan, make_plan, read_rows
from fastbert.bulk.ray_engine import make_pool
from fastbert.bulk.worker import BlockWorker, Worker, WorkerSettings

IDENTITY = {"model": "tiny"}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("encoder"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    words = tiny.WORDS.split()
    return [" ".join(words[(i * j) % len(words)] for j in range(1 + i % 9)) for i in range(3 * CHUNK_TEXTS + 100)]


@pytest.fixture
def source(tmp_path, texts) -> Path:
    """Two files, one of several row groups, and what is none of the source."""
    folder = tmp_path / "source"
    (folder / "more").mkdir(parents=True)
    table = pa.table({"id": range(len(texts)), "text": texts})
    first = 2 * CHUNK_TEXTS + 50
    parquet.write_table(table[:first], folder / "a.parquet", row_group_size=700)
    parquet.write_table(table[first:], folder / "more" / "b.parquet")
    (folder / "_metadata.parquet").write_bytes(b"none")
    (folder / "notes.txt").write_text("none")
    return folder


def settings(model: Path, **changes) -> WorkerSettings:
    given = WorkerSettings(
        model=str(model),
        column="text",
        output_column="embedding",
        dtype="auto",
        device="cpu",
        batch_tokens=None,
        normalize=None,
        prompt_name=None,
        threads=1,
    )
    return replace(given, **changes)


def plan_of(source: Path, output: Path, workers: int = 1, force: bool = False, **identity) -> BlockPlan:
    return make_plan(str(source), str(output), "text", {**IDENTITY, **identity}, workers, force)


def test_a_plan_cuts_files_at_whole_chunks(source, tmp_path, texts):
    plan = plan_of(source, tmp_path / "out")
    assert plan.texts == len(texts) and plan.left == plan.blocks
    ends = [(Path(block.path).name, block.start, block.stop) for block in plan.blocks]
    assert ends == [
        ("a.parquet", 0, 1024), ("a.parquet", 1024, 2048), ("a.parquet", 2048, 2098), ("b.parquet", 0, 1024),
        ("b.parquet", 1024, 1074),
    ]  # fmt: skip
    assert plan.blocks[3].name == "part-00003-of-00005.parquet"


def test_blocks_are_larger_where_there_are_many_texts(monkeypatch, source, tmp_path):
    monkeypatch.setattr(blocks, "BLOCKS_A_WORKER", 1)
    assert [b.stop - b.start for b in plan_of(source, tmp_path / "out").blocks] == [2098, 1074]
    assert [b.stop - b.start for b in plan_of(source, tmp_path / "two", workers=2).blocks] == [2048, 50, 1074]
    monkeypatch.setattr(blocks, "BLOCK_TEXTS", 1024)
    assert len(plan_of(source, tmp_path / "small").blocks) == 5


def test_rows_are_read_across_row_groups(source, texts):
    path = str(source / "a.parquet")
    for start, stop in ((0, 1), (0, 2098), (699, 701), (1024, 2048), (2097, 2098)):
        table = read_rows(LocalFileSystem(), path, start, stop)
        assert table.column("text").to_pylist() == texts[start:stop], (start, stop)
        assert table.column("id").to_pylist() == list(range(start, stop))


def test_all_blocks_have_the_bits_of_one_process(source, tmp_path, model, texts):
    """Whichever worker writes them, in whatever order, and however often."""
    plan = plan_of(source, tmp_path / "out")
    workers = [BlockWorker(settings(model), str(source), str(tmp_path / "out")) for _ in range(2)]
    for i, block in enumerate([*reversed(plan.blocks), plan.blocks[2]]):
        done = workers[i % 2](asdict(block))
        assert (done["texts"], done["error"]) == (block.stop - block.start, "") and done["tokens"] > 0
    table = parquet.read_table(tmp_path / "out")  # leaves out the manifest, which begins with _
    assert table.column("text").to_pylist() == texts and table.column("id").to_pylist() == list(range(len(texts)))
    assert table.schema.field("embedding").type == pa.list_(pa.float32(), 32)
    vectors = np.stack(table.column("embedding").to_numpy(zero_copy_only=False))
    # The engine of one process, file by file: its chunks begin where a file begins.
    encoder = SentenceEncoder.from_pretrained(model, device="cpu")
    first = 2 * CHUNK_TEXTS + 50
    streams = (encoder.encode_stream(part, chunk_texts=CHUNK_TEXTS) for part in (texts[:first], texts[first:]))
    assert np.array_equal(vectors, np.concatenate([rows for stream in streams for rows, _ in stream]))
    # And `fastbert encode` of the file writes these bits.
    out = tmp_path / "a.npy"
    done = run_here(
        "encode", source / "a.parquet", "--column", "text", "--model", model, "--device", "cpu", "--output", out
    )
    assert done.returncode == 0, done.stderr
    assert np.array_equal(np.load(out), vectors[:first])


def test_a_run_goes_on_with_what_is_left(source, tmp_path, model):
    out = tmp_path / "out"
    plan = plan_of(source, out)
    worker = BlockWorker(settings(model), str(source), str(out))
    for block in plan.blocks[1:3]:
        worker(asdict(block))
    (out / ".part-00000-of-00005.parquet.node.1").write_bytes(b"half")  # of a worker that was killed
    again = plan_of(source, out, workers=7)  # the blocks stay as they were cut
    assert again.blocks == plan.blocks and again.left == [plan.blocks[0], *plan.blocks[3:]]
    with pytest.raises(InputError, match="was begun with another model; --force starts again"):
        plan_of(source, out, model="other")
    parquet.write_table(pa.table({"text": ["one more"]}), source / "c.parquet")
    with pytest.raises(InputError, match="was begun with another files"):
        plan_of(source, out)
    forced = plan_of(source, out, force=True)
    assert len(forced.left) == len(forced.blocks) == 6
    assert not list(out.glob("part-*"))


def test_a_write_that_fails_leaves_nothing(source, tmp_path, model, monkeypatch):
    out = tmp_path / "out"
    plan = plan_of(source, out)
    worker = BlockWorker(settings(model), str(source), str(out))

    def full(a: str, b: str) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            worker(asdict(plan.blocks[0]))
    assert [path.name for path in out.iterdir()] == ["_fastbert.json"]


def test_a_null_is_named(tmp_path, model):
    table = pa.table({"text": ["a dog", None]})
    parquet.write_table(table, tmp_path / "a.parquet")
    plan = plan_of(tmp_path / "a.parquet", tmp_path / "out")
    done = BlockWorker(settings(model), str(tmp_path), str(tmp_path / "out"))(asdict(plan.blocks[0]))
    assert done["error"].endswith("a.parquet, rows from 0: row 1 of 'text' is null, no text")
    with pytest.raises(InputError, match="has a column 'id' already"):
        Worker(settings(model, output_column="id"))(pa.table({"id": [1], "text": ["a"]}))


@pytest.mark.parametrize(
    "resources,workers,device,spare,expected",
    (
        ({"CPU": 2.0}, 2, None, 0.0, (2, 1, 0, 1, "cpu")),
        ({"CPU": 2.0}, 2, None, 1.0, (2, 0.5, 0, 1, "cpu")),  # ray_encode: a CPU is left to those who read
        ({"CPU": 1.0}, None, None, 1.0, (1, 0.5, 0, 1, "cpu")),
        ({"CPU": 64.0}, None, None, 0.0, (16, 4, 0, 4, "cpu")),
        ({"CPU": 64.0, "GPU": 8.0}, None, None, 0.0, (8, 4, 1, 4, "cuda")),
        ({"CPU": 64.0, "GPU": 8.0}, 2, "cuda", 1.0, (2, 4, 1, 4, "cuda")),
        ({"CPU": 8.0, "GPU": 8.0}, None, "cpu", 0.0, (2, 4, 0, 4, "cpu")),
    ),
)
def test_pools(resources, workers, device, spare, expected):
    assert tuple(make_pool(resources, workers, device, spare)) == expected


@pytest.mark.parametrize(
    "options,said",
    (
        ((0, None), "workers is 0"),
        ((None, "cuda:1"), "it is cpu or cuda"),
        ((None, "cuda"), "the cluster has no GPU"),
    ),
)
def test_pools_that_cannot_be(options, said):
    with pytest.raises(InputError, match=said):
        make_pool({"CPU": 4.0}, *options, 0.0)


@pytest.mark.parametrize(
    "address,said",
    ((None, "Ray did not start on this machine"), ("10.0.0.1:6379", "RAY_ADDRESS=10.0.0.1:6379 was not reached")),
)
def test_a_ray_that_does_not_start(monkeypatch, address, said):
    def init(**options):
        raise Exception("The current node timed out\nduring startup.")

    monkeypatch.setattr(ray_engine, "import_ray", lambda: SimpleNamespace(init=init, is_initialized=lambda: False))
    monkeypatch.setattr(os, "environ", {} if address is None else {"RAY_ADDRESS": address})
    with pytest.raises(ConfigError, match=rf"{re.escape(said)}.*\(The current node timed out during startup\.\)"):
        ray_engine.start_ray()


def test_bad_places(source, tmp_path):
    out = tmp_path / "out"
    for place, said in (
        (tmp_path / "nothing", "does not exist"),
        (tmp_path, "has no column"),
        ("nosuch://bucket/x", "nosuch"),
    ):
        if place == tmp_path:
            parquet.write_table(pa.table({"words": ["a"]}), tmp_path / "words.parquet")
        with pytest.raises(InputError, match=said):
            make_plan(str(place), str(out), "text", IDENTITY, 1, False)
    assert not out.exists()
    (source / "broken.parquet").write_bytes(b"no parquet")
    with pytest.raises(InputError, match=r"broken\.parquet"):
        plan_of(source, out)
    (source / "broken.parquet").unlink()
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="is not empty, and no run of this began there"):
        plan_of(source, out)
    plan_of(source, out, force=True)
    assert (out / "mine.txt").exists()
    (out / "_fastbert.json").write_text(json.dumps({"identity": 3}))
    with pytest.raises(InputError, match="is damaged"):
        plan_of(source, out)


@pytest.mark.full
def test_the_command_line_refuses_what_cannot_be(source, tmp_path, model):
    ray = ("--engine", "ray", "--model", model)
    assert "--workers is for --engine ray" in fails(
        "encode", source, "--workers", 2, "--model", model, "--output", "a.npy"
    )
    assert "it is a folder" in fails("encode", source, *ray, "--output", tmp_path / "out.npy")
    assert "does not exist" in fails("encode", tmp_path / "none", *ray, "--output", tmp_path / "out")
    assert "has no column 'words'; it has: id, text" in fails(
        "encode", source, *ray, "--column", "words", "--output", tmp_path / "out"
    )


class InThisProcess:
    """What the engine asks of Ray, one block after the other."""

    def __init__(self):
        context = SimpleNamespace(get_current=lambda: SimpleNamespace())
        self.data = SimpleNamespace(
            ActorPoolStrategy=lambda **options: None,
            DataContext=context,
            from_items=lambda items, **options: SimpleNamespace(
                map=lambda *given, **own: self.map(items, *given, **own)
            ),
        )

    @staticmethod
    def cluster_resources() -> dict[str, float]:
        return {"CPU": 1.0}

    @staticmethod
    def map(items, kind, fn_constructor_kwargs, **options):
        return SimpleNamespace(iter_rows=lambda: map(kind(**fn_constructor_kwargs), items))


def test_texts_that_were_cut_are_counted(tmp_path, model, monkeypatch):
    monkeypatch.setattr(ray_engine, "import_ray", lambda: None)
    monkeypatch.setattr(ray_engine, "start_ray", InThisProcess)
    texts = ["the cat", "the cat " * 100, "a dog"] * 400 + ["a dog " * 100]  # of two blocks
    parquet.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    done = run_here(
        "encode",
        tmp_path / "a.parquet",
        "--engine",
        "ray",
        "--model",
        model,
        "--device",
        "cpu",
        "--output",
        tmp_path / "out",
    )
    assert done.returncode == 0 and len(list((tmp_path / "out").glob("part-*"))) == 2, done.stderr
    limit = SentenceEncoder.from_pretrained(model, device="cpu").max_seq_length
    cut = f"401 texts were cut to the model's {limit} tokens; --windows, without --engine ray, reads all of them\n"
    assert cut in done.stderr
