"""setuptools' build backend, and what an isolated build needs on top: torch's headers, where they can be used.

pip builds in an environment of its own. Where a C++ compiler is there and the environment that installs has no torch
yet, that one gets a torch; setup.py finds one that is there already. Without a compiler nothing is fetched.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  (the hooks that stay as they are)

spec = importlib.util.spec_from_file_location(
    "recipe", Path(__file__).resolve().parent / "fastbert" / "native" / "recipe.py"
)
recipe = importlib.util.module_from_spec(spec)
spec.loader.exec_module(recipe)


def get_requires_for_build_sdist(config_settings=None):
    return []


def get_requires_for_build_wheel(config_settings=None):
    if recipe.os.name == "nt" or recipe.compiler() is None:
        return []
    torch = [] if recipe.torch_is_there() else [f"torch>={recipe.dotted(recipe.OLDEST_TORCH)}"]
    return [*torch, *([] if shutil.which("ninja") else ["ninja"])]


get_requires_for_build_editable = get_requires_for_build_wheel


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    """A plain path: type checkers and editors do not follow the import hook that setuptools would install."""
    settings = {"editable_mode": "compat", **(config_settings or {})}
    return build_meta.build_editable(wheel_directory, settings, metadata_directory)
