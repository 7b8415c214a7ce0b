"""What every backend takes for granted of its tensors: asked by an op before a backend is chosen."""

from __future__ import annotations

from itertools import pairwise

import torch


def check_devices(op: str, **tensors: torch.Tensor | None) -> None:
    """Raise ValueError, naming both devices, unless all of an op's tensors are where the first of them is."""
    (first, x), *others = tensors.items()
    assert x is not None
    for name, t in others:
        if t is not None and t.device != x.device:
            raise ValueError(f"{op}: {name} is on {t.device}, {first} on {x.device}; all must be on one device")


def int32_offsets(op: str, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """cu_seqlens as kernels take it; int64 is converted. Raises ValueError for another dtype or shape."""
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{op}: cu_seqlens is {cu_seqlens.dtype}; it must be int32 (or int64)")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
        raise ValueError(f"{op}: cu_seqlens has shape {tuple(cu_seqlens.shape)}; it must be (batch + 1,)")
    return cu_seqlens.int()


def check_offsets(op: str, offsets: list[int], total_tokens: int) -> None:
    """Raise ValueError unless offsets, which are on the host, begin at 0, never fall, and stay within the tokens."""
    if offsets[0] != 0:
        raise ValueError(f"{op}: cu_seqlens starts at {offsets[0]}, not at 0")
    for i, (start, stop) in enumerate(pairwise(offsets)):
        if stop < start:
            raise ValueError(f"{op}: cu_seqlens falls from {start} to {stop} at sequence {i}; it must never fall")
    if offsets[-1] > total_tokens:
        raise ValueError(f"{op}: cu_seqlens ends at {offsets[-1]}, but there are {total_tokens} tokens")


def _is_on_cpu(t: torch.Tensor) -> bool:
    """tests/gpu/test_host_syncs.py says no for all, as on a GPU."""
    return t.is_cpu


def check_offsets_on_cpu(op: str, cu_seqlens: torch.Tensor, total_tokens: int, max_seqlen: int | None = None) -> None:
    """`check_offsets` where a look costs no wait: on a CPU, not in a traced call. max_seqlen must bound the lengths."""
    if not _is_on_cpu(cu_seqlens) or torch.compiler.is_compiling():
        return
    offsets = cu_seqlens.tolist()
    check_offsets(op, offsets, total_tokens)
    longest = max((stop - start for start, stop in pairwise(offsets)), default=0)
    if max_seqlen is not None and max_seqlen < longest:
        raise ValueError(f"{op}: max_seqlen is {max_seqlen}, but the longest sequence has {longest} tokens")
