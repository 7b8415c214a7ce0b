"""Whether a GPU's code, and what runs it without a GPU, is what it was when `make simulated` was last green.

python tests/support/simulated.py            exits with 0 where it is
python tests/support/simulated.py --stamp    writes down that it is green now
"""

from __future__ import annotations

import hashlib
import re
import sys

from built import ROOT
from facts import LAUNCHING, files_of

STAMP = ROOT / "tests" / "gpu" / "simulated.txt"
SOURCES = (
    "kernels/*.py",
    LAUNCHING,
    "fastbert/ops/seeds.py",
    "fastbert/cuda_graphs/*.py",
    "fastbert/training/flat.py",
    "fastbert/training/train_step.py",
    "fastbert/training/optimizers.py",
    "fastbert/training/graphed/*.py",
    "fastbert/training/finetuning/*.py",
    "fastbert/training/pretraining/*.py",
    "benchmarks/gpu/**/*.py",
    "fastbert/testing/reference.py",
    "csrc/cuda/*",
    "csrc/ops/cuda/*",
    "csrc/include/*",
    "tests/gpu/*.py",
    "tests/support/*.h",
    "tests/support/cuda_*",
    "tests/support/interpreted_like_a_gpu.py",
)


def simulating() -> set:
    """The test files that have simulated tests."""
    marked = re.compile(r"mark\.simulated|left_to_simulated")
    return {path for path in ROOT.glob("tests/*/test_*.py") if marked.search(path.read_text(encoding="utf-8"))}


def sources() -> str:
    digest = hashlib.sha256()
    for path in sorted({*files_of(SOURCES), *simulating()}):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def main() -> int:
    now = sources()
    if sys.argv[1:] == ["--stamp"]:
        STAMP.write_text(now + "\n", encoding="utf-8")
        return 0
    if STAMP.is_file() and STAMP.read_text(encoding="utf-8").strip() == now:
        sys.stdout.write("a GPU's code is that of the last green run of `make simulated`: nothing to run\n")
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
