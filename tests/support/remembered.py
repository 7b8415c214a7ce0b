"""What the oracle gives, kept for the next test that asks with the same numbers.

Tests draw the same operands for each instruction set and each backend, so its formula would be computed as many times.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_flatten

T = TypeVar("T")
ROOM = 2**27  # bytes; what was asked for longest ago goes first
_known: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()


def remembered(compute: Callable[..., T], *given: Any, **options: Any) -> T:
    """compute(*given, **options), which goes by what it is given alone: tensors, and what prints as what it is. The
    result is not to be written to.
    """
    key = _key(compute, given, options)
    if key not in _known:
        found = compute(*given, **options)
        _known[key] = found, sum(t.nbytes for t in tree_flatten(found)[0] if isinstance(t, torch.Tensor))
        while len(_known) > 1 and sum(size for _, size in _known.values()) > ROOM:
            _known.popitem(last=False)
    _known.move_to_end(key)
    return _known[key][0]


def _key(compute: Callable[..., Any], given: Any, options: Any) -> bytes:
    leaves, form = tree_flatten((given, options))
    digest = hashlib.blake2b(f"{compute.__module__}.{compute.__qualname__} {form}".encode())
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            values = leaf.detach().cpu().contiguous().view(-1)
            digest.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            digest.update(values.view(torch.uint8).numpy() if values.numel() else b"")
        else:
            assert leaf is None or isinstance(leaf, (bool, int, float, str)), (
                f"{type(leaf)} may not print all that it is"
            )
            digest.update(f"{type(leaf)} {leaf!r}".encode())
        digest.update(b"\0")
    return digest.digest()
