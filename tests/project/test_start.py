"""What a process takes until its first vector beside torch's import, in what can be counted (docs/latency.md)."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections import Counter

import pytest
import safetensors
import tiny
import torch
import warm
from torch.utils._python_dispatch import TorchDispatchMode

from fastbert import SentenceEncoder

FIRST_VECTOR = """
    import gc, sys
    gc.unfreeze()  # what warm.py has frozen
    looked_at = []
    gc.callbacks.append(lambda phase, info: looked_at.append(info["generation"]) if phase == "start" else None)
    IMPORTS
    before = set(sys.modules)
    looked_at.clear()
    import fastbert
    fastbert.SentenceEncoder
    found = list(looked_at)
    assert gc.isenabled() and gc.get_freeze_count() == 0
    fastbert.SentenceEncoder(FOLDER, device="cpu").encode("the cat sat")
    new = set(sys.modules) - before
    print(*found)
    print(*sorted({name.split(".")[0] for name in new} - sys.stdlib_module_names - {"torch", "numpy"}))
    print(*sorted({name.split(".")[1] for name in new if name.startswith("fastbert.")}))
"""

ROOMS = (
    "_C backend checkpoint config data errors execution families files hub importing layer_spec layers models native"
    " ops packed_inputs packing sentences version"
)


def first_vector(folder, imports: str) -> list[str]:
    program = textwrap.dedent(FIRST_VECTOR).replace("FOLDER", repr(str(folder))).replace("IMPORTS", imports)
    command = [sys.executable, "-c", program]
    is_there = imports == "import torch"
    done = warm.run(command) if is_there else subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_a_first_vector_imports_what_it_runs_and_no_garbage_is_looked_for_meanwhile(tmp_path):
    """With torch's import the collector ran some 400 times, three times over all objects, behind it 23 times."""
    folder = tiny.write_model(tmp_path)
    collections, packages, rooms = first_vector(folder, "import torch")
    assert "2" not in collections.split() and len(collections.split()) <= 5  # before it waits, and right behind
    assert packages == "fastbert safetensors tokenizers"
    assert rooms == ROOMS
    collections, *_ = first_vector(folder, "pass")
    assert "2" not in collections.split() and len(collections.split()) <= 5


def test_what_others_froze_stays_frozen():
    program = "import gc, torch; gc.freeze(); n = gc.get_freeze_count(); import fastbert; fastbert.SentenceEncoder;"
    program += "assert gc.get_freeze_count() > n / 2 > 0; gc.disable(); fastbert.accelerate; assert not gc.isenabled()"
    done = warm.run([sys.executable, "-c", program])
    assert done.returncode == 0, done.stderr


class BytesMade(TorchDispatchMode):
    """Bytes of the copies that are made, in another dtype or not."""

    COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func in self.COPIES and made.device.type == "cpu":
            self.count += made.nbytes
        return made


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_each_weight_is_read_once_and_copied_once(tmp_path, monkeypatch, dtype):
    """Into memory of its own, in the dtype that is asked for."""
    folder, read = tiny.write_model(tmp_path), Counter()
    opened = safetensors.safe_open

    class Counted:
        def __init__(self, *arguments, **options):
            self.file = opened(*arguments, **options)

        def __enter__(self):
            self.entered = self.file.__enter__()
            return self

        def __exit__(self, *error):
            return self.file.__exit__(*error)

        def keys(self):
            return self.entered.keys()

        def metadata(self):
            return self.entered.metadata()

        def get_tensor(self, key):
            read[key] += 1
            return self.entered.get_tensor(key)

    monkeypatch.setattr(safetensors, "safe_open", Counted)
    with BytesMade() as made:
        encoder = SentenceEncoder(folder, dtype=dtype, device="cpu")
    assert set(read.values()) == {1}
    assert made.count == sum(t.nbytes for t in encoder.model.state_dict().values())
