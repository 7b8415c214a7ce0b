"""The package as users get it: a checkout, an sdist, wheels from it with and without a compiler, an isolated build."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

import pytest
import torch
from checkout import copy_checkout

from fastbert.native import recipe
from fastbert.native.availability import extension_error

ROOT = Path(__file__).parents[2]

CHECK = """
import importlib.util
import fastbert, fastbert.ops
assert fastbert.__file__.startswith({home!r}), fastbert.__file__
spec = importlib.util.find_spec("fastbert.kernels.layer_norm")
assert spec is not None and spec.origin.startswith({home!r}), spec
kernels = importlib.util.find_spec("kernels")
assert kernels is None or not (kernels.origin or "").startswith({home!r}), "the name belongs to another package"
import runpy
runpy.run_path({program!r})["main"]({built})
"""

# What pip's `fastbert` script does, and `python -m fastbert`.
COMMAND_LINE = """
import runpy, sys
from importlib.metadata import distribution
(script,) = (e for e in distribution("fastbert-kernels").entry_points if e.group == "console_scripts")
main = script.load()
assert script.name == "fastbert" and sys.modules[main.__module__].__file__.startswith({home!r})
for command in ("doctor", "encode", "fill-mask", "quantize", "info", "build", "bench"):
    try:
        assert main([command] if command == "doctor" else [command, "--help"]) == 0
    except SystemExit as stop:
        assert stop.code == 0, command
