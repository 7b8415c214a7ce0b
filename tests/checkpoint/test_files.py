"""What is written whole or not at all: killed at any step, by several at once, where an error comes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from fastbert import files

STEPS = ("open", "fsync", "replace", "unlink")  # of os: each changes the disk


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
    assert last > 4 and found == {"old", "new" * 1000}


@pytest.mark.parametrize("has_locks", (True, False))
def test_writers_do_not_meet(has_locks, tmp_path, monkeypatch):
    """Two of one path at once, on file systems without locks, too: what is there is one's or the other's, whole."""
    if not has_locks:
        monkeypatch.setattr(files, "_lock", lambda descriptor: False)
    path = tmp_path / "a"
    with files.writing(path) as first:
        first.write_text("first")
        with files.writing(path) as second:
            assert second.read_text() == "" and second != first
            second.write_text("second")
        assert path.read_text() == "second" and first.read_text() == "first"
    assert path.read_text() == "first" and list(tmp_path.iterdir()) == [path]


def test_a_forked_process_does_not_keep_what_is_done(tmp_path):
    path = tmp_path / "a"
    with files.writing(path) as new:
        pid = os.fork()
        if pid == 0:
            signal.pause()  # it has the descriptor of the lock
    try:
        assert not new.exists()
        files.write_text(path, "next")
        assert path.read_text() == "next" and list(tmp_path.iterdir()) == [path]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_an_error_leaves_what_was_there(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), files.writing(path) as new:
        new.write_text("new")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    for named in (tmp_path / "none" / "b", tmp_path / "folder"):
        (tmp_path / "folder").mkdir(exist_ok=True)
        with pytest.raises(OSError) as raised:
            files.write_text(named, "text")
        assert raised.value.filename == str(named) and raised.value.filename2 is None
    assert sorted(left.name for left in tmp_path.iterdir()) == ["a", "folder"]


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
