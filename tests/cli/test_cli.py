"""The command line, as a user runs it: in processes of its own, but for errors that come before any work."""

from __future__ import annotations

import csv
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from command_line import ENVIRONMENT, ROOT, fails, run, run_here, run_python
from full import left_to_full

import fastbert
from fastbert import EncoderConfig, SentenceEncoder
from fastbert.backend import BUILD_KERNELS
from fastbert.cli.doctor import torch_fault
from fastbert.cli.outputs.growing_array import GrowingArray
from fastbert.cli.parser import UsageError
from fastbert.cli.run import USER_ERRORS, make_parser
from fastbert.data.text_files import read_texts
from fastbert.errors import TextFileError
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

TEXTS = ["the cat sat on the mat.", "", "a dog ran, and who sat?", 'we "quoted", it', "Zoë\tran"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny.write_sentence_model(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def masked_lm(tmp_path_factory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("masked_lm"), head="MaskedLM")


def write_texts(folder: Path, suffix: str, texts: list[str]) -> Path:
    """The texts as a file of a kind; tables have a column `text` among others."""
    path = folder / f"texts.{suffix}"
    if suffix == "txt":
        path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    elif suffix == "jsonl":
        path.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)))
    elif suffix == "csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([["id", "text"], *enumerate(texts)])
    elif suffix == "tsv":
        path.write_text("id\ttext\n" + "".join(f"{i}\t{text}\n" for i, text in enumerate(texts)), encoding="utf-8")
    else:
        parquet, table = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow").table
        parquet.write_table(table({"id": range(len(texts)), "text": texts}), path, row_group_size=2)
    return path


@pytest.mark.parametrize("suffix", ("txt", "jsonl", "csv", "tsv", "parquet"))
def test_every_kind_of_file_gives_the_same_texts(tmp_path, suffix):
    texts = [text for text in TEXTS if suffix != "tsv" or "\t" not in text]
    assert list(read_texts(write_texts(tmp_path, suffix, texts))) == texts


def test_texts_in_unusual_but_good_files(tmp_path):
    def texts(name: str, data: bytes, column: str | None = None) -> list[str]:
        (tmp_path / name).write_bytes(data)
        return list(read_texts(tmp_path / name, column))

    assert texts("a.txt", b"\xef\xbb\xbfone\r\ntwo\n\nthree") == ["one", "two", "", "three"]
    assert texts("a.csv", b'a,b\r\n"1\n2",x\n\n3,"y ""z"""\n', "a") == ["1\n2", "3"]
    assert texts("b.csv", b"only\nx\n") == ["x"]
    assert texts("a.jsonl", b'"bare"\n\n"strings"\n') == ["bare", "strings"]
    long = b'{"id": ' + b"9" * 5000 + b', "text": "a"}\n'  # more digits than Python converts
    assert texts("b.jsonl", long) == ["a"]
    assert texts("A.TSV", b'sentence\tlabel\n"a quote\t1\n') == ['"a quote']