sys.argv = ["fastbert", "--version"]
runpy.run_module("fastbert", run_name="__main__", alter_sys=True)
"""


def run(command: list[str], cwd: Path, **environment: str) -> str:
    env = {**{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, **environment}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout + done.stderr


def check(home: Path, cwd: Path, built: bool) -> None:
    program = CHECK.format(home=str(home), built=built, program=str(ROOT / "tests" / "support" / "installed.py"))
    run([sys.executable, "-c", program], cwd, PYTHONPATH=str(home))


def check_wheel(home: Path, checkout: Path) -> None:
    """Every module of the package is in the wheel, the sources of its kernels are, and its command line runs."""
    for source, target in (
        (checkout / "fastbert", home / "fastbert"),
        (checkout / "kernels", home / "fastbert/kernels"),
    ):
        for path in (*source.rglob("*.py"), *source.rglob("*.pyi"), *source.rglob("py.typed")):
            assert (target / path.relative_to(source)).is_file(), path
    assert load_recipe(home).source_hash() == recipe.source_hash()
    said = run([sys.executable, "-c", COMMAND_LINE.format(home=str(home))], home, PYTHONPATH=str(home))
    assert "Which backend serves each operation" in said and "fastbert quantize all-MiniLM-L6-v2" in said


def load_recipe(folder: Path) -> ModuleType:
    return load(folder / "fastbert" / "native" / "recipe.py")


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def unzip(wheel: Path, target: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("checkout")
    copy_checkout(target)
    return target


@pytest.fixture(scope="module")
def sdist(checkout, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    run([sys.executable, "-m", "build", "--sdist", "--no-isolation", "-o", str(out)], checkout)
    (archive,) = out.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(out, filter="data")
    (folder,) = (p for p in out.iterdir() if p.is_dir())
    return folder


@pytest.mark.full  # as what the sdist holds runs, below
def test_a_checkout_runs_uninstalled(checkout, tmp_path):
    check(checkout, tmp_path, built=False)


@pytest.mark.full  # files of a release, which nightly runs make
def test_the_sdist_holds_the_sources_and_runs_in_place(sdist, tmp_path):
    for name in (
        "build_backend.py",
        "csrc/bindings.cpp",
        "csrc/include/philox.h",
        "kernels/layer_norm.py",
        "fastbert/kernels/__init__.py",
    ):
        assert (sdist / name).is_file(), name
    check(sdist, tmp_path, built=False)


@pytest.mark.full  # a second build of the extension, two minutes on one core
def test_a_wheel_from_the_sdist_has_the_kernels(checkout, sdist, tmp_path):
    log = run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(tmp_path)], sdist)
    assert any(line.startswith("fastbert: with the C++ kernels") for line in log.splitlines()), log[-2000:]
    (wheel,) = tmp_path.glob("*.whl")
    home = unzip(wheel, tmp_path / "unzipped")
    assert not (home / "kernels").exists()
    check(home, tmp_path, built=True)
    check_wheel(home, checkout)


@pytest.mark.full  # test_cli_build.py has the reasons
def test_a_cuda_part_that_cannot_be_built_is_refused_with_the_reason(tmp_path):
    command = [sys.executable, recipe.__file__, str(tmp_path)]
    for asked, reason in (
        ("1", "FASTBERT_BUILD_CUDA=1: torch .* is built without CUDA"),
        ("yes", "FASTBERT_BUILD_CUDA='yes': valid values are auto, 0 and 1"),
    ):
        if asked == "1" and torch.version.cuda is not None:
            continue
        environment = {**os.environ, "FASTBERT_BUILD_CUDA": asked}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 1 and re.search(reason, done.stderr), done.stderr


@pytest.mark.full  # CXX=none; test_imports has an installation without kernels
def test_without_a_compiler_the_wheel_is_pure_python_and_works(checkout, sdist, tmp_path):
    copy = tmp_path / "source"
    shutil.copytree(sdist, copy, ignore=shutil.ignore_patterns("build"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(tmp_path)]
    log = run(command, copy, CXX="/nonexistent/c++", CC="/nonexistent/cc")
    assert any(line.startswith("fastbert: ") and "pure Python" in line for line in log.splitlines()), log[-2000:]
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    home = unzip(wheel, tmp_path / "unzipped")
    check(home, tmp_path, built=False)
    check_wheel(home, checkout)


@pytest.mark.full  # `make test` runs on such an install
def test_an_editable_install_is_a_path(sdist, tmp_path):
    """Which type checkers and editors follow, as they do no import hook."""
    copy, program = tmp_path / "source", "import sys, build_backend; build_backend.build_editable(sys.argv[1])"
    shutil.copytree(sdist, copy, ignore=shutil.ignore_patterns("build"))
    run([sys.executable, "-c", program, str(tmp_path)], copy, CXX="/nonexistent/c++", CC="/nonexistent/cc")
    (wheel,) = tmp_path.glob("*.whl")
    (path,) = unzip(wheel, tmp_path / "unzipped").glob("*.pth")
    assert path.read_text(encoding="utf-8").strip() == str(copy)


@pytest.mark.full  # fastbert build shows it, too
def test_what_does_not_compile_leaves_no_library(sdist, tmp_path):
    """An earlier build's would pass for this one's, in the wheel and beside the sources."""
    copy = tmp_path / "source"
    shutil.copytree(sdist, copy, ignore=shutil.ignore_patterns("build", "csrc"))
    (copy / "csrc").mkdir()
    (copy / "csrc" / "broken.cpp").write_text("#error broken\n")
    name = f"_C{EXTENSION_SUFFIXES[0]}"
    for folder, where in ((copy / "fastbert", ["--inplace"]), (copy / "out" / "fastbert", ["--build-lib", "out"])):
        folder.mkdir(parents=True, exist_ok=True)
        for left in (name, recipe.STAMP):
            (folder / left).write_text("earlier")
        log = run([sys.executable, "setup.py", "build_ext", *where], copy)
        assert "fastbert: pure Python, because the C++ extension did not compile (" in log
        assert not [path.name for path in folder.glob("_C*")]


def test_what_an_isolated_build_asks_for(monkeypatch, tmp_path):
    """torch only where there is a compiler, and no torch that is new enough in the environment that installs."""
    backend = load(ROOT / "build_backend.py")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(backend.recipe, "site_folders", lambda: [str(tmp_path)])
    monkeypatch.setattr(backend.recipe, "compiler", lambda: None)
    assert backend.get_requires_for_build_wheel() == backend.get_requires_for_build_sdist() == []
    monkeypatch.setattr(backend.recipe, "compiler", lambda: ["c++"])
    for version, asks in ((None, True), ("2.10.1+cu128", True), ("2.11.0", False), ("3.0", False)):
        sys.path[:] = [str(tmp_path / "isolated")]
        if version is not None:
            (tmp_path / "torch-0.dist-info").mkdir(exist_ok=True)
            (tmp_path / "torch-0.dist-info" / "METADATA").write_text(f"Name: torch\nVersion: {version}\n")
        assert ("torch>=2.11" in backend.get_requires_for_build_editable()) == asks, version
        assert (str(tmp_path) in sys.path) == (not asks)  # where setup.py's `import torch` then finds it


@pytest.mark.full  # installs a torch
def test_an_isolated_build_has_the_kernels(sdist, tmp_path):
    copy = tmp_path / "source"
    shutil.copytree(sdist, copy, ignore=shutil.ignore_patterns("build", "csrc"))
    (copy / "csrc").mkdir()
    small = '#include <Python.h>\nPyMODINIT_FUNC PyInit__C() { return PyModule_New("_C"); }\n'
    (copy / "csrc" / "small.cpp").write_text(small)
    constraints = str(ROOT / "constraints.txt")
    environment = {"PIP_CONSTRAINT": constraints, "PIP_BUILD_CONSTRAINT": constraints}
    command = [sys.executable, "-m", "build", "--wheel", "-o", str(tmp_path)]
    log = run(command, copy, **environment)
    assert any(line.startswith("fastbert: with the C++ kernels") for line in log.splitlines()), log[-2000:]
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"fastbert/_C{EXTENSION_SUFFIXES[0]}", f"fastbert/{recipe.STAMP}", "fastbert/csrc/small.cpp"} <= {*names}


def check_cpu_kernels(*flags: str) -> None:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    for source in sorted(ROOT.glob("csrc/cpu/*.cpp")):
        run([compiler, "-std=c++17", "-fsyntax-only", "-fno-math-errno", *flags, str(source)], ROOT)


ISAS = ["generic", "avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx"]
BEST = """
#include <cstdio>
#include "include/isa.h"
int main() { std::puts(fastbert::kIsaNames[static_cast<int>(fastbert::best_isa())]); }
"""


@pytest.mark.skipif(extension_error() is not None or platform.machine() != "x86_64", reason="needs kernels for x86")
def test_a_checkout_is_built_for_its_own_processor(tmp_path, monkeypatch):
    """What it lacks is left out, and what is left out is never chosen."""
    from fastbert import _C

    lacking = recipe.lacking_isas()
    assert sorted([*_C.machine_isas(), *lacking]) == sorted(ISAS)
    flags = recipe.extension(False, lacking).extra_compile_args
    assert [f for f in flags if "WITHOUT" in f] == [f"-DFASTBERT_WITHOUT_{isa.upper()}" for isa in lacking]
    best, program = _C.machine_isas()[-1], tmp_path / "best"
    if best != "generic":
        (tmp_path / "best.cpp").write_text(BEST)
        flags = ["-std=c++17", f"-I{ROOT / 'csrc'}", f"-DFASTBERT_WITHOUT_{best.upper()}"]
        run([*(recipe.compiler() or ()), *flags, str(tmp_path / "best.cpp"), "-o", str(program)], tmp_path)
        assert run([str(program)], tmp_path).strip() == _C.machine_isas()[-2]
    monkeypatch.setenv("CXX", "false")  # a machine that cannot be asked gets all
    assert recipe.lacking_isas() == []


@pytest.mark.full  # two builds
def test_a_wheel_is_built_for_every_processor(sdist, tmp_path):
    copy = tmp_path / "source"
    shutil.copytree(sdist, copy, ignore=shutil.ignore_patterns("build", "csrc"))
    (copy / "csrc" / "include").mkdir(parents=True)
    for name in ("isa.h", "inline.h"):
        shutil.copy(ROOT / "csrc" / "include" / name, copy / "csrc" / "include")
    (copy / "csrc" / "small.cpp").write_text("#include <Python.h>\nPyMODINIT_FUNC PyInit__C() { return nullptr; }\n")
    left_out = {}
    for kind in ("wheel", "editable"):
        program = f"import sys, build_backend; build_backend.build_{kind}(sys.argv[1])"
        log = run([sys.executable, "-c", program, str(tmp_path)], copy)
        left_out[kind] = sorted({*re.findall("-DFASTBERT_WITHOUT_([A-Z0-9_]+)", log)})
    assert left_out == {"wheel": [], "editable": sorted(isa.upper() for isa in recipe.lacking_isas())}


@pytest.mark.full  # the build of every checkout shows one of them
@pytest.mark.parametrize("best", range(len(ISAS) - 1))
def test_the_kernels_compile_without_the_wider_instruction_sets(best):
    check_cpu_kernels(*(f"-DFASTBERT_WITHOUT_{isa.upper()}" for isa in ISAS[best + 1 :]))


@pytest.mark.full  # the wheels' builds show it, too
def test_the_cpu_kernels_are_cpp17():
    """torch before 2.13 builds extensions as that; the one here may build them as something newer."""
    check_cpu_kernels()


def test_pybind11_is_read_where_torch_closes_it(tmp_path):
    """torch 2.11 closes pybind11's headers, too, to those who build for its stable ABI: nothing was compiled there."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    (tmp_path / "pybind11").mkdir()
    for name in ("pybind11.h", "stl.h"):
        (tmp_path / "pybind11" / name).write_text("#ifdef TORCH_TARGET_VERSION\n#error closed\n#endif\n")
    source = tmp_path / "small.cpp"
    source.write_text('#include "include/pybind.h"\nstatic_assert(TORCH_TARGET_VERSION == 7);\n')
    flags = ["-DTORCH_TARGET_VERSION=7", f"-I{tmp_path}", f"-I{ROOT / 'csrc'}"]
    run([compiler, "-std=c++17", "-fsyntax-only", *flags, str(source)], ROOT)
    including = [p.name for p in ROOT.glob("csrc/**/*.*") if "#include <pybind11/" in p.read_text(encoding="utf-8")]
    assert including == ["pybind.h"]


