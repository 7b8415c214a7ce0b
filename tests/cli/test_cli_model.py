"""MODEL and --model: every command takes its model by either, and by one of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
from command_line import fails, run_here

from fastbert.cli.run import make_parser

TEXT = "the cat sat on the mat."
# A command, and the arguments behind its model.
COMMANDS = {
    "info": (),
    "inspect": (TEXT, "a dog"),
    "predict": ("FILE",),
    "quantize": ("OUTPUT",),
    "serve": (),
    "compare": (),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny.write_sentence_model(tmp_path_factory.mktemp("encoder"))


def parsed(*words: str) -> dict:
    return vars(make_parser().parse_args(words))


@pytest.mark.parametrize("command", COMMANDS)
def test_the_model_by_its_place_or_by_its_name(command):
    rest = COMMANDS[command]
    wanted = parsed(command, "M", *rest)
    assert wanted.get("model", wanted.get("models")) in ("M", ["M"])
    for words in (("--model", "M", *rest), (*rest, "--model=M"), (*rest, "--mod", "M")):
        if command != "compare" or words[0] == "--model":  # the last of its models would be an argument
            assert parsed(command, *words) == wanted
    output = () if command in ("quantize", "serve", "info") else ("--output", "OUT")
    assert parsed(command, "M", *output, *rest) == parsed(command, *rest, *output, "--model", "M")


@pytest.mark.parametrize("command", ("encode", "search", "rerank", "classify", "fill-mask", "finetune", "pretrain"))
def test_the_other_commands_have_the_option(command):
    wanted = ("--output", "o.npy") if command == "encode" else ()
    before = {"encode": ("f",), "classify": ("f",), "fill-mask": (TEXT,), "search": ("q", "f"), "rerank": ("q", "f")}
    assert parsed(command, *before.get(command, ()), "--model", "M", *wanted)["model"] == "M"


def test_several_models():
    assert parsed("compare", "--model", "A", "B", "--model", "C")["models"] == ["A", "B", "C"]


def test_a_run_by_the_option(folder):
    by_place, by_name = run_here("inspect", folder, TEXT), run_here("inspect", TEXT, "--model", folder)
    assert by_name.returncode == 0 and by_name.stdout == by_place.stdout
    assert run_here("info", "--model", folder).stdout == run_here("info", folder).stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_a_model_that_is_named_twice(command, folder, tmp_path):
    rest = COMMANDS[command] if command != "inspect" else (TEXT,)
    said = fails(command, folder, *rest, "--model", folder)
    if command == "inspect":  # whose texts are one or two
        assert f"TEXT is the model {folder}, and MODEL is {folder}: name one, by MODEL or by --model" in said
    else:
        surplus = rest[-1] if rest else folder
        assert f"unrecognized arguments: {surplus}; MODEL is given by --model: name it once" in said


@pytest.mark.parametrize("command", ("info", "serve", "compare", "inspect", "predict", "quantize"))
def test_a_model_that_is_missing(command):
    assert "the following arguments are required: MODEL" in fails(command)


def test_a_text_may_be_any_word(folder, tmp_path, monkeypatch):
    """That of a folder without a model, too, or one behind -- that looks like the option."""
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path)
    for text in ("docs", "{" * 5000, json.dumps({"a": 1})):
        assert run_here("inspect", folder, text).returncode == 0
    assert parsed("inspect", "M", "--", "--model")["text"] == ["--model"]