BAD_FILES = {
    "binary.txt": (bytes(range(256)) * 50, "line 1: holds a NUL byte"),
    "latin1.txt": ("good\nna\xefve\n".encode("latin-1"), "line 2: byte 3 is 0xef, which is not UTF-8"),
    "empty.txt": (b"", "holds no texts"),
    "header.csv": (b"id,text\n", "holds no texts"),
    "ragged.csv": (b"id,text\n1,a,b\n", "line 2: 3 fields, but 2 in the header"),
    "quote.csv": (b'id,text\n1,"a\n2,b\n', "line 3: unexpected end of data"),
    "columns.csv": (b"id,body\n1,a\n", "several columns; choose one with --column: id, body"),
    "bad.jsonl": (b'{"text": "a"}\n{"text": \n', "line 2: not JSON"),
    "number.jsonl": (b'{"text": "a"}\n{"text": 3}\n', "line 2: the value is 3, not a text"),
    "null.jsonl": (b'{"text": null}\n', "line 1: the value is null, not a text"),
    "lost.jsonl": (b'{"text": "a"}\n{"txt": "b"}\n', "line 2: has no 'text'; it has: txt"),
    "long-number.jsonl": (b'"a"\n' + b"9" * 5000 + b"\n", f"line 2: the value is {'9' * 40}..., not a text"),
    "infinite.jsonl": (b"1e999\n", "line 1: the value is Infinity, not a text"),
    "nested.jsonl": (b"[" * 100_000 + b"]" * 100_000 + b"\n", "line 1: nested too deeply"),
    "list.jsonl": (b'["a"]\n', 'line 1: the value is ["a"], not a text'),
    "nothing.jsonl": (b"{}\n", "has no columns in its first row"),
    "utf-8.jsonl": (b'"a\xff"\n', "line 1: byte 3 is 0xff, which is not UTF-8"),
    "surrogate.jsonl": (b'{"text": "\\ud800"}\n', r'line 1: the value is "\ud800", which is not valid Unicode'),
    "rubbish.parquet": (b"PAR1 no", "rubbish.parquet, after row 0: "),
    "photo.png": (b"\x89PNG", "unknown kind of file '.png'"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_named_before_anything_is_written(tmp_path, name):
    data, message = BAD_FILES[name]
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(data)
    error = fails("encode", tmp_path / name, "--model", "any", "--output", tmp_path / "out.npy")
    assert message in error and name in error
    assert sorted(path.name for path in tmp_path.iterdir()) == [name]


def test_long_lines_are_not_read_into_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("fastbert.data.text_files.MAX_LINE_BYTES", 100)
    (tmp_path / "a.txt").write_bytes(b"a" * 100 + b"\n" + b"b" * 101)
    with pytest.raises(TextFileError, match="line 1: longer"):
        list(read_texts(tmp_path / "a.txt"))


@pytest.mark.parametrize("suffix", ("txt", "jsonl", "csv", "parquet"))
def test_encode_writes_what_the_encoder_gives(tmp_path, model, suffix):
    source, out = write_texts(tmp_path, suffix, TEXTS), tmp_path / "out.npy"
    run_as = run if suffix == "txt" else run_here  # one in a process of its own
    done = run_as("encode", source, "--model", model, "--output", out, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert re.search(r"5 texts, \d+ tokens in .* tokens/s -> .*out.npy float32 \(5, 32\)\n$", done.stderr)
    vectors = np.load(out)
    assert vectors.dtype == np.float32 and vectors.shape == (5, 32)
    exact = SentenceEncoder.from_pretrained(model, dtype="float64", device="cpu").encode(TEXTS, convert_to_tensor=True)
    plain = SentenceEncoder.from_pretrained(model, device="cpu").encode(TEXTS, convert_to_tensor=True)
    assert_close_to_reference(torch.from_numpy(vectors), exact.double(), plain, GRADIENT_FACTOR, suffix)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([source.name, "out.npy"])


def test_encode_never_overwrites_unless_told(tmp_path, model):
    source, out = write_texts(tmp_path, "csv", TEXTS), tmp_path / "out.npy"
    out.write_bytes(b"mine")
    arguments = ("encode", source, "--model", model, "--output", out, "--dtype", "bf16", "--device", "cpu")
    assert "exists already; --force replaces it" in fails(*arguments)
    assert out.read_bytes() == b"mine"
    assert run_here(*arguments, "--force", "--batch-tokens", 5).returncode == 0
    assert np.load(out).shape == (5, 32)


def test_encode_bad_arguments(tmp_path, model):
    source = write_texts(tmp_path, "csv", TEXTS)
    out = tmp_path / "out.npy"

    def error(*more, source=source, model=model, out=out):
        return fails("encode", source, "--model", model, "--output", out, *more)

    assert "gone.txt does not exist" in error(source=tmp_path / "gone.txt")
    assert "is not a file" in error(source=tmp_path)
    assert "has no column 'body'; it has: id, text" in error("--column", "body")
    assert "the name must end in .npy" in error(out=tmp_path / "out.bin")
    assert "is not a folder" in error(out=tmp_path / "nowhere" / "out.npy")
    assert "is not a folder" in error(out=source / "out.npy")
    assert "is not a folder" in error(model=tmp_path / "no-model")
    assert "config.json does not exist" in error(model=tmp_path)
    assert "device 'cuda:99' is not there" in error("--device", "cuda:99")
    for device in ("meta", "mps", "xla", *([] if torch.cuda.is_available() else ["cuda"])):
        assert f"device '{device}' is not there: torch {torch.__version__} sees the CPU" in error("--device", device)
    assert "unknown device 'nonsense'" in error("--device", "nonsense")
    assert "'0' is not a whole number of at least 1" in error("--batch-tokens", 0)
    assert "99999999999999999... is above 2147483647" in error("--batch-tokens", "9" * 5000)
    assert "argument --dtype: invalid choice: 'int3'" in error("--dtype", "int3")
    assert "argument --dtype: invalid choice: 'float64'" in error("--dtype", "double")
    assert "this process may use" in fails("bench", "--threads", 2**31 - 1)
    assert "arguments are required: FILE, --model, --output" in fails("encode")
    assert "FASTBERT_BACKEND: unknown backend 'x'" in fails("doctor", FASTBERT_BACKEND="x")
    assert [path.name for path in tmp_path.iterdir()] == [source.name]


def test_two_runs_do_not_write_one_file(tmp_path):
    array = (tmp_path / "a.npy", (2, 3), {"input": "a"}, False)
    with GrowingArray.open(*array) as first:
        first.append(np.ones((1, 3), np.float32))
        with pytest.raises(UsageError, match="being written by another process"), GrowingArray.open(*array):
            pass
    with GrowingArray.open(*array) as second:
        assert second.rows == 1
        second.append(np.zeros((1, 3), np.float32))
        second.finish()
    assert np.load(array[0]).tolist() == [[1.0] * 3, [0.0] * 3]


def test_fill_mask(masked_lm, model):
    done = run_here("fill-mask", "the <mask> sat on [MASK].", "--model", masked_lm, "--top", 3)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "mask 1 of 2" and lines[4] == "mask 2 of 2" and len(lines) == 8
    network = fastbert.AutoModelForMaskedLM.from_pretrained(masked_lm)
    ids = torch.tensor([[2, *map(tiny.VOCAB.index, ("the", "[MASK]", "sat", "on", "[MASK]", ".")), 3]])
    for place, first in ((2, 1), (5, 5)):
        top = network(ids).logits[0, place].softmax(-1).topk(3)
        for line, p, token in zip(lines[first:], top.values.tolist(), top.indices.tolist(), strict=False):
            assert line.split()[:2] == [f"{p:.2%}", tiny.VOCAB[token]]
    assert "no mask in" in fails("fill-mask", "the cat", "--model", masked_lm)
    assert "has no masked-LM head" in fails("fill-mask", "the [MASK]", "--model", model)
    assert "longer than the position table" in fails("fill-mask", "the [MASK]" * 40, "--model", masked_lm)


def test_info_reads_no_weights(tmp_path):
    tiny.write_json(tmp_path / "config.json", EncoderConfig.of_family("bert").to_dict())
    done = run("info", tmp_path)
    assert done.returncode == 0, done.stderr
    for text in (
        "109,482,240",
        "12 of 64",
        "30,522",
        "84,934,656",
        "170.5 M",
        "188.7 M",
        "437.9 MB",
        "219.0 MB",
        "134.4 MB",
    ):
        assert text in done.stdout, text
    assert run_here("info", tmp_path / "config.json").stdout.splitlines()[1:] == done.stdout.splitlines()[1:]
    assert "config.json does not exist" in fails("info", ROOT / "tests")


def test_doctor():
    done = run("doctor")
    assert done.returncode == 0, done.stderr
    assert f"{torch.__version__}" in done.stdout and torch.backends.cpu.get_cpu_capability() in done.stdout
    for op in fastbert.backends():
        assert re.search(rf"^ +{op} .*serves", done.stdout, re.MULTILINE), op
    assert (
        max(len(line) for line in done.stdout.splitlines() if os.sep not in line) <= 100
    )  # a path is as long as it is
    assert torch_fault("2.11.0") is None and torch_fault("2.13.0+cpu") is None and torch_fault("3.0.1") is None
    assert torch_fault("2.9.1+cu128") == "too old: fastbert needs torch 2.11 or newer"


@left_to_full(lambda p: p["backend"] == "cuda")  # reported by the same line
@pytest.mark.parametrize("backend", ("triton", "cuda"))
def test_doctor_reports_a_backend_that_cannot_serve(backend):
    done = run("doctor", FASTBERT_BACKEND=backend, TRITON_INTERPRET="0")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert f"FASTBERT_BACKEND={backend} is set: every operation that has such a kernel uses it or fails" in done.stdout
    reason = re.search(r"\[(\d)\] tensors are on cpu", done.stdout)
    assert reason is not None
    assert re.search(rf"^ +add_layer_norm +could .* fails \[{reason[1]}\]", done.stdout, re.MULTILINE)
    assert re.search(r"^ +encoder_layers +serves ", done.stdout, re.MULTILINE)


def test_doctor_without_optional_parts():
    blocked = "import sys; sys.modules.update(dict.fromkeys(['triton', 'transformers', 'fastbert._C']))"
    program = f"{blocked}; from fastbert.cli import main; sys.exit(main(['doctor']))"
    done = run_python([sys.executable, "-c", program])
    assert done.returncode == 0, done.stderr
    assert "the C++ extension is not built" in done.stdout and BUILD_KERNELS in done.stdout


# What must be given, in the order of `fastbert --help`.
COMMANDS = {
    "encode": "FILE --model M --output OUT",
    "search": "QUERY FILE --model M",
    "rerank": "QUERY FILE --model M",
    "classify": "FILE --model M",
    "fill-mask": "TEXT --model M",
    "inspect": "MODEL TEXT [TEXT ...]",
    "finetune": "--model NAME --train NAME [NAME ...] --output NAME",
    "predict": "MODEL FILE",
    "pretrain": "--train NAME [NAME ...] --output NAME",
    "serve": "MODEL",
    "info": "MODEL",
    "compare": "MODEL [MODEL ...]",
    "bench": "",
    "quantize": "MODEL OUTPUT",
    "doctor": "",
    "build": "",
}


def test_help_has_the_commands_under_headings():
    text = run_here("--help").stdout
    headings = [
        text.index(f"\n{name}:\n") for name in ("use a model", "train", "serve", "measure and set up", "options")
    ]
    assert headings == sorted(headings) and re.findall(r"^  ([a-z][\w-]*) ", text, re.MULTILINE) == list(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_what_is_required_first(name):
    text, needed = run_here(name, "--help").stdout, COMMANDS[name]
    assert text.startswith(f"usage: fastbert {' '.join(filter(None, (name, needed, '[options]')))}\n\n")
    before, _, _ = text.partition("\noptions:\n")
    required = before.partition("\nrequired")[2]  # "" of a command that asks for nothing
    listed = [line.split("  ")[1] for line in required.splitlines() if re.match(r"  \S", line)]
    assert " ".join(listed) == needed.replace("TEXT [TEXT ...]", "TEXT").replace("MODEL [MODEL ...]", "MODEL")


def test_examples_of_the_help_can_be_given():
    parser = make_parser()
    for name in COMMANDS:
        examples = run_here(name, "--help").stdout.partition("\nexample:\n")[2]
        assert examples.startswith(f"  fastbert {name}")
        for example in re.findall(r"^  fastbert (.*)$", examples, re.MULTILINE):
            assert "run" in parser.parse_args(shlex.split(example))


def test_help_is_quick():
    program = "import sys; from fastbert.cli import main\n"
    for arguments in (["--help"], *([name, "--help"] for name in COMMANDS)):
        program += f"try: main({arguments})\nexcept SystemExit: assert 'torch' not in sys.modules, {arguments}\n"
    assert subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT).returncode == 0
    assert run_here("--version").stdout == f"fastbert {fastbert.__version__}\n"


def test_every_error_that_a_user_can_mend_is_one_line():
    """They are named by strings, so that nothing is imported for them; a class that moves must not be a traceback."""
    for module, names in USER_ERRORS.items():
        for name in names:
            assert issubclass(getattr(importlib.import_module(f"fastbert.{module}"), name), Exception)
    public = {name for name in fastbert.__all__ if name.endswith("Error")}
    assert public <= {name for names in USER_ERRORS.values() for name in names}