X86_HEADERS = ("cpuid.h", "emmintrin.h", "immintrin.h")
# Every other header first: the C library's must still know which machine this is. What is not in a header is poisoned.
NO_X86 = """
#undef __x86_64__
#pragma GCC poison asm __asm __asm__ __builtin_cpu_init __builtin_cpu_supports __builtin_cpu_is
#define target(...) not on this machine
"""


@pytest.mark.full  # as does a build for aarch64
def test_the_generic_kernels_need_no_x86(tmp_path):
    """Compiled as for another machine: whatever only an x86 has must stand behind __x86_64__."""
    paths = [p for p in ROOT.glob("csrc/**/*.*") if p.parent.name in ("cpu", "include") and p.name != "pybind.h"]
    sources = [p.read_text() for p in paths]
    included = {name for text in sources for name in re.findall("^#include <(.*)>", text, re.MULTILINE)}
    assert included.issuperset(X86_HEADERS)
    for header in X86_HEADERS:
        (tmp_path / header).write_text("#error only an x86 has this header\n")
    prelude = tmp_path / "prelude.h"
    prelude.write_text(
        "".join(f"#include <{name}>\n" for name in sorted(included - {*X86_HEADERS, "arm_neon.h"})) + NO_X86
    )
    check_cpu_kernels("-I", str(tmp_path), "-include", str(prelude))
