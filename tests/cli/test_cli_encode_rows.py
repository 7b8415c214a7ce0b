"""`fastbert encode` into rows of texts and vectors: goes on after a stop, looks at the disk, says what was cut."""

from __future__ import annotations

import shutil

import pytest
import tiny
from command_line import fails, run_here

from fastbert.cli import encode
from fastbert.cli.outputs.growing_array import GrowingArray
from fastbert.sentences import batches

TEXTS = ["the cat sat", "", "a dog ran", "the old house", "Zoë", "who and we", "on the mat"]
ROWS = (".jsonl", ".parquet")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.write_model(tmp_path_factory.mktemp("model"), num_hidden_layers=1)


@pytest.fixture
def source(tmp_path):
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "texts.txt"
    path.write_text("".join(f"{text}\n" for text in TEXTS), encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    monkeypatch.setattr(encode, "CHUNK_TEXTS", 2)


def stopping_at(rows, append=GrowingArray.append):
    def stops(array, vectors):
        append(array, vectors)
        if array.rows == rows:
            raise KeyboardInterrupt

    return stops


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("at", (4, len(TEXTS)))
def test_a_stopped_run_goes_on(kind, at, model, source, tmp_path, monkeypatch):
    whole, out = tmp_path / f"whole{kind}", tmp_path / f"out{kind}"
    arguments = ("encode", source, "--model", model, "--device", "cpu", "--output")
    assert run_here(*arguments, whole).returncode == 0
    with monkeypatch.context() as patched:
        patched.setattr(GrowingArray, "append", stopping_at(at))
        done = run_here(*arguments, out)
    assert done.returncode == 130 and f"the same command goes on with what {out}.partial has" in done.stderr
    assert not out.exists()
    done = run_here(*arguments, out)
    assert done.returncode == 0 and f"{at} of {len(TEXTS)} texts were encoded before" in done.stderr
    assert out.read_bytes() == whole.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", out.name, whole.name]


@pytest.mark.parametrize("kind", ROWS)
def test_the_disk_is_looked_at_before(kind, model, source, tmp_path, monkeypatch):
    least = len(TEXTS) * 32 * (4 + {".jsonl": 10, ".parquet": 4}[kind])
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(0, 0, least - 1))
    out = tmp_path / f"out{kind}"
    assert f"{out} needs " in fails("encode", source, "--model", model, "--device", "cpu", "--output", out)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("kind", ROWS)
def test_the_bar_knows_the_total(kind, model, source, tmp_path, monkeypatch):
    made = []

    def bar(total, show, made_by=batches.progress_bar, **options):
        made.append(total)
        return made_by(total, show, **options)

    monkeypatch.setattr(batches, "progress_bar", bar)
    out = tmp_path / f"out{kind}"
    assert run_here("encode", source, "--model", model, "--device", "cpu", "--output", out).returncode == 0
    assert made == [len(TEXTS)]


@pytest.mark.parametrize("output", ("out.npy", "out.jsonl", "-"))
def test_texts_that_were_cut_are_counted(output, model, source, tmp_path):
    out = output if output == "-" else tmp_path / output
    arguments = ("--model", model, "--device", "cpu", "--force", "--output", out)
    assert "cut to the model" not in run_here("encode", source, *arguments).stderr
    source.write_text("the cat " * 31 + "\n" + "the cat " * 32 + "\n")  # 62 words, and 2 special tokens, fit
    said = "fastbert: 1 text was cut to the model's 64 tokens; --windows reads all of them\n"
    assert said in run_here("encode", source, *arguments).stderr
    assert "cut to the model" not in run_here("encode", source, *arguments, "--windows").stderr


@pytest.mark.parametrize(
    "output,chunks", (("out.npy", False), ("out.jsonl", False), ("out.jsonl", True), ("-", False), ("-", True))
)
def test_bad_rows_are_named_and_counted(output, chunks, model, tmp_path):
    good, broken = tmp_path / "good.jsonl", tmp_path / "broken.jsonl"
    good.write_text('"the cat"\n"a dog"\n"we ran"\n')
    broken.write_text('"the cat"\n3\n"a dog"\n{\n"we ran"\n')
    arguments = ("--model", model, "--device", "cpu", *(("--chunks",) if chunks else ()))
    made = []
    for source, more in ((good, ()), (broken, ("--skip-bad-rows",))):
        out = "-" if output == "-" else tmp_path / source.stem / output
        if out != "-":
            out.parent.mkdir()
        done = run_here("encode", source, *arguments, "--output", out, *more)
        assert done.returncode == 0, done.stderr
        made.append(done.stdout.encode() if out == "-" else out.read_bytes())
    assert made[0] == made[1]
    said = [line.removeprefix("fastbert: ") for line in done.stderr.splitlines()][:3]
    assert said[0] == f"left out: {broken}, line 2: the value is 3, not a text"
    assert said[1].startswith(f"left out: {broken}, line 4: not JSON") and said[2] == "2 bad rows were left out"
    assert "line 2: the value is 3" in fails("encode", broken, *arguments, "--output", tmp_path / "no.jsonl")
