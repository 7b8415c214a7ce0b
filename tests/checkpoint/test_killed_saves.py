"""save_pretrained that is killed at every step, twice at once, or out of disk: the folder loads as one save or the
other, without a warning, and what the dead left is removed."""

from __future__ import annotations

import fcntl
import os
import pathlib
import resource
import shutil
import signal
import warnings
from collections.abc import Callable

import pytest
import safetensors.torch
import torch
from full import left_to_full
from hf import hf_class, hf_config

from fastbert.checkpoint import saving
from fastbert.checkpoint.saving import BESIDE
from fastbert.config import EncoderConfig
from fastbert.models.auto import AutoModel, model_class

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
SMALL = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
SMALL |= {"max_position_embeddings": 8, "initializer_range": 0.5}


RUNNING: list[int] = []  # processes that were forked


def make(layers: int, **fields):
    return model_class("bert")(EncoderConfig(**{**SMALL, "num_hidden_layers": layers, **fields}))


def as_hf(model):
    theirs = hf_class("bert", "Model")(hf_config(model.config))
    theirs.load_state_dict(model.state_dict())
    return theirs


def forked(action: Callable[[], object]) -> int:
    """The pid of a process that does this and then ends, with 0 if it went well."""
    pid = os.fork()
    if pid:
        RUNNING.append(pid)
        return pid
    try:
        action()
        os._exit(0)
    finally:
        os._exit(1)


def status(pid: int) -> int:
    """What a process ended with: its exit code, or minus the signal."""
    RUNNING.remove(pid)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture(autouse=True)
def no_process_is_left():
    yield
    for pid in list(RUNNING):  # of a test that failed
        os.kill(pid, signal.SIGKILL)
        status(pid)


