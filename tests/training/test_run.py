"""A whole run of `fastbert finetune`: its folder, its reports, what it refuses, and how it goes on."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import transformers
import warm
import yaml
from command_line import run_here
from finetuning_runs import TEXTS, base, write_rows
from safetensors.torch import load_file
from seeds import shifted

from fastbert.errors import ConfigError
from fastbert.training.finetuning import make_task
from fastbert.training.folder import rows_of
from fastbert.training.options import FinetuneOptions, options_of, read_yaml, to_yaml
from fastbert.training.run import execute

ROWS = [{"text": text, "label": ("no", "yes")[i % 2]} for i, text in enumerate(TEXTS * 3)]
OPTIONS = "--max-length 16 --batch-size 4 --learning-rate 3e-3 --log-every 1 --seed"
FLAGS = (*OPTIONS.split(), str(shifted(3)))


@pytest.fixture
def files(tmp_path):
    held_out = write_rows(tmp_path / "eval.jsonl", ROWS[:6])
    return {"model": base(tmp_path), "train": write_rows(tmp_path / "train.jsonl", ROWS), "eval": held_out}


def finetune(files: dict[str, str], *arguments: object):
    given = [word for name, value in files.items() for word in (f"--{name}", value)]
    return run_here("finetune", *given, *FLAGS, *arguments)


def test_a_run_leaves_a_model_and_its_reports(files, tmp_path, chart):
    folder = tmp_path / "run"
    done = finetune(files, "--epochs", "2", "--output", folder, "--tensorboard")
    assert done.returncode == 0, done.stderr
    assert f"{folder} holds the model" in done.stdout and "accuracy" in done.stdout
    rows = rows_of(folder)
    assert [row["step"] for row in rows] == list(range(1, 11)) and rows[-1]["loss"] < rows[0]["loss"]
    judged = [row for row in rows if "eval_accuracy" in row]
    assert [row["step"] for row in judged] == [5, 10]  # after each epoch
    metrics = json.loads((folder / "metrics.json").read_text())
    best = max(judged, key=lambda row: row["eval_accuracy"])
    assert metrics["best_step"] == best["step"] and metrics["eval_accuracy"] == best["eval_accuracy"]
    assert metrics["steps"] == 10 and metrics["tokens"] == sum(row["tokens"] for row in rows)
    assert (folder / "chart.png").read_bytes().startswith(b"\x89PNG") and any((folder / "tensorboard").iterdir())
    card = (folder / "README.md").read_text()
    assert f"| accuracy | {best['eval_accuracy']:.4f} |" in card and "pipeline_tag: text-classification" in card
    theirs = transformers.pipeline("text-classification", str(folder))
    answers = [answer["label"] for answer in theirs([row["text"] for row in ROWS[:6]])]
    right = sum(answer == row["label"] for answer, row in zip(answers, ROWS[:6], strict=True))
    assert right / 6 == pytest.approx(metrics["eval_accuracy"])


def test_epochs_are_those_of_one_process_without_parts(files, tmp_path):
    """Five steps of 18 examples each time, although the last one has fewer than a step has parts."""
    done = finetune(files, "--epochs", "2", "--accumulation", "3", "--output", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "run")
    assert [row["epoch"] for row in rows] == [0] * 5 + [1] * 5
    assert [row["step"] for row in rows if "eval_accuracy" in row] == [5, 10]


def test_its_yaml_repeats_it(files, tmp_path):
    assert finetune(files, "--steps", "3", "--output", tmp_path / "one").returncode == 0
    done = run_here("finetune", "--config", tmp_path / "one/run.yaml", "--output", tmp_path / "two")
    assert done.returncode == 0, done.stderr
    losses = [[row["loss"] for row in rows_of(tmp_path / name)] for name in ("one", "two")]
    assert losses[0] == losses[1] and len(losses[0]) == 3
    assert (tmp_path / "one/run.yaml").read_bytes() == (tmp_path / "two/run.yaml").read_bytes()


def test_a_folder_with_a_run_is_refused_or_goes_on(files, tmp_path):
    """What goes on reads run.yaml, and does what the whole run does."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert finetune(files, "--steps", "6", "--save-every", "2", "--output", whole).returncode == 0
    assert finetune(files, "--steps", "6", "--save-every", "2", "--output", parts).returncode == 0
    refused = finetune(files, "--steps", "6", "--output", parts)
    assert refused.returncode == 2 and "holds a run already: give --resume" in refused.stderr
    changed = finetune(files, "--steps", "6", "--output", parts, "--resume", "--learning-rate", "0.5")
    assert changed.returncode == 2 and "has learning_rate 0.003, and 0.5 was given" in changed.stderr
    before = rows_of(parts)
    (parts / "checkpoints/step-000000006").rename(tmp_path / "gone")
    done = run_here("finetune", "--output", parts, "--resume")
    assert done.returncode == 0, done.stderr
    assert [row["losses"] for row in rows_of(parts)] == [row["losses"] for row in before]
    one, other = (load_file(path / "model.safetensors") for path in (parts, whole))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    nothing = run_here("finetune", "--output", tmp_path / "none", "--resume", "--model", "x")
    assert nothing.returncode == 2 and "holds no run to go on with" in nothing.stderr
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    assert "is not empty: give a new folder" in finetune(files, "--output", tmp_path / "full").stderr


