"""One process or many: what torchrun has started, and a model on it by DDP or FSDP2."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from fastbert.errors import ConfigError
from fastbert.models.base import held_models

Wrapping = Literal["ddp", "fsdp"]


@dataclass(frozen=True)
class ProcessGroup:
    """The processes of a run: this one's rank, how many there are, and its device."""

    rank: int
    size: int
    device: torch.device
    host_group: Any = None  # gloo: counts go from host to host, and no GPU is waited for
    saving_group: Any = None  # gloo, for the thread that writes checkpoints beside the training

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def total(self, counts: list[int]) -> list[int]:
        """The sums over all ranks."""
        if self.size == 1:
            return counts
        summed = torch.tensor(counts, dtype=torch.int64)
        dist.all_reduce(summed, group=self.host_group)
        return summed.tolist()

    def gather(self, value: Any) -> list[Any]:
        """What each rank gives, on all ranks."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.host_group)
        return values

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.host_group)


@contextmanager
def join(device: str | None, timeout_s: float) -> Iterator[ProcessGroup]:
    """The process group that torchrun's environment describes, else this process alone. Leaves it at the end.

    A rank that waits longer than `timeout_s` for the others fails. Raises ConfigError: the device is not there.
    """
    device_type = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device_type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {device!r} is not there: torch {torch.__version__} sees no GPU")
    local_device = (
        torch.device(device_type, int(os.environ.get("LOCAL_RANK", 0)))
        if device_type == "cuda"
        else torch.device(device_type)
    )
    if "RANK" not in os.environ:
        yield ProcessGroup(0, 1, local_device)
        return
    if device_type == "cuda":
        torch.cuda.set_device(local_device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo", timeout=timedelta(seconds=timeout_s)
    )
    try:
        groups = [dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)) for _ in range(2)]
        yield ProcessGroup(dist.get_rank(), dist.get_world_size(), local_device, *groups)
    finally:
        dist.destroy_process_group()


def wrap(model: Any, process_group: ProcessGroup, wrapping: Wrapping, *, bf16: bool) -> nn.Module:
    """The model of one rank, or a module that holds several. FSDP2 shards each layer, and in one piece what is left:
    all that they share is there. With `bf16` it gathers bfloat16.
    """
    if process_group.size == 1:
        return model
    if wrapping == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else MixedPrecisionPolicy()
    )
    for held in held_models(model):
        for path in dict.fromkeys(held.config.layer_paths):
            fully_shard(held.base_model.get_submodule(path), mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


@contextmanager
def gradients_stay_local(model: Any, stay: bool) -> Iterator[None]:
    """While `stay`, backward adds up gradients on each rank; the ranks add theirs in the first backward after it."""
    if not stay:
        yield
    elif isinstance(model, nn.parallel.DistributedDataParallel):
        with model.no_sync():
            yield
    elif hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    else:
        yield
