"""Rows on standard output: whole lines after Ctrl-C, and a sentence where it is closed."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import time

import pytest
from command_line import ENVIRONMENT

from fastbert import cli

# Writes rows into a pipe that is too small for one, and gets a signal while it waits for the reader.
INTERRUPTED = """
import os, signal, sys, threading
from fastbert import cli
from fastbert.cli import classify, outputs
def write_rows(arguments):
    with outputs.open_rows(outputs.STDOUT) as rows:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        rows.write({"text": ["x" * 1_000_000] * 3})
    return 0
classify.run = write_rows
sys.argv[1:] = ["classify", "-", "--model", "a", "--output", "-"]
sys.exit(cli.main())
"""


@pytest.mark.parametrize("unbuffered", ("", "1"))
def test_ctrl_c_leaves_whole_lines(unbuffered):
    words, environment = [sys.executable, "-c", INTERRUPTED], {**ENVIRONMENT, "PYTHONUNBUFFERED": unbuffered}
    pipe = subprocess.PIPE
    process = subprocess.Popen(words, bufsize=0, stdout=pipe, stderr=pipe, env=environment)
    first = process.stdout.read(1)
    time.sleep(0.3)
    rest, said = process.communicate(timeout=60)
    assert process.returncode == 130 and said == b"fastbert: interrupted\n"
    lines = (first + rest).splitlines(keepends=True)
    assert len(lines) == 1 and lines[0].endswith(b"\n") and json.loads(lines[0]) == {"text": "x" * 1_000_000}


@pytest.mark.parametrize("words", (("encode",), ("search", "a cat"), ("classify",)))
def test_a_closed_standard_output_is_one_line(words, tmp_path):
    said = io.StringIO()
    with contextlib.redirect_stdout(None), contextlib.redirect_stderr(said):
        code = cli.main([*words, "-", "--model", str(tmp_path), "--output", "-"])
    assert (code, said.getvalue()) == (2, "fastbert: error: --output -: standard output is closed\n")
