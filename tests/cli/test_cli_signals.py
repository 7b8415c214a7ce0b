"""A signal while a command starts, and while it ends: one line at most, and no library's insides."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import warm
from command_line import ENVIRONMENT, command
from full import left_to_full


def run_from_the_first_import(program: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess:
    line = [sys.executable, "-c", program, *map(str, arguments)]
    env = {**ENVIRONMENT, **environment}
    return subprocess.run(line, capture_output=True, text=True, timeout=300, check=False, env=env)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("encoder"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("source") / "texts.txt"
    path.write_text("the cat\n")
    return path


# Modules at whose import a signal comes, by a finder of ours.
STOP_AT = """
import os, signal, sys
class Stop:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == os.environ["STOP_AT"]:
            signal.raise_signal(int(os.environ["STOP_BY"]))
sys.meta_path.insert(0, Stop)
"""


# The handlers are set before any of these imports, whatever the signal and the module.
@left_to_full(lambda p: p["module"] in ("torch.nn", "numpy", "tokenizers"))
@pytest.mark.parametrize("stop,code,said", ((signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")))
@pytest.mark.parametrize("module", ("fastbert.cli.run", "argparse", "numpy", "torch", "torch.nn", "tokenizers"))
def test_a_signal_during_an_import_is_one_line(tmp_path, model, source, module, stop, code, said):
    arguments = ["encode", source, "--model", model, "--device", "cpu", "--output", tmp_path / "out.npy"]
    entry = "import re, sys\nfrom fastbert.cli import main\nsys.exit(main())"  # as pip's script has it
    where = {"STOP_AT": module, "STOP_BY": str(int(stop))}
    done = run_from_the_first_import(f"{STOP_AT}\n{entry}", *arguments, **where)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", f"fastbert: {said}\n")
    assert not list(tmp_path.iterdir())


# They look for it by the same function, whichever import it was; torch's own takes two seconds.
@left_to_full(lambda p: p["words"] != "encode" or p["module"] == "torch")
@pytest.mark.parametrize("module", ("fastbert.cli.run", "torch"))
@pytest.mark.parametrize("words", ("encode", "fill-mask", "quantize", "info", "doctor"))
def test_a_signal_that_an_import_swallows_is_not_lost(tmp_path, model, source, words, module):
    """As some of torch's own do, in `except:`."""
    out = tmp_path / "out.npy"
    arguments = {
        "encode": (source, "--model", model, "--device", "cpu", "--output", out),
        "fill-mask": ("a [MASK]", "--model", model),
        "quantize": (model, tmp_path / "int8"),
        "info": (model,),
        "doctor": (),
    }[words]
    swallowing = STOP_AT.replace(
        '            signal.raise_signal(int(os.environ["STOP_BY"]))\n',
        "            try: signal.raise_signal(signal.SIGINT)\n            except: pass\n",
    )
    program = f"{swallowing}\nfrom fastbert.cli import main\nsys.exit(main())"
    if module == "torch":
        done = run_from_the_first_import(program, words, *arguments, STOP_AT=module)
    else:
        env = {**ENVIRONMENT, "STOP_AT": module}
        done = warm.run([sys.executable, "-c", program, words, *arguments], env=env)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "fastbert: interrupted\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("number", "said"), ((signal.SIGTERM, "terminated"), (signal.SIGINT, "interrupted")))
def test_a_signal_that_comes_out_as_another_error_is_the_signal(monkeypatch, capsys, number, said):
    """As where it meets C++ that is calling Python: that call has failed, and says so (found by the fuzzer of cli)."""
    from fastbert import cli
    from fastbert.cli import run as running

    def interrupted(arguments):
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            raise RuntimeError("a call of Python failed") from None

    monkeypatch.setattr(running, "run", interrupted)
    assert cli.main([]) == 128 + number and capsys.readouterr().err == f"fastbert: {said}\n"
    monkeypatch.setattr(running, "run", lambda arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main([])


def test_python_m_is_the_same_entry(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(STOP_AT)
    where = {"STOP_AT": "argparse", "STOP_BY": str(int(signal.SIGINT))}
    env = {**ENVIRONMENT, **where, "PYTHONPATH": f"{tmp_path}:{ENVIRONMENT['PYTHONPATH']}"}
    done = subprocess.run(command("doctor"), env=env, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "fastbert: interrupted\n")


# A second Ctrl-C, of somebody who has no patience, and one that comes while Python shuts down behind a command.
TWICE = """
from fastbert.cli import run, stopping
say = stopping.say
def interrupted(arguments): signal.raise_signal(signal.SIGINT)
run.run, stopping.say = interrupted, lambda line: (say(line), signal.raise_signal(signal.SIGINT))
"""
AT_EXIT = "import atexit\natexit.register(signal.raise_signal, signal.SIGINT)"


@pytest.mark.parametrize(("when", "said"), ((TWICE, "fastbert: interrupted\n"), (AT_EXIT, "")))
def test_a_late_ctrl_c_ends_the_process_in_silence(model, when, said):
    """Python's own way out is to print what it was doing: torch's finalizers, mostly (found by the fuzzer of cli)."""
    program = f"import signal, sys\nfrom fastbert.cli import main\n{when}\nsys.exit(main())"
    done = warm.run([sys.executable, "-c", program, "info", model], env=ENVIRONMENT)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, said)


def test_main_with_arguments_leaves_signals_as_they_were(model, capsys):
    """A caller's process goes on behind it."""
    from fastbert import cli

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert cli.main(["info", str(model)]) == 0
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
