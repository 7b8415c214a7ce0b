"""The command line, in processes of its own: signals at any moment, disks that are full, readers that leave, odd texts.

A case is one function here. What it asserts holds whenever a signal comes; only where it comes differs from run to run.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import tiny
from draw import Draw
from fuzz_damage import BYTES, ODD_VALUES
from fuzz_driver import Fuzzer
from fuzz_files import templates
from safetensors.torch import load_file

from fastbert.data.text_files import read_texts
from fastbert.errors import TextFileError

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
NO_END = 600  # seconds, for what takes three
NUM_TEXTS = 6000  # more chunks than one, in about a second
SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT")
KNOWN = re.compile(r"texts\.txt|out\.npy(\.partial|\.progress)?|\.out\.npy\.progress\..+\.partial|int8")


def start(arguments: list, limit: int | None = None, **options) -> subprocess.Popen:
    """`fastbert ...`; `limit`, in bytes: of each file that it writes, as of a disk that fills up."""
    command = [sys.executable, "-m", "fastbert", *map(str, arguments)]
    before = None if limit is None else partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, limit))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(command, env=ENVIRONMENT, text=True, preexec_fn=before, **pipes)


def finish(process: subprocess.Popen, was_interrupted: bool = False) -> tuple[int, str]:
    """The exit code and what was said; a traceback with a line of fastbert's in it is a fault.

    But for that of a Ctrl-C that came before fastbert could do anything about it.
    """
    _, errors = process.communicate(timeout=NO_END)
    is_fault = "Traceback" in errors and "fastbert" in errors and not (was_interrupted and is_before_main(errors))
    assert not is_fault, f"exit {process.returncode}\n{errors}"
    return process.returncode, errors


def is_before_main(errors: str) -> bool:
    """Whether a Ctrl-C met Python that was starting, or importing the module that has `main`: nothing had called it."""
    package = re.escape(str(ROOT / "fastbert"))
    ours = re.findall(rf'File "{package}/.*", line \d+, in (.+)', errors)
    is_interrupt = errors.count("Traceback") == 1 and errors.rstrip().endswith("KeyboardInterrupt")
    return is_interrupt and set(ours) <= {"<module>"} and "main(" not in errors


def assert_user_error(process: subprocess.Popen) -> str:
    code, errors = finish(process)
    said = [line for line in errors.splitlines() if line.startswith("fastbert: error: ")]
    assert code == 2 and len(said) == 1, f"exit {code}\n{errors}"
    return said[0]


@cache
def texts() -> str:
    words = tiny.WORDS.split()
    lines = (" ".join(words[(i * j) % len(words)] for j in range(1 + i % 20)) for i in range(NUM_TEXTS))
    return "".join(f"{line}\n" for line in lines)


@cache
def undisturbed() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        code, errors = finish(start(encode(Path(folder))))
        assert code == 0, errors
        return (Path(folder) / "out.npy").read_bytes()


def encode(folder: Path) -> list:
    source = folder / "texts.txt"
    if not source.exists():
        source.write_text(texts())
    return ["encode", source, "--model", templates()["sentences"], "--device", "cpu", "--output", folder / "out.npy"]


def quantize(folder: Path) -> list:
    return ["quantize", templates()["more layers"], folder / "int8"]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def disturb(draw: Draw, arguments: list) -> None:
    """Start, and send a signal at some moment: while it imports, while it works, or when it has ended."""
    name, moment = draw.choice(SIGNALS), draw.integer(0, 5000)
    draw.note(f"  {name} after {moment} ms")
    process = start(arguments)
    time.sleep(moment / 1000)
    process.send_signal(signal.Signals[name])
    code, errors = finish(process, was_interrupted=name == "SIGINT")
    stopped = {"SIGKILL": (-9,), "SIGTERM": (-15, 143), "SIGINT": (-2, 130, 1)}[name]  # 1: before main began
    done_before = code == 0 or (code == 2 and "exists already" in errors)
    assert code in stopped or done_before, f"exit {code} after {name}\n{errors}"


def interrupted_encode(draw: Draw, folder: Path) -> None:
    for _ in range(draw.integer(1, 3)):
        disturb(draw, encode(folder))
        assert all(map(KNOWN.fullmatch, names(folder))), names(folder)
    if not (folder / "out.npy").exists():
        code, errors = finish(start(encode(folder)))
        assert code == 0, errors
    assert (folder / "out.npy").read_bytes() == undisturbed(), "other bits than in one go"
    assert names(folder) == {"texts.txt", "out.npy"}, names(folder)


@cache
def quantized() -> dict:
    with tempfile.TemporaryDirectory() as folder:
        code, errors = finish(start(quantize(Path(folder))))
        assert code == 0, errors
        return load_file(Path(folder) / "int8" / "model.safetensors")


def interrupted_quantize(draw: Draw, folder: Path) -> None:
    for _ in range(draw.integer(1, 2)):
        disturb(draw, quantize(folder))
    if not (folder / "int8").exists():
        code, errors = finish(start(quantize(folder)))
        assert code == 0, errors
        assert names(folder) == {"int8"}, f"left behind: {names(folder)}"
    found = load_file(folder / "int8" / "model.safetensors")
    assert found.keys() == quantized().keys()
    assert all(found[name].equal(t) for name, t in quantized().items()), "other bits than in one go"


def full_disk(draw: Draw, folder: Path) -> None:
    arguments = draw.choice((encode, quantize))(folder)
    limit = draw.choice((0, 100, 5000, 30_000))
    draw.note(f"  {arguments[0]} with files of up to {limit} bytes")
    error = assert_user_error(start(arguments, limit))
    draw.note(f"  {error}")
    assert not (folder / "int8").exists() and not (folder / "out.npy").exists()
    assert all(map(KNOWN.fullmatch, names(folder))), f"left behind: {names(folder)}"
    code, errors = finish(start(arguments))
    assert code == 0, errors
    if arguments[0] == "encode":
        assert (folder / "out.npy").read_bytes() == undisturbed(), "other bits than in one go"


def reader_gone(draw: Draw, folder: Path) -> None:
    fill_mask = ["fill-mask", "the [MASK] sat", "--model", templates()["masked_lm"], "--top", draw.choice((1, 40))]
    arguments = draw.choice((fill_mask, ["info", templates()["ours"]], ["doctor"]))
    draw.note(f"  {arguments[0]}")
    if draw.flag(3):
        with open("/dev/full", "w") as full:
            assert_user_error(start(arguments, stdout=full))
        return
    process = start(arguments)
    process.stdout.close()
    process.stdout = None
    code, errors = finish(process)
    assert code in (0, 141) and "Traceback" not in errors, f"exit {code}\n{errors}"


def odd_line(draw: Draw) -> str:
    value = draw.choice(("a text", *ODD_VALUES))
    entry = draw.choice(({"text": value}, value, [value], {"text": {"text": value}}, {"body": value, "text": "a"}))
    line = json.dumps(entry)
    return draw.choice((line, line[: draw.integer(0, len(line))], line + line, "9" * 5000, "[" * 5000, "-", "\x00", ""))


def odd_texts(draw: Draw, folder: Path) -> None:
    """Many files are read here, the last one by the command, too."""
    for _ in range(40):
        path = folder / f"texts.{draw.choice(('jsonl', 'txt', 'csv', 'tsv', 'parquet'))}"
        data = "\n".join(odd_line(draw) if draw.flag() else '{"text": "a"}' for _ in range(draw.integer(1, 4))).encode()
        data = BYTES["flip_bits"](draw, data) if draw.flag(4) else data
        path.write_bytes(data)
        del draw.notes[1:]  # of the files before, which were read
        draw.note(f"  {path.suffix}: {data[:300]!r}")
        try:
            readable = bool(list(read_texts(path)))
        except TextFileError as error:
            assert str(error)
            readable = False
        if path.suffix != ".jsonl" and not readable:
            path.unlink()
    output = folder / "out.npy"
    process = start(["encode", path, "--model", templates()["ours"], "--device", "cpu", "--output", output])
    code, errors = finish(process)
    assert (code == 0) == readable and code in (0, 2), f"exit {code}\n{errors}"


CASES: dict[str, Callable[[Draw, Path], None]] = {
    case.__name__: case for case in (interrupted_encode, interrupted_quantize, full_disk, reader_gone, odd_texts)
}


def run_case(draw: Draw) -> None:
    draw.doing = draw.choice(CASES)
    draw.note(draw.doing)
    folder = Path(tempfile.mkdtemp())
    try:
        CASES[draw.doing](draw, folder)
    finally:
        shutil.rmtree(folder)


FUZZER = Fuzzer("cli", run_case, cases=1, is_slow=True)
