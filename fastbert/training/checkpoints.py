"""Checkpoints of a run: folders that are there whole or not at all, written by all ranks while training goes on.

torch.distributed.checkpoint writes them, so a run may go on with another number of ranks.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from fastbert.checkpoint.weight_files import CheckpointError
from fastbert.training.distributed import World

_NAME = re.compile(r"step-(\d{9})")
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)


class Checkpoints:
    """The checkpoints in a folder: `step-000000100`, the last `keep` of them.

    What is being written has another name until all ranks are done. A write that failed raises at the next call.
    """

    def __init__(self, folder: Path, world: World, keep: int):
        self.folder, self.world, self.keep = folder, world, keep
        self.newest: int | None = None  # the step of the last one saved or loaded here
        self._writing: tuple[Future, Path] | None = None

    def last(self) -> Path | None:
        found = sorted(path for path in self.folder.glob("step-*") if _NAME.fullmatch(path.name))
        return found[-1] if found else None

    def save(self, step: int, model: nn.Module, optimizer: Any, extra: dict[str, Any]) -> None:
        """Copy all state now, and write it while the caller goes on. All ranks call it. Raises OSError."""
        self.finish()
        beside = self.folder / f".writing-{step:09d}"
        if self.world.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
            for stale in self.folder.glob(".writing-*"):
                shutil.rmtree(stale)
        self.world.barrier()
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "extra": extra}
        future = dcp.async_save(state, checkpoint_id=beside, process_group=self.world.saving_group)
        self._writing, self.newest = (future, self.folder / f"step-{step:09d}"), step

    def finish(self) -> None:
        """Wait for what is being written, give it its name, and remove what is older than the last `keep`."""
        if self._writing is None:
            return
        (future, path), self._writing = self._writing, None
        try:
            future.result()
        except (Exception, CheckpointException) as error:  # which is no Exception: a full disk, mostly
            raise CheckpointError(
                f"{path.name} could not be written, and the one before is kept: {_cause(error)}"
            ) from error
        self.world.barrier()
        if self.world.is_main:
            _sync(self.folder / f".writing-{path.name.removeprefix('step-')}")
            os.replace(self.folder / f".writing-{path.name.removeprefix('step-')}", path)
            found = sorted(old for old in self.folder.glob("step-*") if _NAME.fullmatch(old.name))
            for old in found[: -self.keep]:
                shutil.rmtree(old)
        self.world.barrier()

    def load(self, path: Path, model: nn.Module, optimizer: Any, extra: dict[str, Any]) -> dict[str, Any]:
        """Fill a model and its optimizer; returns what `save` got as `extra`, which has the keys of `extra` here.

        Raises CheckpointError.
        """
        weights, moments = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": weights, "optimizer": moments}
        extra = dict(extra)
        try:
            dcp.load({**state, "extra": extra}, checkpoint_id=path, process_group=self.world.host_group)
        except (Exception, CheckpointException) as error:
            raise CheckpointError(f"{path} cannot be read: {_cause(error)}") from error
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        self.newest = extra["step"]
        return extra


def _cause(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return text.strip().splitlines()[-1]


def _sync(folder: Path) -> None:
    """Onto the disk, before the folder gets the name that says it is whole."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
