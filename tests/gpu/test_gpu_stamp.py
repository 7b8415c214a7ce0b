"""What a result from a GPU says of its sources."""

from __future__ import annotations

from benchmarks.gpu import stamp


def test_the_hash_is_of_all_that_kernels_are_made_from(tmp_path):
    names = {name.split("/")[0] + "/" + name.split("/")[1] for name in stamp.source_hashes()}
    assert {"kernels/blocks.py", "csrc/include", "fastbert/ops"} <= names
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "a.py").write_text("1")
    first = stamp.source_hashes(tmp_path)
    (tmp_path / "kernels" / "a.py").write_text("2")
    (tmp_path / "kernels" / "notes.txt").write_text("no source")
    second = stamp.source_hashes(tmp_path)
    assert list(first) == list(second) == ["kernels/a.py"] and stamp.kernel_hash(first) != stamp.kernel_hash(second)
    assert stamp.slug("NVIDIA H200") == "nvidia-h200"
