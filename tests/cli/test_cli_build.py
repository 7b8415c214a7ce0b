"""`fastbert build`: what it makes is used, and nothing that does not fit, is damaged or half-written ever is.

What it compiles here is one small file, so that a build takes seconds; tests/project/test_packaging.py builds all.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import warm
from command_line import ENVIRONMENT, ROOT, fails, run_here

from fastbert.native import cache, recipe

RECIPE = Path(recipe.__file__)
SMALL = """
#include <Python.h>
static PyObject* isa(PyObject*, PyObject*) { return PyUnicode_FromString("avx2"); }
static PyObject* isas(PyObject*, PyObject*) { return Py_BuildValue("[s]", "avx2"); }
static PyMethodDef methods[] = {{"isa", isa, METH_NOARGS, nullptr},
                                {"isas", isas, METH_NOARGS, nullptr},
                                {"machine_isas", isas, METH_NOARGS, nullptr},
                                {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, methods};
PyMODINIT_FUNC PyInit__C() {
  PyObject* made = PyModule_Create(&module);
  PyModule_AddIntConstant(made, "small", 1);
  return made;
}
"""

# A process in which fastbert is the small one.
AS_SMALL = """
import sys
from pathlib import Path
from fastbert.native import cache, recipe
recipe.PACKAGE = Path(sys.argv.pop(1))
recipe.__file__ = str(recipe.PACKAGE / "native" / "recipe.py")
cache.installed = lambda: None
"""
COMMAND = AS_SMALL + "from fastbert.cli import main\nsys.exit(main(sys.argv[1:]))"
ERROR = AS_SMALL + "from fastbert.native.availability import extension_error\nprint(extension_error())"
DOCTOR = AS_SMALL + "from fastbert.cli import doctor\ncache.load()\nprint(doctor._extension_file())"
LIMITED = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n" + COMMAND


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation without an extension, with the sources of a small one, and an empty cache beside it."""
    package = folder / "fastbert"
    (package / "native").mkdir(parents=True)
    (package / "native" / "recipe.py").write_bytes(RECIPE.read_bytes())
    (package / "csrc").mkdir()
    (package / "csrc" / "bindings.cpp").write_text(SMALL)
    monkeypatch.setattr(recipe, "PACKAGE", package)
    monkeypatch.setattr(recipe, "__file__", str(package / "native" / "recipe.py"))
    monkeypatch.setenv("FASTBERT_CACHE", str(folder / "cache"))
    return package


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    return install(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def cache_with_a_build(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as monkeypatch:
        install(folder, monkeypatch)
        done = run_here("build")
        build, stale = cache.find(torch.__version__)
    assert done.returncode == 0 and build is not None and stale is None, done.stderr
    first, last = done.stderr.splitlines()
    assert first == "fastbert: compiling the C++ kernels, which takes a few minutes"
    assert last.startswith("fastbert: with the C++ kernels for the CPU") and last.endswith(f" -> {build.path}")
    return folder / "cache"


@pytest.fixture
def built(package, cache_with_a_build) -> cache.Build:
    shutil.copytree(cache_with_a_build, package.with_name("cache"))
    build, _ = cache.find(torch.__version__)
    assert build is not None
    return build


def start(program: str, package: Path, *arguments: str, **environment: str) -> warm.Process:
    env = {**ENVIRONMENT, "FASTBERT_CACHE": os.environ["FASTBERT_CACHE"], **environment}
    env.pop("FASTBERT_ISA", None)  # the small one has no kernels to hold down
    return warm.Process([sys.executable, "-c", program, str(package), *arguments], env=env)


def finish(process: warm.Process) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def kept(package: Path) -> set[str]:
    """The kinds of files that are in the cache."""
    return {path.suffix or path.name for path in package.with_name("cache").iterdir()}


def test_what_is_built_is_used_until_something_changes(package, built):
    assert finish(start(ERROR, package)) == (0, "None\n", "")
    code, said, _ = finish(start(DOCTOR, package))
    assert code == 0 and str(built.path) in said and f"built against torch {torch.__version__}, for 2.11" in said
    assert built.stamp["compiler"] in said and "changed since" not in said
    before = built.path.stat().st_mtime_ns
    done = run_here("build")
    assert done.returncode == 0 and done.stderr == f"fastbert: {built.path} is there already; --force builds it anew\n"
    assert built.path.stat().st_mtime_ns == before
    # Another torch, other sources: neither is loaded.
    assert cache.find("2.99.0")[0] is None
    (package / "csrc" / "bindings.cpp").write_text(SMALL + "// changed\n")
    build, stale = cache.find(torch.__version__)
    assert build is None and stale == "what `fastbert build` has made is for another torch or other sources"
    assert stale in finish(start(ERROR, package))[1]


@pytest.mark.full  # a build's way is that of the first one
def test_force_builds_anew(package, built):
    before = built.path.stat().st_mtime_ns
    assert run_here("build", "--force").returncode == 0
    assert cache.find(torch.__version__)[0].path.stat().st_mtime_ns > before


@pytest.mark.full  # what is another is looked for in one place
def test_another_compiler_builds_anew(package, built):
    written = cache.stamp_path(torch.__version__)
    written.write_text(json.dumps({**built.stamp, "compiler": "g++ 1.0"}))
    done = run_here("build")
    assert done.returncode == 0 and "is there already" not in done.stderr
    assert json.loads(written.read_text())["compiler"] == recipe.compiler_version()


@pytest.mark.full  # each kind of damage compiles anew
def test_what_is_damaged_is_not_loaded(package, built):
    """A library that is cut off can end the process that loads it."""
    written, library, stamp = cache.stamp_path(torch.__version__), built.path.read_bytes(), json.dumps(built.stamp)
    stripped = {name: value for name, value in built.stamp.items() if name != "file"}
    for library_is, stamp_is, reason in (
        (library[: len(library) // 2], stamp, f"{built.path} is damaged"),
        (library[:-1] + b"\1", stamp, f"{built.path} is damaged"),
        (None, stamp, f"{written} is damaged (FileNotFoundError: "),
        (library, stamp[:30], f"{written} is damaged (JSONDecodeError: "),
        (library, "", f"{written} is damaged (JSONDecodeError: "),
        (library, "[]", f"{written} is damaged (TypeError: "),
        (library, json.dumps(stripped), f"{written} is damaged (KeyError: 'file')"),
    ):
        written.write_text(stamp_is)
        built.path.unlink(missing_ok=True)
        if library_is is not None:
            built.path.write_bytes(library_is)
        build, stale = cache.find(torch.__version__)
        assert build is None and stale is not None and stale.startswith(reason)
    built.path.write_bytes(library[: len(library) // 2])
    written.write_text(stamp)
    missing = f"the C++ extension is not built (No module named 'fastbert._C'; {built.path} is damaged)\n"
    assert finish(start(ERROR, package)) == (0, missing, "")
    assert run_here("build").returncode == 0 and cache.find(torch.__version__)[0] is not None


def test_a_file_for_a_newer_torch_is_not_loaded(package, built):
    cache.stamp_path(torch.__version__).write_text(json.dumps({**built.stamp, "target": "99.1"}))
    code, said, _ = finish(start(ERROR, package))
    assert code == 0 and said.count("\n") == 1
    assert f"does not load: it was built for torch 99.1 and newer, here is {torch.__version__})" in said


@pytest.mark.full  # both make the same names, each in one step
def test_two_builds_at_once(package):
    assert [finish(each)[0] for each in [start(COMMAND, package, "build") for _ in range(2)]] == [0, 0]
    assert kept(package) == {".so", ".json"}
    assert finish(start(ERROR, package)) == (0, "None\n", "")


@pytest.mark.full  # test_cli_stops has a command that is stopped
@pytest.mark.parametrize("stop,code,said", ((signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")))
def test_a_build_that_is_stopped_leaves_nothing(package, tmp_path, stop, code, said):
    compiler, started = tmp_path / "compiler", tmp_path / "started"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *bindings*) echo $$ > {started}; sleep 600;; esac\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    process = start(
        f"import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n{COMMAND}",
        package,
        "build",
        CXX=str(compiler),
    )
    while not (started.exists() and started.read_text()):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(stop)
    returned, _, err = finish(process)
    assert (returned, err.splitlines()[1:]) == (code, [f"fastbert: {said}"])
    assert kept(package) == set() and cache.find(torch.__version__) == (None, None)
    state = Path(f"/proc/{started.read_text().strip()}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] in "ZX"


@pytest.mark.full  # where there is no compiler the same line is printed, by the same function
def test_a_build_that_fails_is_one_line(package, tmp_path):
    source = package / "csrc" / "bindings.cpp"
    source.write_text("#error this is no machine for it\n")
    done = run_here("build")
    _, line = done.stderr.splitlines()
    assert done.returncode == 2
    assert "the C++ extension did not compile" in line and "error: #error this is no machine for it" in line
    assert line.endswith(f"; {tmp_path / 'cache' / 'build.log'} has what the compiler said")
    assert "bindings.cpp" in (tmp_path / "cache" / "build.log").read_text() and kept(package) == {".log"}
    source.write_text(f"extern int nowhere();\nint asked = nowhere();\n{SMALL}")
    line = run_here("build").stderr.splitlines()[-1]
    assert "it was built, but does not load (" in line and "undefined symbol" in line
    source.write_text(f"static int ends = (__builtin_trap(), 0);\n{SMALL}")
    line = run_here("build").stderr.splitlines()[-1]
    assert "it was built, but ends the process that loads it (signal " in line  # SIGILL or SIGTRAP, by the processor
    assert kept(package) == {".log"}


@pytest.mark.full  # the way of a build that fails
def test_a_full_disk_is_one_line(package):
    code, _, err = finish(start(LIMITED, package, "build"))
    assert code == 2 and "Traceback" not in err, err
    _, line = err.splitlines()
    assert "the C++ extension did not compile: " in line and ("File too large" in line or "File size limit" in line)
    assert kept(package) <= {".log"}


def test_where_nothing_can_be_built_or_written(package, tmp_path):
    (tmp_path / "file").write_text("")
    assert "Not a directory" in fails("build", FASTBERT_CACHE=str(tmp_path / "file" / "cache"))
    assert cache.find(torch.__version__) == (None, None)
    said = fails("build", CXX="/nonexistent/c++")
    assert said == "fastbert: error: there is no C++ compiler (/nonexistent/c++; CXX names another)\n"


NVCC = "#!/bin/sh\necho 'Cuda compilation tools, {}'\n"


@pytest.mark.parametrize(
    "says,reason",
    (
        (None, "there is no nvcc; CUDA_HOME says where it is"),
        ("none of it", "/bin/nvcc does not tell its version"),
        ("release 12.4, V12.4.1", "nvcc is 12.4, the kernels need 12.8"),
        ("release 12.9, V12.9.1", "nvcc is 12.9, torch is built with CUDA 13.0"),
        ("release 13.1, V13.1.0", None),
    ),
)
def test_an_nvcc_that_does_not_fit(tmp_path, monkeypatch, says, reason):
    nvcc = tmp_path / "bin" / "nvcc"
    if says is not None:
        nvcc.parent.mkdir()
        nvcc.write_text(NVCC.format(says))
        nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("FASTBERT_BUILD_CUDA", "auto")
    found = recipe.cuda_unsupported()
    assert found == reason or (found is not None and reason is not None and found.endswith(reason))
    assert recipe.cuda_choice()[0] == (reason is None)
    if reason is not None:
        monkeypatch.setenv("FASTBERT_BUILD_CUDA", "1")
        with pytest.raises(SystemExit, match="FASTBERT_BUILD_CUDA=1: "):
            recipe.cuda_choice()


def test_torch_is_told_of_the_toolkit_before_it_looks(tmp_path):
    """nvcc on PATH may be a script, which knows where its toolkit is."""
    (tmp_path / "nvcc").write_text(f"#!/bin/sh\necho '#$ TOP={tmp_path}' >&2\n")
    (tmp_path / "nvcc").chmod(0o755)
    program = """
import os, sys
from fastbert.native import recipe
class Look:
    def find_spec(name, path=None, target=None):
        if name == "torch.utils.cpp_extension":
            print(os.environ.get("CUDA_HOME"))
sys.meta_path.insert(0, Look)
recipe.build_command()
"""
    env = {key: value for key, value in ENVIRONMENT.items() if key not in ("CUDA_HOME", "CUDA_PATH")}
    env["PATH"] = f"{tmp_path}{os.pathsep}{env['PATH']}"
    done = warm.run([sys.executable, "-c", program], env=env)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}\n"), done.stderr


def test_where_the_cache_is(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    at_home = "/home/somebody/.cache/fastbert"
    of_caches = (("/caches", "/caches/fastbert"), ("relative", at_home), ("", at_home))
    for own, caches, expected in (("/mine", "/caches", "/mine"), *(("", *pair) for pair in of_caches)):
        monkeypatch.setenv("FASTBERT_CACHE", own)
        monkeypatch.setenv("XDG_CACHE_HOME", caches)
        assert cache.folder() == Path(expected)


def test_nothing_is_hashed_where_nothing_was_built(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTBERT_CACHE", str(tmp_path / "none"))
    monkeypatch.setattr(recipe, "source_hash", lambda: pytest.fail("the sources were read"))
    assert cache.find(torch.__version__) == (None, None)
    assert (ROOT / "csrc").is_dir()
