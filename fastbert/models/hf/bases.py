"""Our classes become subclasses of transformers' when transformers is imported, and do not import it before.

The Trainer saves a model as one, config and all, if it is a `transformers.PreTrainedModel`; pipelines read an output by
position if it is a `transformers.utils.ModelOutput`. What our classes define stays theirs: a base adds what they lack.

This takes a hook into imports. A model may be there before transformers is, and `isinstance` then asks transformers'
class, which has no `register` as abstract ones have, and nothing of ours. To look when a model is made misses them.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_waiting: dict[str, list[tuple[type, str]]] = {}  # module that is not imported yet -> (our class, the base there)


def gets_base(ours: type, module: str, name: str) -> None:
    """Make `module.name` the base of `ours` once `module` has been imported, now or later.

    `ours` has one base so far, which that class has among its own.
    """
    if module in sys.modules:
        _rebase(sys.modules[module], ours, name)
        return
    _waiting.setdefault(module, []).append((ours, name))
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)


def _rebase(module: ModuleType, ours: type, name: str) -> None:
    base = vars(module).get(name)
    if isinstance(base, type) and not issubclass(ours, base):
        ours.__bases__ = (base,)


class _Finder:
    """The first finder of sys.meta_path: lets the others find a module that is waited for, and sees it imported."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in _waiting:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not cls)
        spec = next((candidate for candidate in others if candidate is not None), None)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)  # if it fails, the next import of it is seen, too
            for ours, base in _waiting.pop(name, []):
                _rebase(module, ours, base)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
