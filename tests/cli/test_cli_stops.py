"""What stops a command half-way: signals at any moment, full disks, readers that go away. Nothing is lost or mixed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny
import warm
from command_line import ENVIRONMENT, command, fails, run_here, run_python
from full import left_to_full

CHUNKS, CHUNK = 5, 1024

# `fastbert ARGUMENTS` that sends itself a signal when it has appended its third chunk: not a moment sooner or later.
STOPPED = """
import signal, sys
from fastbert import cli
from fastbert.cli.outputs.growing_array import GrowingArray
append, appended = GrowingArray.append, 0
def counted(self, vectors):
    global appended
    append(self, vectors)
    appended += 1
    if appended == 3:
        signal.raise_signal(int(sys.argv[1]))
GrowingArray.append = counted
sys.exit(cli.main(sys.argv[2:]))
"""

# `fastbert ARGUMENTS` that may write so many bytes into a file: what a full disk or a quota does, with another number.
LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
from fastbert import cli
sys.exit(cli.main(sys.argv[2:]))
"""


def run_program(program: str, *arguments: object) -> subprocess.CompletedProcess:
    return run_python([sys.executable, "-c", program, *map(str, arguments)])


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("encoder"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    words, path = tiny.WORDS.split(), tmp_path_factory.mktemp("source") / "texts.txt"
    texts = [" ".join(words[(i * j) % len(words)] for j in range(1 + i % 9)) for i in range(CHUNKS * CHUNK)]
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory, model, source) -> bytes:
    """The file that a run which nothing stops writes."""
    out = tmp_path_factory.mktemp("whole") / "out.npy"
    done = run_here("encode", source, "--model", model, "--device", "cpu", "--output", out)
    assert done.returncode == 0, done.stderr
    return out.read_bytes()


@left_to_full(lambda p: p["stop"] == signal.SIGTERM)  # SIGINT's way; test_a_signal_during_an_import has both
@pytest.mark.parametrize("stop,code", ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130), (signal.SIGTERM, 143)))
def test_a_killed_run_goes_on_and_gives_the_same_bits(tmp_path, model, source, whole, stop, code):
    out, other, progress = (tmp_path / name for name in ("out.npy", "other.txt", "out.npy.progress"))
    arguments = ("encode", source, "--model", model, "--device", "cpu", "--output", out)
    stopped = run_program(STOPPED, int(stop), *arguments)
    assert stopped.returncode == code and "Traceback" not in stopped.stderr
    if code > 0:
        word = "interrupted" if stop == signal.SIGINT else "terminated"
        kept = f"fastbert: stopped; the same command goes on with what {out}.partial has\nfastbert: {word}\n"
        assert stopped.stderr == kept
    rows = json.loads(progress.read_text())["rows"]
    # A kill loses what was not committed, and the first chunk always is; what can be caught loses nothing.
    assert rows == 3 * CHUNK if code > 0 else rows in (CHUNK, 2 * CHUNK, 3 * CHUNK)
    assert not out.exists()
    # Of another input it is not taken up, and not lost either.
    other.write_text("the cat\n")
    error = fails("encode", other, "--model", model, "--output", out)
    assert "out.npy.partial was begun with another input" in error and "--force starts again" in error
    done = run_here(*arguments)
    assert done.returncode == 0, done.stderr
    assert f"{rows:,} of {CHUNKS * CHUNK:,} texts were encoded before" in done.stderr
    assert f"{CHUNKS * CHUNK - rows:,} texts, " in done.stderr  # and no more than those
    assert out.read_bytes() == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.txt", "out.npy"]