def save_until(model, folder, last: int) -> bool:
    """Save in a process that is killed before step `last`; whether it was, else it had fewer steps.

    A step changes the disk: a name, a sync, or a half of a file.
    """

    def run():
        count = 0

        def step():
            nonlocal count
            count += 1
            if count == last:
                os.kill(os.getpid(), signal.SIGKILL)

        def stepping(function):
            def call(*args, **kwargs):
                step()
                return function(*args, **kwargs)

            return call

        def halved(write):
            def call(first, second, *args, **kwargs):
                path = first if isinstance(first, pathlib.Path) else second
                step()
                result = write(first, second, *args, **kwargs)
                whole = path.read_bytes()
                path.write_bytes(whole[: len(whole) // 2])
                step()
                path.write_bytes(whole)
                return result

            return call

        for name in ("replace", "fsync", "mkdir", "unlink", "rmdir"):
            setattr(os, name, stepping(getattr(os, name)))
        safetensors.torch.save_file = halved(safetensors.torch.save_file)
        pathlib.Path.write_text = halved(pathlib.Path.write_text)
        model.save_pretrained(folder)

    ended = status(forked(run))
    assert ended in (0, -signal.SIGKILL)
    return ended != 0


def load(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return AutoModel.from_pretrained(folder)


def is_same(loaded, model) -> bool:
    ours, theirs = loaded.state_dict(), model.state_dict()
    entries, expected = loaded.config.to_dict(), model.config.to_dict()
    fields = ("num_hidden_layers", "hidden_dropout_prob", "id2label")
    return (
        ours.keys() == theirs.keys()
        and all(torch.equal(ours[key], theirs[key]) for key in ours)
        and all(entries[name] == expected[name] for name in fields)
    )


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


LABELS = {"id2label": {0: "x", 1: "y"}, "hidden_dropout_prob": 0.3}
# What is there before, and before how many steps a kill leaves files of two saves.
OLD = {
    "more layers": (lambda: make(3, **LABELS), 2),
    "other labels": (lambda: make(2), 2),
    "the same config": (lambda: make(2, **LABELS), 0),
    "shards of transformers": (lambda: make(3, **LABELS), 2),
    "nothing": (lambda: None, 2),
}


def found(folder, **models) -> str:
    """Which model a folder holds; "nothing" if there are no weights."""
    if not list(folder.glob("model*")):
        assert not (folder / "config.json").exists()
        return "nothing"
    loaded = load(folder)
    return next(name for name, model in models.items() if model is not None and is_same(loaded, model))


@left_to_full(lambda p: p["before"] != "more layers")  # which has all of the steps; shards are only removed
@pytest.mark.parametrize("before", OLD)
def test_killed_at_every_step(before, tmp_path):
    make_old, mixtures = OLD[before]
    old, new, third = make_old(), make(2, **LABELS), make(1, **LABELS)
    (tmp_path / "old").mkdir()
    if before == "shards of transformers":
        as_hf(old).save_pretrained(tmp_path / "old", max_shard_size="2KB")
    elif old is not None:
        old.save_pretrained(tmp_path / "old")
    new.save_pretrained(tmp_path / "new")
    outcomes: list[str] = []
    mixed, killed = 0, True
    while killed:
        folder = shutil.copytree(tmp_path / "old", tmp_path / f"{len(outcomes)}")
        killed = save_until(new, folder, len(outcomes) + 1)
        outcomes.append(found(folder, new=new, old=old))
        # A program that does not look beside, nor for a hash, sees the config.json that is there.
        config, its_own = (path / "config.json" for path in (folder, tmp_path / outcomes[-1]))
        mixed += its_own.exists() and not (config.exists() and config.read_bytes() == its_own.read_bytes())
        if len(outcomes) % 3 == 0:  # a second kill upon the first
            assert save_until(third, folder, len(outcomes) // 3 + 2)
            assert found(folder, third=third, new=new, old=old) in ("third", outcomes[-1])
        third.save_pretrained(folder)
        assert found(folder, third=third) == "third" and not list(folder.glob(f"{BESIDE}*"))
    first = "nothing" if old is None else "old"
    assert outcomes.index("new") > 9 and set(outcomes) == {first, "new"}
    assert outcomes == [first] * outcomes.index("new") + ["new"] * outcomes.count("new")
    assert mixed == mixtures


def test_saving_over_shards(tmp_path):
    """transformers, too, reads model.safetensors before an index that lies there still."""
    as_hf(make(3)).save_pretrained(tmp_path, max_shard_size="2KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    new = make(2)
    new.save_pretrained(tmp_path)
    assert is_same(load(tmp_path), new)
    theirs = hf_class("bert", "Model").from_pretrained(tmp_path)
    assert all(torch.equal(theirs.state_dict()[key], t) for key, t in new.state_dict().items())


def in_the_middle(monkeypatch, action: Callable[[], object]) -> None:
    """Do something while save_pretrained writes the weights."""
    write = safetensors.torch.save_file

    def call(*args, **kwargs):
        action()
        write(*args, **kwargs)

    monkeypatch.setattr("safetensors.torch.save_file", call)


def assert_unlocked(folder) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)


def test_two_savers_at_once(tmp_path, monkeypatch):
    """The second waits for the first, and does not remove what it is writing."""
    first, second = make(3), make(2)
    (inside, is_inside), (go, may_go) = os.pipe(), os.pipe()
    first.save_pretrained(tmp_path)
    with monkeypatch.context() as patch:
        in_the_middle(patch, lambda: (os.write(is_inside, b"x"), os.read(go, 1)))
        writer = forked(lambda: first.save_pretrained(tmp_path))
    assert os.read(inside, 1) == b"x"
    with pytest.raises(BlockingIOError):
        assert_unlocked(tmp_path)
    waiting = forked(lambda: second.save_pretrained(tmp_path))
    assert is_same(load(tmp_path), first)
    os.write(may_go, b"x")
    assert status(writer) == 0 and status(waiting) == 0
    assert is_same(load(tmp_path), second)
    assert names(tmp_path) == ["config.json", "model.safetensors"]


def test_a_process_that_was_forked_meanwhile_keeps_no_lock(tmp_path, monkeypatch):
    forks: list[int] = []
    in_the_middle(monkeypatch, lambda: forks.append(forked(signal.pause)))
    make(1).save_pretrained(tmp_path)
    assert_unlocked(tmp_path)
    os.kill(forks[0], signal.SIGKILL)
    assert status(forks[0]) == -signal.SIGKILL


def test_file_system_without_locks(tmp_path, monkeypatch):
    """Saving works; what another may be writing stays."""
    (tmp_path / f"{BESIDE}other").mkdir()
    monkeypatch.setattr(fcntl, "flock", lambda descriptor, kind: os.close(-1))  # OSError
    model = make(1)
    model.save_pretrained(tmp_path)
    assert is_same(load(tmp_path), model)
    assert names(tmp_path) == [f"{BESIDE}other", "config.json", "model.safetensors"]


def test_full_disk(tmp_path):
    """Whatever file is too large: OSError, and the old checkpoint, with nothing beside it."""
    old, new = make(1), make(2)
    old.save_pretrained(tmp_path)

    def save_large():
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        with pytest.raises(OSError, match=r"model\.safetensors cannot be written: .*File too large"):
            new.save_pretrained(tmp_path)

    assert status(forked(save_large)) == 0
    assert is_same(load(tmp_path), old) and names(tmp_path) == ["config.json", "model.safetensors"]


def test_an_interrupt_between_the_renames(tmp_path, monkeypatch):
    """An exception is not a kill: the second file is put in place all the same."""
    make(3).save_pretrained(tmp_path)
    new = make(2)
    replaced = []

    def replace(source, goal):
        os.rename(source, goal)
        replaced.append(goal)
        if len(replaced) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        new.save_pretrained(tmp_path)
    assert is_same(load(tmp_path), new) and names(tmp_path) == ["config.json", "model.safetensors"]


def test_a_save_while_another_process_loads(tmp_path, monkeypatch):
    """What is loaded is one save, though config.json and the weights are read one after the other."""
    make(3).save_pretrained(tmp_path)
    new = make(2)
    read = saving.EncoderConfig.from_dict

    def from_dict(entries):
        config = read(entries)
        monkeypatch.undo()
        new.save_pretrained(tmp_path)
        return config

    monkeypatch.setattr(saving.EncoderConfig, "from_dict", from_dict)
    assert is_same(model_class("bert").from_pretrained(tmp_path), new)
