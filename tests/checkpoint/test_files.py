"""What is written whole or not at all: killed at any step, in several processes at once, where an error comes."""

from __future__ import annotations

import os
import platform
import signal
import threading
from pathlib import Path

import pytest

from fastbert import files

STEPS = ("open", "ftruncate", "fsync", "replace", "unlink")  # of os: each changes the disk


def write_until(path: Path, text: str, last: int) -> int:
    """In a process that is killed before step `last`: how it ended."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    count = 0

    def stepping(function):
        def call(*arguments, **options):
            nonlocal count
            count += 1
            if count == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    for name in STEPS:
        setattr(os, name, stepping(getattr(os, name)))
    files.write_text(path, text)
    os._exit(0)


def test_killed_at_every_step(tmp_path):
    """Old or new, never a piece; and the next writer leaves nothing of it behind."""
    path, last, found = tmp_path / "a.json", 1, set()
    while True:
        path.write_text("old")
        ended = write_until(path, "new" * 1000, last)
        found.add(path.read_text())
        assert path.read_text() in ("old", "new" * 1000)
        files.write_text(path, "next")
        assert path.read_text() == "next" and list(tmp_path.iterdir()) == [path]
        if ended == 0:
            break
        assert ended == -signal.SIGKILL
        last += 1
    assert last > 5 and found == {"old", "new" * 1000}


def test_writers_wait_for_each_other(tmp_path):
    """The second begins with an empty file, not with what the first has given its name meanwhile."""
    path, order = tmp_path / "a", []

    def second():
        with files.writing(path) as new:
            order.append(("second", new.read_text(), path.read_text()))
            new.write_text("second")

    with files.writing(path) as new:
        thread = threading.Thread(target=second)
        thread.start()
        new.write_text("first")
        thread.join(0.2)
        assert thread.is_alive() and not order and not path.exists()
    thread.join()
    assert order == [("second", "", "first")] and path.read_text() == "second" and list(tmp_path.iterdir()) == [path]


def test_an_error_leaves_what_was_there(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), files.writing(path) as new:
        new.write_text("new")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    (tmp_path / f".b.{platform.node()}.partial").mkdir()
    with pytest.raises(OSError) as raised:
        files.write_text(tmp_path / "b", "text")
    assert not (tmp_path / "b").exists() and "b" in str(raised.value)
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match=r"folder'"):
        files.write_text(tmp_path / "folder", "text")
    assert not [left for left in tmp_path.iterdir() if left.name.startswith(".folder")]


def test_a_new_file_has_the_rights_that_others_have(tmp_path):
    (tmp_path / "plain").write_text("")
    files.write_text(tmp_path / "a", "")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_folder_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    new = tmp_path / "new"
    (new / "below").mkdir(parents=True)
    for name in ("a", "below/b"):
        (new / name).write_text(name)
    synced, sync, replace = [], files.sync, os.replace
    monkeypatch.setattr(files, "sync", lambda path: (synced.append(path), sync(path)))
    monkeypatch.setattr(os, "replace", lambda *both: (synced.append("replace"), replace(*both)))
    files.move(new, tmp_path / "named")
    at = synced.index("replace")
    assert set(synced[:at]) == {new, new / "a", new / "below", new / "below/b"} and synced[at + 1 :] == [tmp_path]
    assert (tmp_path / "named/below/b").read_text() == "below/b" and not new.exists()
