"""Whether a module tree is still what was looked at: one answer for fused layers and `accelerate`.

Looking at every leaf takes 10 us a layer, and three times that once the weights have gone through the caches: a tenth
of a short text's time in int8. Seeing that nothing was replaced since takes a fraction of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any
from weakref import ref

from torch import nn

from fastbert.layers.leaves import ATTRIBUTES, FORWARD, FORWARD_HOOKS, child_of, has_global_hooks, in_use
from fastbert.native.dict_entries import dict_entries


class ModuleGuard:
    """Modules of a tree, and all that decided what calling them did when they were watched.

    Weights that change in place never count. Everything is held by the dict that holds it and its name there. Of the
    root neither the module nor its dict is held: it may keep this itself, and must be freed with the last reference to
    it.
    """

    def __init__(self, root: nn.Module):
        self._root, self._root_type = ref(root), type(root)
        self._root_tensors: dict[str, Any] = {}  # what the root's dict has under these names, as in the columns
        self._root_others: dict[str, Any] = {}
        self._absent_from_root: list[str] = []
        # Columns of equal length: a module's dict, a name, and what it has there. Tensors are the same objects or
        # others; `==` would compare their values.
        self._tensors: tuple[list[dict], list[str], list[Any]] = [], [], []
        self._others: tuple[list[dict], list[str], list[Any]] = [], [], []
        self._absent: tuple[list[dict], list[str]] = [], []  # hooks, of which there were none
        self._entries = dict_entries()
        self._held: set[tuple[int, str]] = set()
        self.modules: list[nn.Module] = []  # without the root
        self._types: list[type] = []  # of those modules

    # ----------------------------------------------------------------------------------------------------------------
    # What is watched

    def watch(self, module: nn.Module, hooks: Sequence[str] = FORWARD_HOOKS) -> None:
        """Everything of a module itself that decides what calling it does; `hooks`: those that count.

        Not those for backward, unless asked for: most of what is remembered is for calls without gradients.
        """
        attributes = module.__dict__
        for kept in ("_parameters", "_buffers"):
            for name in attributes[kept]:
                self._hold(self._tensors, attributes, kept)  # this dict itself: __init__ puts another in its place
                self._hold(self._tensors, attributes[kept], name)
        self.hold(attributes, FORWARD)
        for name in ATTRIBUTES:
            if name in attributes:
                self.hold(attributes, name)
        self.watch_hooks(module, hooks)
        if module is not self._root():
            self.modules.append(module)
            self._types.append(type(module))

    def watch_hooks(self, module: nn.Module, hooks: Sequence[str]) -> None:
        """Those that are there must stay, and those that are not must stay away: a look at these is the quickest."""
        attributes, is_root = module.__dict__, module is self._root()
        for name in hooks:
            if attributes.get(name):
                self.hold(attributes, name)
            elif is_root:
                self._absent_from_root.append(name)
            else:
                self._absent[0].append(attributes)
                self._absent[1].append(name)

    def watch_children(self, module: nn.Module) -> None:
        """Which modules are right below this one, all of them."""
        self.hold(module.__dict__, "_modules")

    def watch_in_use(self, module: nn.Module) -> nn.Module:
        """What calling `module` calls (`in_use`), and what chooses it."""
        if (used := in_use(module)) is not module:
            self.hold(module.__dict__, "_active_adapter", "_disable_adapters")
            self.watch_children(module._modules["modules_to_save"])  # type: ignore[arg-type]
            self.watch_children(used)
        return used

    def watch_path(self, module: nn.Module, path: str) -> None:
        """What stands on the way from `module` to `path`."""
        for name in path.split("."):
            self.watch_children(module)
            self.watch_in_use(module)
            module = child_of(module, name)

    def hold(self, values: dict, *names: str) -> None:
        """What a dict has under these names, None where it has nothing; a dict there is copied, to be compared."""
        for name in names:
            self._hold(self._others, values, name)

    def _hold(self, columns: tuple[list[dict], list[str], list[Any]], values: dict, name: str) -> None:
        if (id(values), name) not in self._held:  # the paths of leaves have their beginnings in common
            self._held.add((id(values), name))
            value = values.get(name)
            if columns is self._others and isinstance(value, dict):
                value = value.copy()
            if values is self._root().__dict__:
                (self._root_others if columns is self._others else self._root_tensors)[name] = value
                return
            columns[0].append(values)
            columns[1].append(name)
            columns[2].append(value)

    # ----------------------------------------------------------------------------------------------------------------
    # Whether it is still so. This is the longest of all that stands before a short text, unless it is native.

    def is_root(self, module: nn.Module) -> bool:
        return self._root() is module

    def _has_more_hooks(self) -> bool:
        own = self._root().__dict__.get
        return has_global_hooks() or not self._entries.are_false(*self._absent) or any(map(own, self._absent_from_root))

    def is_same(self) -> bool:
        """Whether the same modules hold the same tensors, hooks left aside."""
        root = self._root()
        own = root.__dict__.get
        return (
            type(root) is self._root_type
            and list(map(own, self._root_others)) == list(self._root_others.values())
            and all(map(is_, map(own, self._root_tensors), self._root_tensors.values()))
            and self._entries.are_same(*self._tensors)
            and self._entries.are_equal(*self._others)
            and self._entries.have_types(self.modules, self._types)
        )

    def is_current(self) -> bool:
        return not self._has_more_hooks() and self.is_same()


class TreeCache:
    """An answer for each root, for as long as the root lives, the tree is what it was and the question is the same.

    The root keeps it in its own dict, under `name`. A table beside would hold what leads back to the root (a hook, a
    forward that somebody has put there), and so the root, for ever: only what hangs on the root is freed with it.

    Only eager calls may ask here. A graph of torch.compile guards what it has read of a model, but not which entry of a
    table it found: two models that share one compilation would share one model's weights.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def get(self, root: nn.Module, question: Any) -> Any:
        """None where there is none, or not any more: what it held of the tree is let go."""
        entry = root.__dict__.get(self._name)
        if entry is not None and entry.is_of(root, question):
            return entry.answer
        self.forget(root)
        return None

    def put(self, root: nn.Module, question: Any, guard: ModuleGuard, answer: Any) -> None:
        root.__dict__[self._name] = _Answer(question, guard, answer)

    def forget(self, root: nn.Module) -> None:
        root.__dict__.pop(self._name, None)


def forget_all(root: nn.Module) -> None:
    """All answers that a root keeps."""
    for name in [name for name, value in root.__dict__.items() if isinstance(value, Kept)]:
        del root.__dict__[name]


class Kept:
    """What a module keeps in its own dict. What a copy of the module (deepcopy, pickle, torch.save) has of it is empty:
    it goes by the module's own tensors.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple:
        return type(self), ()


class _Answer(Kept):
    __slots__ = ("answer", "guard", "question")

    def __init__(self, question: Any = None, guard: ModuleGuard | None = None, answer: Any = None):
        self.question, self.guard, self.answer = question, guard, answer

    def is_of(self, root: nn.Module, question: Any) -> bool:
        """Not of a shallow copy (copy.copy, DataParallel's replicas), which has the dict's entries."""
        guard = self.guard
        return guard is not None and guard.is_root(root) and self.question == question and guard.is_current()
