"""ModelOutput, which a model returns. It is read by attribute, key or position, as transformers' outputs are."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from typing import Any, ClassVar

import torch

from fastbert.models.hf.bases import gets_base


class Deferred:
    """A value that is computed when it is first read: logits that a training step never looks at cost nothing.

    It is computed as it would have been at once: with the grad mode and the autocast of where it was made.
    """

    __slots__ = ("autocast", "function", "grad_mode", "inference_mode")

    def __init__(self, function: Callable[[], Any], device_type: str):
        self.function, self.grad_mode = function, torch.is_grad_enabled()
        self.inference_mode = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
        self.autocast: tuple | None = None
        if torch.amp.is_autocast_available(device_type):
            enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
            self.autocast = (device_type, dtype, enabled)

    def compute(self) -> Any:
        autocast = torch.autocast(*self.autocast) if self.autocast else nullcontext()
        with torch.inference_mode(self.inference_mode), torch.set_grad_enabled(self.grad_mode), autocast:
            return self.function()


class _Fields:
    """What a class may give, as a data class has it: sentence-transformers reads this of transformers' outputs. It is
    made when it is asked for, since that takes as many calls as the import of some modules.
    """

    def __get__(self, output: ModelOutput | None, owner: type[ModelOutput]) -> dict[str, dataclasses.Field]:
        return _fields(owner.FIELDS)


@cache  # `hasattr` and `is_dataclass` ask at each call of a model, and making it takes 0.6 ms
def _fields(names: tuple[str, ...]) -> dict[str, dataclasses.Field]:
    data_class = dataclasses.make_dataclass("", [(name, Any, dataclasses.field(default=None)) for name in names])
    return {each.name: each for each in dataclasses.fields(data_class)}


class ModelOutput(OrderedDict):
    """Fields in order, without those that are None: `out.logits`, `out["logits"]`, `out[0]`, `out[:2]`, `tuple`.

    A field that was not produced reads as None by attribute and is absent by key, as in transformers. Where
    transformers is imported, this is one of its `ModelOutput`s: all that its class would do otherwise is defined here.
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
    __dataclass_fields__: ClassVar = _Fields()

    def __init__(self, *args, **fields):
        merged = dict(*args, **fields)
        OrderedDict.__init__(self, ((name, merged[name]) for name in merged if merged[name] is not None))

    __setitem__ = OrderedDict.__setitem__
    __delitem__ = OrderedDict.__delitem__
    setdefault = OrderedDict.setdefault
    update = OrderedDict.update
    __repr__ = dict.__repr__  # which does not compute what is deferred

    def _resolve(self, name: str) -> Any:
        value = OrderedDict.__getitem__(self, name)
        if isinstance(value, Deferred):
            value = value.compute()
            self[name] = value
        return value

    def __getitem__(self, key):
        names = key if isinstance(key, str) else list(self)[key]
        return self._resolve(names) if isinstance(names, str) else tuple(self._resolve(name) for name in names)

    def __iter__(self) -> Iterator[str]:
        return OrderedDict.__iter__(self)  # defined here, so that dict(output) and f(**output) read through __getitem__

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

    def pop(self, name, *default):
        if name in self:
            self._resolve(name)
        return OrderedDict.pop(self, name, *default)

    def values(self):
        return [self._resolve(name) for name in self]

    def items(self):
        return [(name, self._resolve(name)) for name in self]

    def to_tuple(self) -> tuple:
        return tuple(self.values())

    def __reduce__(self):
        return type(self), (dict(self.items()),)


def _flatten(output: ModelOutput) -> tuple[list, tuple[str, ...]]:
    return list(dict.values(output)), tuple(output)  # what is deferred stays deferred


def _unflatten(values, names: tuple[str, ...]) -> ModelOutput:
    return ModelOutput(zip(names, values, strict=True))


# What FSDP and others that walk a module's outputs go by.
torch.utils._pytree.register_pytree_node(
    ModelOutput, _flatten, _unflatten, serialized_type_name="fastbert.models.outputs.ModelOutput"
)
gets_base(ModelOutput, "transformers.utils.generic", "ModelOutput")
