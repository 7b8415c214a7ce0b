"""One compiled file for every torch: what it asks of libtorch is C, and known to the oldest that is supported."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from fastbert.native import recipe

ROOT = Path(__file__).parents[2]

# The stable ABI and what it is made of. aoti_torch has C functions; ATen, c10 and torch/library.h are C++.
STABLE = ("torch/csrc/stable/", "torch/csrc/inductor/aoti_torch/", "torch/headeronly/")


def imported_symbols(library: Path) -> list[str]:
    """Names, demangled, that the library takes from others."""
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("there is no nm")
    listed = subprocess.run([nm, "-D", "-u", "-C", str(library)], capture_output=True, text=True, check=True).stdout
    return [line.strip().removeprefix("U ").removeprefix("w ").strip() for line in listed.splitlines()]


def test_no_cpp_of_torch_is_imported():
    """Its C++ has other names, or other layouts under the same names, with each release."""
    from fastbert import _C

    names = imported_symbols(Path(_C.__file__))
    of_torch = [name for name in names if re.search(r"\b(at|c10|torch|caffe2)::", name)]
    assert of_torch == []
    assert len([name for name in names if re.match("(aoti_)?torch_", name)]) > 20  # they were read


def test_only_stable_headers_are_included():
    for path in recipe.sources():
        for header in re.findall(r"#include <((?:torch|ATen|c10)/[^>]+)>", path.read_text()):
            assert header.startswith(STABLE), f"{path}: {header}"


def test_no_openmp_runtime_is_linked():
    """torch's own serves; a second one would be vendored into every wheel, and its threads fight torch's."""
    from fastbert import _C

    assert [name for name in imported_symbols(Path(_C.__file__)) if re.match("(GOMP|omp|__kmpc)_", name)] == []
