"""Which operators of fastbert run."""

from __future__ import annotations

import collections

from torch.utils._python_dispatch import TorchDispatchMode


class Ops(TorchDispatchMode):
    """Counts the operators of fastbert."""

    def __init__(self):
        super().__init__()
        self.calls: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fastbert":
            self.calls[func._schema.name.removeprefix("fastbert::")] += 1
        return func(*args, **(kwargs or {}))
