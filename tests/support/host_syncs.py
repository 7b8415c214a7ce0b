"""What would wait for a GPU, counted by the calls that would: no GPU is needed."""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
# What reads a value (multinomial: whether all of them are numbers), and what makes a tensor whose size is a value.
READS = (aten._local_scalar_dense, aten.equal, aten.multinomial)
SIZES = (aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.unique_consecutive)


class _Copies(TorchFunctionMode):
    """A CPU tensor's tolist and numpy reach no dispatcher."""

    def __init__(self, found: list[str]):
        super().__init__()
        self.found = found

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu):
            self.found.append(func.__name__)
        return func(*args, **(kwargs or {}))


class HostSyncs(TorchDispatchMode):
    """`found`: what would have waited for a GPU, were the tensors on one."""

    def __init__(self):
        super().__init__()
        self.found: list[str] = []
        self._copies = _Copies(self.found)

    def __enter__(self):
        self._copies.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        return self._copies.__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        packet = func.overloadpacket
        by_mask = packet in (aten.index, aten.index_put, aten.index_put_) and any(
            t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1]
        )
        sized = func is aten.repeat_interleave.Tensor and (kwargs or {}).get("output_size") is None
        if packet in READS or packet in SIZES or by_mask or sized:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))
