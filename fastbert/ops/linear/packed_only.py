"""Makes a weight of which nothing is left but the copy that the CPU's products read (csrc/ops/packed_only.h).

Imported by who makes such weights alone: a model that somebody else may hold has none.
"""

from __future__ import annotations

import torch

from fastbert.ops._common import PackedOnly, define

# The memory of a copy, (bytes,), of weight (out_features, in_features), float32, bfloat16 or int8 and contiguous.
# parts: 2 where products take its upper and its lower half, each of them alone.
_PACK = define("pack_only_cpu", "(Tensor weight, int parts) -> Tensor", None)


def pack_only(weight: torch.Tensor, parts: int) -> PackedOnly:
    """What takes the place of a weight that is packed now."""
    # One element, expanded: it has no memory of its own. A number that no weight is, since DLPack reads without asking.
    nothing = weight.new_full((), float("nan") if weight.is_floating_point() else -128)
    stand_in = torch.Tensor._make_subclass(PackedOnly, nothing.expand(weight.shape))
    stand_in.packed = _PACK(weight.detach(), parts).as_strided(weight.shape, (1, 0))
    stand_in._is_param = isinstance(weight, torch.nn.Parameter)  # what torch's isinstance goes by
    return stand_in
