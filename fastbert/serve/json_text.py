"""JSON by orjson where it is installed, otherwise by the standard library, with the same values."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

import numpy as np

try:
    import orjson
except ImportError:
    orjson = None  # type: ignore[assignment]


def dumps(content: Any) -> bytes:
    """The JSON of lists, objects and NumPy's arrays and numbers. A float32 has as few digits as tell it from its
    neighbours; what is not finite is null.
    """
    if orjson is not None:
        return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
    text = json.dumps(_plain(content), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def loads(body: bytes) -> Any:
    """The value of a body in UTF-8. Raises ValueError: it is not JSON."""
    if orjson is not None:
        return orjson.loads(body)
    try:
        return json.loads(body.decode(), parse_constant=_no_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def kind(value: Any) -> str:
    """What JSON calls a value that was read."""
    kinds = {str: "text", bool: "truth value", int: "number", float: "number", list: "list"}
    return "null" if value is None else "an object" if isinstance(value, dict) else f"a {kinds[type(value)]}"


def _plain(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _plain(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_plain(value) for value in content]
    if isinstance(content, np.ndarray):
        return [_plain(value) for value in content]
    if isinstance(content, np.floating):
        content = float(str(content))
    elif isinstance(content, np.generic):
        content = content.item()
    return None if isinstance(content, float) and not math.isfinite(content) else content


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
