"""What messages to users share: how to install what is missing, and which name was probably meant."""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Iterable


def install(extra: str) -> str:
    """The command that installs an extra of pyproject.toml. It names the clone: no index need have fastbert."""
    return f"pip install -e '.[{extra}]' in a clone of fastbert"


def absent(*modules: str) -> list[str]:
    """Those that are not installed; none is imported. A name has no dots."""
    return [module for module in modules if importlib.util.find_spec(module) is None]


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """The nearest of the known names, as it is written there, or None. "--max-steps" gives "--steps": a name whose
    words all stand in the given one goes before one that is spelt alike; hyphens and underscores are the same.
    """
    words = {_normal(entry): entry for entry in known}
    wanted = _normal(name)
    if wanted in words:
        return words[wanted]
    inside = [entry for entry in words if set(entry.split("-")) <= set(wanted.split("-"))]
    if inside:
        return words[max(inside, key=len)]
    close = difflib.get_close_matches(wanted, words, n=1)
    around = [entry for entry in words if set(wanted.split("-")) <= set(entry.split("-"))]
    nearest = close or sorted(around, key=len)[:1]
    return words[nearest[0]] if nearest else None


def _normal(name: str) -> str:
    return re.sub(r"[-_]+", "-", name).strip("-").lower()
