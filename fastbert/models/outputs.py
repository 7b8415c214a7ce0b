"""What a model returns: read by attribute, key or position, as transformers' outputs are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Deferred:
    """A value that is computed when it is first read: logits that a training step never looks at cost nothing."""

    __slots__ = ("compute",)

    def __init__(self, compute: Callable[[], Any]):
        self.compute = compute


class ModelOutput(dict):
    """Fields in order, without those that are None: `out.logits`, `out["logits"]`, `out[0]`, `out[:2]`, `tuple`.

    A field that was not produced reads as None by attribute and is absent by key, as in transformers.
    """

    FIELDS = (
        "loss",
        "last_hidden_state",
        "pooler_output",
        "logits",
        "prediction_logits",
        "seq_relationship_logits",
        "sop_logits",
        "start_logits",
        "end_logits",
        "hidden_states",
        "attentions",
    )

    def __init__(self, *args, **fields):
        merged = dict(*args, **fields)
        super().__init__((name, merged[name]) for name in merged if merged[name] is not None)

    def _resolve(self, name: str) -> Any:
        value = super().__getitem__(name)
        if isinstance(value, Deferred):
            value = value.compute()
            self[name] = value
        return value

    def __getitem__(self, key):
        return self._resolve(key) if isinstance(key, str) else self.to_tuple()[key]

    def __getattr__(self, name: str):
        if name in self:
            return self._resolve(name)
        if name in self.FIELDS:
            return None
        raise AttributeError(f"{type(self).__name__} has no field {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def get(self, name, default=None):
        return self._resolve(name) if name in self else default

    def values(self):
        return [self._resolve(name) for name in self]

    def items(self):
        return [(name, self._resolve(name)) for name in self]

    def to_tuple(self) -> tuple:
        return tuple(self.values())

    def __reduce__(self):
        return type(self), (dict(self.items()),)
