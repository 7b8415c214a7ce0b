"""The kinds of fields that a family's config.json may have: each with its default, and what it must be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MAX_FLOAT32 = 3.4028234663852886e38

# transformers' names of activations, and ours.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True)
class Flag:
    """True or false, or None where that is the default."""

    default: bool | None

    def unsupported(self, value: Any) -> str | None:
        return None if type(value) is bool or value is self.default else "it must be true or false"


@dataclass(frozen=True)
class Share:
    """A number of at least 0 and below 1: a dropout."""

    default: float

    def unsupported(self, value: Any) -> str | None:
        return None if is_number(value) and 0.0 <= value < 1.0 else "it must be at least 0 and below 1"


@dataclass(frozen=True)
class Number:
    """A number above `low` that float32 holds."""

    default: float
    low: float = 0.0

    def unsupported(self, value: Any) -> str | None:
        fits = is_number(value) and self.low < value <= MAX_FLOAT32
        return None if fits else f"it must be a number above {self.low} that float32 holds"


@dataclass(frozen=True)
class Count:
    """An integer from `low` to `high`, or None where that is the default."""

    default: int | None
    low: int = 1
    high: int = 2**31 - 1

    def unsupported(self, value: Any) -> str | None:
        if value is None and self.default is None:
            return None
        fits = type(value) is int and self.low <= value <= self.high
        return None if fits else f"it must be an integer from {self.low} to {self.high}"


@dataclass(frozen=True)
class Choice:
    """One of some names."""

    default: str
    values: tuple[str, ...]

    def unsupported(self, value: Any) -> str | None:
        return None if value in self.values else f"it must be one of: {', '.join(self.values)}"


@dataclass(frozen=True)
class ActivationName:
    """A name that transformers has for an activation, and we, too."""

    default: str

    def unsupported(self, value: Any) -> str | None:
        is_known = isinstance(value, str) and value in ACTIVATIONS
        return None if is_known else f"it must be one of: {', '.join(ACTIVATIONS)}"


@dataclass(frozen=True)
class Structure:
    """A list or a dictionary, which the family's own functions read and check."""

    default: Any = None

    def unsupported(self, value: Any) -> str | None:
        return None


Field = Flag | Share | Number | Count | Choice | ActivationName | Structure