def test_a_dry_run_writes_nothing(files, tmp_path):
    done = finetune(files, "--dry-run", "--output", tmp_path / "run")
    assert done.returncode == 0 and not (tmp_path / "run").exists()
    assert "[CLS]" in done.stdout and "-> " in done.stdout
    assert "the first step has 4 examples with" in done.stdout


DRY_RUN = """
    import gc, sys
    gc.unfreeze()  # what warm.py has frozen
    from fastbert.cli import main
    import fastbert.training.finetuning as finetuning

    def make_task(options, make=finetuning.make_task):
        import torch
        assert not any(thing is vars(torch) for thing in gc.get_objects()), "the collector goes through torch again"
        return make(options)

    finetuning.make_task = make_task
    code = main(sys.argv[1:])
    for name in ("torch.distributed.checkpoint", "torch.distributed.tensor", "torch._dynamo", "sympy", "matplotlib"):
        assert name not in sys.modules, name
    sys.exit(code)
"""


@pytest.mark.full
def test_what_a_dry_run_need_not_wait_for(files, tmp_path):
    """Half a second for checkpoints, as much for an optimizer, and the collector's rounds, longer than each."""
    given = [word for name, value in files.items() for word in (f"--{name}", value)]
    words = [sys.executable, "-c", textwrap.dedent(DRY_RUN), "finetune", *given, *FLAGS, "--dry-run"]
    done = warm.run([*words, "--output", str(tmp_path / "run")])
    assert done.returncode == 0, done.stderr


WHOLE_RUN = """
    import sys
    from fastbert.cli import main
    code = main(sys.argv[1:])
    assert "torch._dynamo" not in sys.modules
    sys.exit(code)
"""


@pytest.mark.full  # of AdamW in the process of the next test; LAMB has the same base class
@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_a_run_imports_no_compiler(optimizer, files, tmp_path):
    """torch's optimizers and its names for a checkpoint's entries import it, which takes half a second."""
    given = [word for name, value in files.items() for word in (f"--{name}", value)]
    words = [sys.executable, "-c", textwrap.dedent(WHOLE_RUN), "finetune", *given, *FLAGS, "--steps", "2"]
    words += ["--optimizer", optimizer, "--output", str(tmp_path / "run")]
    done = warm.run(words)
    assert done.returncode == 0, done.stderr


WITHOUT_PICTURES = "import sys\nsys.modules['matplotlib'] = None" + textwrap.dedent(WHOLE_RUN)


