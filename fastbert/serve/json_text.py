"""JSON by orjson where it is installed, otherwise by the standard library, with the same values."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

import numpy as np

try:
    import orjson
except ImportError:
    orjson = None  # type: ignore[assignment]

# Of JSON that is right, each escape of a surrogate in turn, or of a backslash: what follows it is none. `lone`: the
# half of a pair without the other.
_ESCAPES = re.compile(r"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(?P<lone>u[dD][89a-fA-F]..)|\\)")


class MadeJson(bytes):
    """The JSON of a value, which stands for it in an answer (answers.as_json)."""


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
        text = body.decode()
        value = json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    _check_surrogates(text)
    return value


def json_type(value: Any) -> str:
    """What JSON calls a value that was read."""
    names = {str: "text", bool: "truth value", int: "number", float: "number", list: "list"}
    return "null" if value is None else "an object" if isinstance(value, dict) else f"a {names[type(value)]}"


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


def _check_surrogates(text: str) -> None:
    """Raises ValueError, in orjson's words, for an escape that stands for no character."""
    for escape in _ESCAPES.finditer(text):
        if escape["lone"]:
            is_low = escape["lone"][2] in "cdefCDEF"
            follows = text.startswith("\\u", escape.end())
            said = "invalid high" if is_low else "invalid low" if follows else "no low"
            raise json.JSONDecodeError(f"{said} surrogate in string", text, escape.start())


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
