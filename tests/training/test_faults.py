"""What goes wrong in a run: it ends with a message and an exit code, and the last good checkpoint stays."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import shutil
import signal
import threading

import pytest
import torch
from finetuning_runs import TEXTS, base, write_rows
from full import left_to_full
from half_a_batch import HalfABatch
from safetensors.torch import load_file
from training_runs import OPTIONS, losses_of, make_loop, make_model, steps_in, until

from fastbert.errors import CheckpointError, TrainingError
from fastbert.training.finetuning import make_task
from fastbert.training.options import FinetuneOptions
from fastbert.training.run import execute


@left_to_full(lambda p: p["name"] == "SIGINT")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_the_run_after_a_checkpoint(name, tmp_path):
    """Its last step is logged and saved, and the run goes on from there with the same bits."""
    make_loop(tmp_path / "whole", until(12, log_every=1, save_every=0), model=make_model(0.1)).run()
    loop = make_loop(tmp_path / "cut", until(12, log_every=7), model=make_model(0.1))
    loop.on_step = lambda tokens: loop.state.step == 9 and signal.raise_signal(signal.Signals[name])
    came: list[int] = []
    before = signal.signal(signal.Signals[name], lambda number, frame: came.append(number))
    try:
        said = f"{name}: stopped after step 10, which is saved"
        with pytest.warns(UserWarning, match=said), pytest.raises(KeyboardInterrupt):
            loop.run()
    finally:
        signal.signal(signal.Signals[name], before)
    assert came == [signal.Signals[name]] and steps_in(tmp_path / "cut") == [8, 10]
    assert len(losses_of(tmp_path / "cut")) == 10
    second = make_loop(tmp_path / "cut", until(12), model=make_model(0.1))
    assert second.resume() and second.state.step == 10
    second.run()
    assert losses_of(tmp_path / "cut") == losses_of(tmp_path / "whole")


def test_a_signal_in_a_thread_is_not_asked_for(tmp_path):
    """Handlers are the main thread's; a run in another one goes on."""
    loop = make_loop(tmp_path, until(2))
    thread = threading.Thread(target=loop.run)
    thread.start()
    thread.join()
    assert steps_in(tmp_path) == [2]


def spoil_weights(loop) -> None:
    with torch.no_grad():
        next(loop.model.parameters())[5] = float("nan")


def test_a_loss_that_is_no_number_stops_the_run(tmp_path):
    loop = make_loop(tmp_path, until(8))
    loop.run()
    spoil_weights(loop)
    loop.options = dataclasses.replace(OPTIONS, save_every=3)
    with pytest.raises(
        TrainingError, match=r"loss of step 9 is not a number; the last good checkpoint is .*step-000000008"
    ):
        loop.run()
    assert steps_in(tmp_path) == [4, 8]


@left_to_full(lambda p: p["how"] == "evaluated")  # looked at as before saving
@pytest.mark.parametrize("how", ["saved", "evaluated", "last"])
def test_weights_that_are_no_numbers_are_never_saved(how, tmp_path):
    """A step spoils them whose own loss was a number: the checkpoint that is due at once must not be written."""
    options = until(8 if how == "last" else 12, save_every=4, log_every=100)
    if how == "evaluated":
        options = dataclasses.replace(options, evaluate_every=7, save_every=4)
    loop, judged = make_loop(tmp_path, options), []
    loop.evaluate = (lambda: judged.append(1) or {}) if how == "evaluated" else None
    at = {"saved": 8, "evaluated": 7, "last": 8}[how]
    loop.on_step = lambda tokens: loop.state.step == at and spoil_weights(loop)
    with pytest.raises(TrainingError, match=rf"step {at} has made weights that are not numbers; .*step-000000004"):
        loop.run()
    assert steps_in(tmp_path) == [4] and not judged


def test_a_step_that_fails_loses_no_checkpoint(tmp_path):
    """The one that is being written then: a GPU without memory raises RuntimeError, too."""
    loop = make_loop(tmp_path, until(8, save_every=2))
    inner = loop.task.backward

    def backward(*args):
        if loop.state.step == 2:
            raise RuntimeError("no memory is left")
        return inner(*args)

    loop.task.backward = backward
    with pytest.raises(RuntimeError, match="no memory is left"):
        loop.run()
    assert steps_in(tmp_path) == [2]


@pytest.mark.parametrize("when", ["while it makes a batch", "while a batch is read from it"])
def test_a_worker_that_dies(when, tmp_path):
    loop = make_loop(tmp_path, until(12, workers=1, save_every=2))
    inner = loop.task.collate
    dying = {"while it makes a batch": Dying, "while a batch is read from it": DyingLater}[when]
    loop.task.collate = lambda phase: dying(inner(phase))
    with pytest.raises(TrainingError, match=r"a process that makes batches was killed.*Fewer workers"):
        loop.run()


class Dying:
    """A collator that the kernel kills in its third batch."""

    def __init__(self, inner):
        self.inner, self.calls = inner, 0

    def __call__(self, examples):
        self.calls += 1
        if self.calls == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.inner(examples)


class DyingLater(Dying):
    """Its third batch ends in the middle, as the reader sees it."""

    def __call__(self, examples):
        self.calls += 1
        return HalfABatch() if self.calls == 3 else self.inner(examples)


@pytest.fixture
def file_limit():
    """A function that lets no file of this process grow beyond so many bytes, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def limit_after(loop, step: int, limit) -> None:
    """A limit from the log's row of a step on, when what was saved before is on the disk."""

    def on_log(row) -> None:
        if row["step"] == step:
            loop.checkpoints.finish()
            limit()

    loop.on_log = on_log