# Writes 4 chunks of 2 rows, each committed, in children that kill themselves before the nth call that changes a file.
# For each n a second child, which is not killed, goes on with what the first has left.
KILLED_AT_EVERY_CALL = """
import os, signal, sys
from pathlib import Path
import numpy as np
from fastbert.cli.outputs import growing_array
growing_array.COMMIT_S = 0.0
folder, names = Path(sys.argv[1]), ("open", "write", "ftruncate", "fsync", "replace")

def child(output, kill_at):
    calls = 0
    def counted(original):
        def call(*arguments):
            nonlocal calls
            if calls == kill_at:
                signal.raise_signal(signal.SIGKILL)
            calls += 1
            return original(*arguments)
        return call
    for name in names:
        setattr(os, name, counted(getattr(os, name)))
    rows = np.arange(24, dtype=np.float32).reshape(8, 3)
    with growing_array.GrowingArray.open(output, rows.shape, {"input": "a"}, False) as array:
        for first in range(array.rows, 8, 2):
            array.append(rows[first : first + 2])
        array.finish()
    return calls

def fork(output, kill_at):
    pid = os.fork()
    if pid == 0:
        os._exit(child(output, kill_at))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

moments = fork(folder / "whole.npy", -1)
for moment in range(moments):
    output = folder / f"{moment}.npy"
    assert fork(output, moment) == -signal.SIGKILL
    if not output.exists():
        assert fork(output, -1) > 0
print(moments)
"""


def test_a_kill_at_any_moment_of_writing_loses_no_file(tmp_path):
    done = run_program(KILLED_AT_EVERY_CALL, tmp_path)
    assert done.returncode == 0, done.stderr
    moments = int(done.stdout)
    assert moments >= 20
    expected = np.arange(24, dtype=np.float32).reshape(8, 3)
    for moment in [*range(moments), "whole"]:
        assert np.array_equal(np.load(tmp_path / f"{moment}.npy"), expected), moment
    # Only a kill after the file has its name leaves its note, which the next run would overwrite.
    left = {path.name for path in tmp_path.iterdir()} - {f"{moment}.npy" for moment in [*range(moments), "whole"]}
    assert left <= {f"{moment}.npy.progress" for moment in (moments - 2, moments - 1)}, left


def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path, model, source, whole):
    out = tmp_path / "out.npy"
    arguments = ("encode", source, "--model", model, "--device", "cpu", "--output", out)
    limit = 2 * CHUNK * 32 * 4 + 1000  # two chunks, and a piece of the third
    full = run_program(LIMITED, limit, *arguments)
    assert full.returncode == 2
    assert full.stderr == f"fastbert: error: [Errno 27] File too large: '{out}.partial'\n"
    assert json.loads((tmp_path / "out.npy.progress").read_text())["rows"] == 2 * CHUNK
    done = run_here(*arguments)
    assert done.returncode == 0 and "2,048 of 5,120 texts were encoded before" in done.stderr
    assert out.read_bytes() == whole and [path.name for path in tmp_path.iterdir()] == ["out.npy"]


def test_a_disk_too_full_for_anything_gets_no_file(tmp_path, model, source):
    out = tmp_path / "out.npy"
    full = run_program(LIMITED, 64, "encode", source, "--model", model, "--device", "cpu", "--output", out)
    assert full.returncode == 2
    assert full.stderr == f"fastbert: error: [Errno 27] File too large: '{out}.partial'\n"
    assert not list(tmp_path.iterdir())


def test_broken_pipe_is_silent(model):
    process = warm.Process(command("info", model), env=ENVIRONMENT)
    process.stdout.close()
    assert process.communicate(120)[1] == "" and process.returncode == 141


def shell(line: str, *arguments: object) -> subprocess.CompletedProcess:
    """The command with what a shell does to its streams."""
    words = ["sh", "-c", f'"$@" {line}', "sh", *command(*arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=300, check=False, env=ENVIRONMENT)


@pytest.mark.full  # test_what_is_printed_does_not_get_into_the_file closes them, too
def test_streams_that_are_closed_or_full(tmp_path, model):
    done = shell(">/dev/full", "info", model)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("fastbert: error: ") and done.stderr.endswith("No space left on device\n")
    assert shell(">&-", "info", model).returncode == 0
    for streams in ("2>/dev/full", "<&- >&- 2>&-"):
        done = shell(streams, "info", tmp_path / "nothing")
        assert (done.returncode, done.stdout, done.stderr) == (2, "", ""), streams


@pytest.mark.full
def test_what_is_printed_does_not_get_into_the_file(tmp_path, model, source, whole):
    """Without stdout and stderr, the next file that is opened would be number 1 or 2."""
    out = tmp_path / "out.npy"
    done = shell("<&- >&- 2>&-", "encode", source, "--model", model, "--device", "cpu", "--output", out)
    assert done.returncode == 0 and out.read_bytes() == whole