def test_a_run_without_anything_to_draw_with_leaves_out_the_chart(files, tmp_path):
    """A whole run, which imports no compiler either."""
    folder = tmp_path / "run"
    given = [word for name, value in files.items() for word in (f"--{name}", value)]
    words = [sys.executable, "-c", WITHOUT_PICTURES, "finetune", *given, *FLAGS, "--steps", "2"]
    words += ["--output", str(folder)]
    done = warm.run(words)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "chart" in line or "matplotlib" in line]
    assert len(said) == 1 and said[0].startswith("fastbert: warning: chart.png is left out: matplotlib"), said
    assert "pip install -e '.[train]' in a clone" in said[0]
    assert json.loads((folder / "metrics.json").read_text())["steps"] == 2
    assert not (folder / "chart.png").exists()
    assert "chart" not in done.stdout + (folder / "README.md").read_text()


def test_a_run_ends_early_and_keeps_the_best(files, tmp_path, capsys):
    """A metric that only falls: the first model stays, and the run ends after two more evaluations."""
    options = FinetuneOptions(
        model=files["model"],
        train=(files["train"],),
        eval=(files["eval"],),
        output=str(tmp_path / "run"),
        max_length=16,
        batch_size=4,
        eval_every=1,
        patience=2,
        steps=30,
    )
    scores, saved = iter([0.5, 0.4, 0.3, 0.2]), []

    def task_of(given: FinetuneOptions):
        task = make_task(given)
        task.evaluate = lambda model: {task.metric: next(scores)}
        save = task.save
        task.save = lambda model, folder: (saved.append(folder), save(model, folder))
        return task

    metrics = execute(options, task_of)
    assert (metrics["steps"], metrics["best_step"], len(saved)) == (3, 1, 1)
    assert metrics["eval_accuracy"] == 0.5
    said = capsys.readouterr()
    assert "stopped after step 3 of 30: 2 evaluations without a better one than step 1's" in said.out
    assert "3/30 [" in said.err.rpartition("\r")[2] and said.err.endswith("\n")  # the bar ends where the run did


def test_without_evaluation_data_the_last_model_is_kept(files, tmp_path):
    del files["eval"]
    done = finetune(files, "--steps", "2", "--output", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/model.safetensors").is_file()
    assert "There was no evaluation data." in (tmp_path / "run/README.md").read_text()


@pytest.mark.parametrize(
    "text,message",
    (
        ("learning_rte: 1", "which finetune does not know; did you mean learning_rate"),
        ("learning_rate: fast", "learning_rate is 'fast'; it must be a number"),
        ("batch_size: 1.5", "batch_size is 1.5; it must be a whole number"),
        ("resume: 3", "resume is 3; it must be true or false"),
        ("optimizer: sgd", "optimizer is 'sgd'; it must be one of adamw, lamb"),
        ("keep: 0", "keep is 0; it must be above 0"),
        ("epochs: 0", "steps and epochs are both 0"),
        ("- a", "holds no options"),
        ("a: [", "is no YAML"),
    ),
)
def test_options_that_do_not_fit(text, message, tmp_path):
    path = tmp_path / "options.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        options_of(FinetuneOptions, read_yaml(path), str(path))
    assert run_here("finetune", "--config", path, "--output", tmp_path / "run").returncode == 2
    assert not (tmp_path / "run").exists()


def test_yaml_has_every_option():
    options = FinetuneOptions(model="m", train=("a", "b"), learning_rate=3e-5, schedule="cosine", output="o")
    again = options_of(FinetuneOptions, {**yaml.safe_load(to_yaml(options)), "output": "o"}, "it")
    assert again == options
    assert options_of(FinetuneOptions, {"learning-rate": "3e-5", "train": "a"}, "it").learning_rate == 3e-5


def test_the_command_line_wins(tmp_path):
    path: Path = tmp_path / "options.yaml"
    path.write_text("model: nothing-here\nsteps: 2\n")
    said = run_here(
        "finetune", "--config", path, "--model", "neither-here", "--train", "a.txt", "--output", tmp_path / "r"
    )
    assert said.returncode == 2 and "neither-here" in said.stderr
