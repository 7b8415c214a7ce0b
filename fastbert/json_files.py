"""JSON of files that users may have edited: one clear error for whatever is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json(path: Path, error: type[ValueError], expected: type = dict) -> Any:
    """A JSON object, or list. Raises `error`, naming the file, where it is absent, damaged or not that."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise error(f"{path} does not exist") from None
    except (OSError, ValueError) as reason:  # ValueError: a path that cannot be one
        raise error(f"{path} cannot be read: {reason}") from None
    return parse_json(content, path, error, expected)


def parse_json(content: bytes | str, source: Any, error: type[ValueError], expected: type = dict) -> Any:
    """A JSON object, or list, from its text. Raises `error`, naming its `source`, for anything else."""
    try:
        entries = json.loads(content if isinstance(content, str) else content.decode("utf-8"))
    except ValueError as reason:  # of JSON, of UTF-8, and of an integer of thousands of digits
        raise error(f"{source} is not valid JSON: {reason}") from None
    except RecursionError:
        raise error(f"{source} is not valid JSON: its brackets are nested too deeply") from None
    if not isinstance(entries, expected):
        raise error(f"{source} holds a {type(entries).__name__}, not a {expected.__name__}")
    return entries
