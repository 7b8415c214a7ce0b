"""fastbert.status(model): what runs fast, how often it did, and the last reason why not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from fastbert.acceleration.forward import Forward, counted
from fastbert.acceleration.instance import put_by_us
from fastbert.acceleration.plan import relation_of
from fastbert.models.base import HasModel
from fastbert.models.tree import RunsBaseModel


@dataclass(frozen=True)
class BaseModelStatus:
    """One base model of a tree.

    kind: "accelerated", by fastbert.accelerate; "own", of fastbert's classes, whose every call is packed and is not
    counted; "left alone", of transformers, and runs its own code. packed, others: how many calls ran packed, and how
    many in transformers' own forward, since it was accelerated. why_not: the last reason for that, "" for none.
    """

    name: str
    kind: Literal["accelerated", "own", "left alone"]
    packed: int = 0
    others: int = 0
    why_not: str = ""

    def __str__(self) -> str:
        if self.kind == "own":
            return f"{self.name}: fastbert's own class, every call is packed"
        if self.kind == "left alone":
            return f"{self.name}: not accelerated, every call runs transformers' own forward"
        return f"{self.name}: {counted(self.packed, self.others, self.why_not)}"


@dataclass(frozen=True, repr=False)
class Status:
    """Of all base models of a tree; the counts are sums, the reason is that of the first model that has one."""

    models: tuple[BaseModelStatus, ...]

    @property
    def packed(self) -> int:
        return sum(model.packed for model in self.models)

    @property
    def others(self) -> int:
        return sum(model.others for model in self.models)

    @property
    def why_not(self) -> str:
        return next((model.why_not for model in self.models if model.why_not), "")

    def __repr__(self) -> str:
        return "\n".join(map(str, self.models)) or "there is no model that fastbert has"


def status(model: Any) -> Status:
    """What runs fast in a model, how often it did, and the last reason why it did not. `print` it, or read its fields.

    Args:
        model: any module: accelerated or not, fastbert's own or transformers', alone or inside of another library's;
            or a SentenceEncoder.

    Raises TypeError for anything else.
    """
    root = model.model if isinstance(model, HasModel) else model
    if not isinstance(root, nn.Module):
        raise TypeError(f"status takes a module or a SentenceEncoder, not {type(model).__name__}")
    return Status(tuple(_found(root)))


def _found(root: nn.Module) -> Iterator[BaseModelStatus]:
    for path, module in root.named_modules():
        name = f"{path} ({type(module).__name__})" if path else type(module).__name__
        forward = put_by_us(module)
        if isinstance(forward, Forward):
            yield BaseModelStatus(name, "accelerated", forward.packed, forward.others, forward.why_not)
        elif isinstance(module, RunsBaseModel):
            yield BaseModelStatus(name, "own")
        elif relation_of(module) in ("base", "derived"):
            yield BaseModelStatus(name, "left alone")
