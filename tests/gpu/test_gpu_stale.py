"""Whether committed results from a GPU belong to the present kernels."""

from __future__ import annotations

import json
import subprocess

from benchmarks.gpu import stamp


def test_stale_results_name_what_changed(tmp_path):
    def write(folder: str, part: str, time: str, sources: dict, name: str | None = "NVIDIA H200"):
        path = tmp_path / folder / f"{part}.json"
        path.parent.mkdir(exist_ok=True)
        content = {"gpu": name, "time": time, "sources": sources, "kernel_hash": stamp.kernel_hash(sources)}
        path.write_text(json.dumps({"part": part, "stamp": content}))

    now = {"kernels/a.py": "1", "kernels/b.py": "2"}

    def verdict():
        return stamp.staleness(sorted(tmp_path.glob("*/*.json")), now)

    assert verdict() == (False, "no GPU results yet")
    write("cpu", "kernels", "2026-09-01", {}, name=None)
    (tmp_path / "cpu" / "results.json").write_text('{"machine": {}}')
    (tmp_path / "cpu" / "list.json").write_text("[]")
    assert verdict() == (False, "no GPU results yet")
    write("old", "kernels", "2026-01-01", {"kernels/a.py": "0"})
    write("new", "kernels", "2026-02-01", now)
    is_current, line = verdict()
    assert is_current and line.startswith("new: GPU results are those of the present kernels")
    write("new", "ops", "2026-02-02", {"kernels/a.py": "1", "kernels/b.py": "9", "kernels/c.py": "3"})
    is_current, line = verdict()
    assert not is_current and line.splitlines()[1:] == ["  ops: kernels/b.py, kernels/c.py"]


def test_only_committed_results_count(tmp_path, monkeypatch):
    for folder, name in (("one", "ops"), ("two", "ops")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.json").write_text("{}")
    monkeypatch.setattr(stamp, "ROOT", tmp_path)
    assert len(stamp.committed_results(tmp_path)) == 2  # no git here
    for command in (["init", "-q"], ["add", "one"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    assert [path.parent.name for path in stamp.committed_results(tmp_path)] == ["one"]


def test_the_hash_is_of_all_that_kernels_are_made_from(tmp_path):
    names = {name.split("/")[0] + "/" + name.split("/")[1] for name in stamp.source_hashes()}
    assert {"kernels/blocks.py", "csrc/include", "fastbert/ops"} <= names
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "a.py").write_text("1")
    first = stamp.source_hashes(tmp_path)
    (tmp_path / "kernels" / "a.py").write_text("2")
    (tmp_path / "kernels" / "notes.txt").write_text("no source")
    assert list(first) == ["kernels/a.py"] and stamp.changed_files(first, stamp.source_hashes(tmp_path)) == set(first)
    assert stamp.slug("NVIDIA H200") == "nvidia-h200"
