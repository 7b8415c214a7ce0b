"""Prints what an extra of pyproject.toml asks for, one requirement a line, without what it has of fastbert's own.

    python tests/support/extras.py test

So `make test` installs it while the extension compiles, before there is a package whose extra pip could read.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib


def requirements(project: dict[str, Any], extra: str) -> Iterator[str]:
    for line in project["optional-dependencies"][extra]:
        own = re.fullmatch(rf"{re.escape(project['name'])}\[(.+)\]", line)
        if own is None:
            yield line
        else:
            for other in own[1].split(","):
                yield from requirements(project, other.strip())


if __name__ == "__main__":
    path = Path(__file__).resolve().parents[2] / "pyproject.toml"
    project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    print("\n".join(dict.fromkeys((*project["dependencies"], *requirements(project, sys.argv[1])))))
