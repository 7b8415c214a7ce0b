"""Builds the C++ extension `fastbert._C`; everything else about the package stands in pyproject.toml.

Without a compiler, without torch, or when compiling fails, the package still installs, in pure Python. One line says
what was chosen and why. There is no network access, no submodule and no query of a device.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
spec = importlib.util.spec_from_file_location("recipe", ROOT / "fastbert" / "native" / "recipe.py")
recipe = importlib.util.module_from_spec(spec)
spec.loader.exec_module(recipe)

unsupported = recipe.unsupported()


class BuildPython(build_py):
    def run(self):
        super().run()
        if not self.editable_mode:  # `fastbert build` compiles them
            shipped = Path(self.build_lib, "fastbert", "csrc")
            shutil.rmtree(shipped, ignore_errors=True)
            shutil.copytree(ROOT / "csrc", shipped)
        if unsupported is not None:
            if os.environ.get("FASTBERT_BUILD_CUDA") == "1":
                raise SystemExit(f"FASTBERT_BUILD_CUDA=1: {unsupported}")
            recipe.say(f"pure Python, because {unsupported}; once it is mended, `fastbert build` makes the C++ kernels")


commands, extensions = {"build_py": BuildPython}, []
# pip asks for the metadata first, which need no torch: to import it takes three seconds.
if unsupported is None and "dist_info" not in sys.argv:
    commands["build_ext"] = recipe.build_command()
    extensions.append(recipe.extension(with_cuda=False))  # the command adds the CUDA part where it builds

# The license stands here: setuptools before 77, beside which torch is often installed, cannot read its present form in
# pyproject.toml, and newer ones will reject the older form.
setup(license="Apache-2.0", ext_modules=extensions, cmdclass=commands)
