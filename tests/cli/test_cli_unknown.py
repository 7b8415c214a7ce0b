"""Options and keys that are not there: one line with the nearest that is."""

from __future__ import annotations

import pytest
from command_line import fails, run_here

from fastbert.errors import ConfigError
from fastbert.messages import did_you_mean
from fastbert.training.options import FinetuneOptions, PretrainOptions, options_of


@pytest.mark.parametrize(
    "command,option,meant",
    [
        ("finetune", "--num_train_epochs", "--epochs"),
        ("finetune", "--per_device_train_batch_size", "--batch-size"),
        ("pretrain", "--max-train-steps", "--steps"),
        ("predict", "--output_dir", "--output"),
        ("serve", "--http-port", "--port"),
    ],
)
def test_an_option_that_has_a_longer_name_elsewhere(command, option, meant):
    done = run_here(command, f"{option}=5")
    assert done.returncode == 2
    said = f"unrecognized arguments: {option}; did you mean {meant}? (`fastbert {command} --help` explains)"
    assert done.stderr == f"fastbert: error: {said}\n"


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("finetune", "--max-steps", "3"), "--steps"),
        (("finetune", "--max-steps=3"), "--steps"),
        (("encode", "--modl", "x"), "--model"),  # of which the next error would be that --model is missing
        (("search", "--topk", "3", "query", "file", "--model", "m"), "--top"),
        (("--versin",), "--version"),
    ],
)
def test_an_option_that_is_misspelt(words, meant):
    wrong = next(word for word in words if word[:2] == "--").partition("=")[0]
    assert f"unrecognized arguments: {wrong}; did you mean {meant}? (`fastbert" in fails(*words)


def test_an_option_like_no_other():
    done = run_here("doctor", "--zzzzqqqq")
    assert done.stderr == "fastbert: error: unrecognized arguments: --zzzzqqqq (`fastbert doctor --help` explains)\n"


@pytest.mark.parametrize("cls", [FinetuneOptions, PretrainOptions])
def test_an_unknown_key_of_a_file_names_the_nearest(cls):
    with pytest.raises(
        ConfigError, match=r"^run\.yaml has 'max_steps', which \w+ does not know; did you mean steps\?$"
    ):
        options_of(cls, {"max_steps": 3}, "run.yaml")
    with pytest.raises(ConfigError, match=r"'zzzzqqqq', which .* it knows .*steps"):
        options_of(cls, {"zzzzqqqq": 3}, "run.yaml")


@pytest.mark.parametrize(
    "given,meant",
    [
        ("learning_rate", "--learning-rate"),
        ("--num_train_epochs", "--epochs"),
        ("--output_dir", "--output"),
        ("--per-device-train-batch-size", "--batch-size"),
        ("--ouptut", "--output"),
        ("--rate", "--learning-rate"),
        ("--qqqq", None),
    ],
)
def test_the_nearest(given, meant):
    known = ["--output", "--epochs", "--batch-size", "--learning-rate", "--train"]
    assert did_you_mean(given, known) == meant
