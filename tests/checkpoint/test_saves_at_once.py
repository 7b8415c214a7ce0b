"""A folder that others save into while it is read or saved: none gets an error, or files of two saves, or waits in
silence. Kills are in test_killed_saves.py."""

from __future__ import annotations

import fcntl
import os

import pytest
from test_killed_saves import is_same, load, make

from fastbert.checkpoint import pretrained, saving
from fastbert.errors import ConfigError


@pytest.fixture
def after_the_metadata(monkeypatch):
    """Does something when the metadata of weights has been read, for once: another process may do it just then."""

    def then(action):
        read = saving.read_metadata

        def read_metadata(folder):
            metadata = read(folder)
            monkeypatch.undo()
            action()
            return metadata

        monkeypatch.setattr(saving, "read_metadata", read_metadata)

    return then


def test_another_process_saves_before_the_config_is_read(tmp_path, after_the_metadata):
    """Other layers: the metadata of one save and the config of the other contradict each other."""
    old, new = make(3), make(2)
    old.save_pretrained(tmp_path)
    after_the_metadata(lambda: new.save_pretrained(tmp_path))
    assert is_same(load(tmp_path), new)
    old.save_pretrained(tmp_path)
    after_the_metadata(lambda: new.save_pretrained(tmp_path))
    assert pretrained.read_config(tmp_path).num_hidden_layers == 2


def test_another_process_saves_other_labels_before_the_config_is_read(tmp_path, after_the_metadata):
    """Of the same shapes: no error, but the config alone is of one save, too."""
    make(2).save_pretrained(tmp_path)
    after_the_metadata(lambda: make(2, id2label={0: "x", 1: "y"}).save_pretrained(tmp_path))
    assert pretrained.read_config(tmp_path).id2label == {0: "x", 1: "y"}


def test_another_process_saves_for_the_first_time(tmp_path, monkeypatch):
    """The folder was empty when it was looked at."""
    new, read = make(2), saving.EncoderConfig.from_file

    def from_file(path):
        try:
            return read(path)
        except ConfigError:
            monkeypatch.undo()
            new.save_pretrained(tmp_path)
            raise

    monkeypatch.setattr(saving.EncoderConfig, "from_file", from_file)
    assert is_same(load(tmp_path), new)


def test_an_error_of_the_folder_is_raised(tmp_path):
    make(2).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    for read in (load, pretrained.read_config):
        with pytest.raises(ConfigError, match=r"config\.json is not valid JSON"):
            read(tmp_path)


def test_a_saver_says_what_it_waits_for(tmp_path, monkeypatch):
    model, lock = make(1), fcntl.flock
    holder = os.open(tmp_path, os.O_RDONLY)
    lock(holder, fcntl.LOCK_EX)

    def flock(descriptor, kind):
        if kind == fcntl.LOCK_EX:  # the call that waits
            os.close(holder)
        lock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.warns(UserWarning, match=f"waiting until another process has saved into {tmp_path}") as said:
        model.save_pretrained(tmp_path)
    assert len(said) == 1 and said[0].filename == __file__
    assert is_same(load(tmp_path), model)