@left_to_full(lambda p: p["size"] == 200_000)  # as 150,000
@pytest.mark.parametrize("size", (50_000, 150_000, 200_000))  # where it is full goes by the sizes of what is written
def test_a_full_disk(tmp_path, file_limit, size):
    """The shard of the second checkpoint does not fit; what was written of it goes, for the disk needs the room."""
    loop = make_loop(tmp_path, until(12, save_every=2, log_every=1))
    limit_after(loop, 3, lambda: file_limit(size))
    said = r"the checkpoint of step 4 could not be written: .*File too large; .*step-000000002 is the last one"
    with pytest.raises(CheckpointError, match=said):
        loop.run()
    assert os.listdir(tmp_path / "checkpoints") == ["step-000000002"]
    assert make_loop(tmp_path).resume()


def test_a_full_disk_at_the_end(tmp_path, file_limit):
    """The last checkpoint is written while the chart is drawn, and the run still says that it failed."""
    loop = make_loop(tmp_path, until(8))
    limit_after(loop, 6, lambda: file_limit(200_000))
    said = r"the checkpoint of step 8 could not be written: .*File too large; .*step-000000004 is the last one"
    with pytest.raises(CheckpointError, match=said):
        loop.run()
    assert os.listdir(tmp_path / "checkpoints") == ["step-000000004"]


def test_an_end_that_fails_leaves_the_last_checkpoint(tmp_path):
    loop = make_loop(tmp_path)
    loop.at_end = lambda: (tmp_path / "no/folder").write_text("")
    with pytest.raises(FileNotFoundError):
        loop.run()
    assert steps_in(tmp_path) == [8, 12] and make_loop(tmp_path).resume()


def test_a_log_that_cannot_be_written(tmp_path, file_limit):
    """Half a row of it remains, which a run that goes on leaves out."""
    loop, log = make_loop(tmp_path, until(12, save_every=2, log_every=1)), tmp_path / "log.jsonl"
    limit_after(loop, 3, lambda: file_limit(log.stat().st_size + 20))
    with pytest.raises(TrainingError, match=r"log.jsonl: File too large; the last good checkpoint is .*step-000000002"):
        loop.run()
    assert len(log.read_text(encoding="utf-8").splitlines()) == 4
    file_limit(-1)
    loop = make_loop(tmp_path)
    assert loop.resume() and loop.state.step == 2 and len(losses_of(tmp_path)) == 2


def test_a_model_that_cannot_be_written(tmp_path, file_limit):
    """The disk is full when all steps are done: the last checkpoint is there, and --resume writes the model."""
    rows = [{"text": text, "label": ("no", "yes")[i % 2]} for i, text in enumerate(TEXTS)]
    given = {"model": base(tmp_path), "train": (write_rows(tmp_path / "train.jsonl", rows),), "steps": 2}
    given |= {"batch_size": 4, "max_length": 16, "output": str(tmp_path / "run")}

    def make_full(options):
        task = make_task(options)
        save = task.save

        def save_on_a_full_disk(model, folder):
            file_limit(1000)
            save(model, folder)

        task.save = save_on_a_full_disk
        return task

    with pytest.raises(OSError, match=r"File too large|I/O error"):
        execute(FinetuneOptions(**given), make_full)
    assert steps_in(tmp_path / "run") == [2] and not (tmp_path / "run/model.safetensors").exists()
    file_limit(-1)
    execute(FinetuneOptions(**given, resume=True), make_task)
    whole = load_file(tmp_path / "run/model.safetensors")
    execute(FinetuneOptions(**{**given, "output": str(tmp_path / "other")}), make_task)
    other = load_file(tmp_path / "other/model.safetensors")
    assert all(torch.equal(whole[name], other[name]) for name in other)


@left_to_full(lambda p: p["damage"] in ("half", "metadata", "sums"))  # a file that is gone, or is not what was written
@pytest.mark.parametrize("damage", ["bit", "half", "gone", "metadata", "sums"])
def test_a_damaged_checkpoint(damage, tmp_path):
    """A wrong bit among the weights, which torch does not see; the older checkpoint is named, and works."""
    make_loop(tmp_path, until(8)).run()
    last = tmp_path / "checkpoints/step-000000008"
    shard = last / "__0_0.distcp"
    data = bytearray(shard.read_bytes())
    if damage == "bit":
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
    elif damage == "half":
        shard.write_bytes(data[: len(data) // 2])
    else:
        {"gone": shard, "metadata": last / ".metadata", "sums": last / "checksums-0.json"}[damage].unlink()
    name = {"metadata": ".metadata", "sums": "checksums-0.json"}.get(damage, "__0_0.distcp")
    with pytest.raises(
        CheckpointError, match=rf"step-000000008 cannot be read: .*{name}.*; to go on from step-000000004, remove"
    ):
        make_loop(tmp_path).resume()
    assert steps_in(tmp_path) == [4, 8]
    last.rename(tmp_path / "away")
    loop = make_loop(tmp_path)
    assert loop.resume() and loop.state.step == 4


def test_data_that_changed_since(tmp_path):
    """In mid-epoch a run cannot go on with other examples; what it would skip is not what it has seen."""
    make_loop(tmp_path, until(2, save_every=2)).run()
    loop = make_loop(tmp_path)
    assert loop.resume() and loop.state.epoch_step == 2
    loop.task.corpus = dataclasses.replace(loop.task.corpus, documents=loop.task.corpus.documents[:-1])
    with pytest.raises(TrainingError, match="training data are not those of the checkpoint of step 2"):
        loop.run()


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_its_log_anew(tmp_path):
    make_loop(tmp_path).run()
    shutil.rmtree(tmp_path / "checkpoints")
    loop = make_loop(tmp_path)
    assert not loop.resume()
    loop.run()
    steps = [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps))
