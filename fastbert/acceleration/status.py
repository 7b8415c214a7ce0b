"""fastbert.status(model): what runs fast, how often it did, and the last reason why not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from fastbert.acceleration.forward import NOT_CALLED
from fastbert.acceleration.instance import is_wrapped, put_by_us
from fastbert.acceleration.plan import relation_of
from fastbert.execution.calls import Calls
from fastbert.models.base import HasModel
from fastbert.models.tree import RunsBaseModel, runner_of


@dataclass(frozen=True)
class BaseModelStatus:
    """One base model of a tree.

    kind: "accelerated", by fastbert.accelerate; "own", of fastbert's classes; "left alone", of transformers, and runs
    its own code. packed, others: how many calls ran packed, and how many in transformers' code, since the model was
    made, copied or accelerated. why_not: the last reason for that, "" for none. in_graphs: whether calls of an own
    model ran packed in a graph of torch.compile, too, which cannot count them. ways: of the last packed call, why the
    "whole encoder", or its "layers", were not one op; "" where they were. texts: how many calls of `encode` of a
    SentenceTransformer (as_sentence_transformer) took a SentenceEncoder's way; `ways["texts"]` says why the last one
    did not. wrapped: whether another library has put a function around the accelerated forward, or in its place: what
    reaches the forward is counted.
    """

    name: str
    kind: Literal["accelerated", "own", "left alone"]
    packed: int = 0
    others: int = 0
    why_not: str = ""
    in_graphs: bool = False
    ways: Mapping[str, str] = field(default_factory=dict)
    texts: int = 0
    wrapped: bool = False

    def __str__(self) -> str:
        if self.kind == "left alone":
            return f"{self.name}: not accelerated, every call runs transformers' own forward"
        said = str(Calls(self.packed, self.others, self.why_not, self.in_graphs, self.ways, self.texts))
        if self.kind == "own":
            return f"{self.name}: fastbert's own class, {said or 'not called yet'}"
        around = "; its forward has been replaced since, and what does not reach it is not counted" * self.wrapped
        return f"{self.name}: {said or NOT_CALLED}{around}"


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
    return Status(tuple(_statuses_of(root)))


def _statuses_of(root: nn.Module) -> Iterator[BaseModelStatus]:
    for path, module in root.named_modules():
        name = f"{path} ({type(module).__name__})" if path else type(module).__name__
        runner, is_own = runner_of(module), isinstance(module, RunsBaseModel)
        if runner is not None and (is_own or put_by_us(module) is not None):
            kind: Literal["own", "accelerated"] = "own" if is_own else "accelerated"
            yield BaseModelStatus(name, kind, **vars(runner.calls), wrapped=is_wrapped(module))
        elif relation_of(module) in ("base", "derived"):
            yield BaseModelStatus(name, "left alone")
