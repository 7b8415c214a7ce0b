"""Which file of the C++ extension is loaded: one that `fastbert build` has made for this torch, else the installed one.

A build in the cache is a library and a stamp, a JSON file that names it, with its hash. The stamp is written last and
in one step, so a build that was stopped leaves nothing that is found. The stamp's name has what must fit: Python,
torch and the sources. Whatever does not fit is not loaded: a damaged library can end the process.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, PathFinder
from pathlib import Path
from typing import Any, NamedTuple

from fastbert.files import move, write_text
from fastbert.native import recipe

NAME = "fastbert._C"


class Build(NamedTuple):
    path: Path
    stamp: dict[str, Any]  # empty: an older build, or one by hand


def folder() -> Path:
    """FASTBERT_CACHE, or fastbert's folder where the user's caches are."""
    if own := os.environ.get("FASTBERT_CACHE"):
        return Path(own).absolute()
    caches = os.environ.get("XDG_CACHE_HOME", "")
    return Path(caches if os.path.isabs(caches) else os.path.expanduser("~/.cache"), "fastbert")


def stamp_path(torch_version: str) -> Path:
    fits = hashlib.sha256(f"{recipe.source_hash()} {torch_version}".encode()).hexdigest()[:16]
    return folder() / f"_C-{fits}{_python()}.json"


def _python() -> str:
    return EXTENSION_SUFFIXES[0].removesuffix(".so")  # .cpython-311-x86_64-linux-gnu


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def find(torch_version: str) -> tuple[Build | None, str | None]:
    """The build in the cache that fits and is whole; if there is none, why not, and None where there never was one."""
    if not os.path.isdir(folder()):  # what most users have: the sources are not even read
        return None, None
    written = stamp_path(torch_version)
    try:
        if not written.is_file():
            others = any(folder().glob(f"_C-*{_python()}.json"))
            return None, "what `fastbert build` has made is for another torch or other sources" if others else None
        stamp = json.loads(written.read_text(encoding="utf-8"))
        path = folder() / stamp["file"]
        if _digest(path) != stamp["sha256"]:
            return None, f"{path} is damaged"
        return Build(path, stamp), None
    except (OSError, ValueError, KeyError, TypeError) as error:
        return None, f"{written} is damaged ({type(error).__name__}: {error})"


def keep(library: Path, torch_version: str) -> Build:
    """Move a library and its stamp, which were made on the same disk, to where `find` looks."""
    stamp = json.loads((library.parent / recipe.STAMP).read_text(encoding="utf-8"))
    stamp["sha256"] = _digest(library)
    written = stamp_path(torch_version)
    stamp["file"] = f"{written.stem}-{stamp['sha256'][:8]}.so"  # no other library has this name, so none is overwritten
    move(library, folder() / stamp["file"])
    write_text(written, json.dumps(stamp))
    return Build(folder() / stamp["file"], stamp)


def installed() -> Build | None:
    """The extension that came with this package, and with no other that an editable install could find."""
    spec = PathFinder.find_spec(NAME, sys.modules["fastbert"].__path__)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin)
    try:
        return Build(path, json.loads(path.with_name(recipe.STAMP).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return Build(path, {})


_loaded: list[Build] = []


def loaded() -> Build | None:
    return _loaded[0] if _loaded else None


def load() -> None:
    """Import fastbert._C. Raises ImportError with the reason, ModuleNotFoundError where there is no file."""
    if NAME in sys.modules:  # loaded, or barred from being so
        importlib.import_module(NAME)
        return
    import torch

    build, stale = find(torch.__version__)
    if build is not None:
        try:
            _load(build, torch.__version__)
            return
        except ImportError as error:
            stale = f"{build.path} does not load: {error}"
    try:
        build = installed()
        if build is None:
            raise ModuleNotFoundError(f"No module named '{NAME}'")
        _load(build, torch.__version__)
    except ImportError as error:
        raise type(error)(f"{error}; {stale}" if stale else str(error)) from error


def _load(build: Build, torch_version: str) -> None:
    target = build.stamp.get("target", "0")
    if recipe.version_pair(target) > recipe.version_pair(torch_version):
        raise ImportError(f"it was built for torch {target} and newer, here is {torch_version}")
    spec = importlib.util.spec_from_file_location(NAME, build.path, loader=ExtensionFileLoader(NAME, str(build.path)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[NAME] = module
    sys.modules["fastbert"]._C = module  # type: ignore[attr-defined]
    _loaded.append(build)
