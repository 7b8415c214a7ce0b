"""Checkpoints of a run: folders that are there whole or not at all, written by all ranks while training goes on.

torch.distributed.checkpoint writes them, so a run may go on with another number of ranks. It keeps no checksums, and
would load a file with a wrong bit: each rank writes those of its own files beside them.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from fastbert.errors import CheckpointError
from fastbert.files import move, sync
from fastbert.training.distributed import ProcessGroup

_NAME = re.compile(r"step-(\d{9})")
_SUMS = "checksums-{}.json"  # of a rank: {name of a file that it wrote: crc32}
_BLOCK = 1 << 24  # bytes
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)


class _Writer(dcp.FileSystemWriter):
    """As `dcp.save` makes one for a folder, but equal runs write equal bytes."""

    def storage_meta(self) -> None:
        """Not the folder's name and a random number: nothing reads them."""


class Checkpoints:
    """The checkpoints in a folder: `step-000000100`, the last `keep` of them.

    What is being written has another name until all ranks are done. All ranks call the methods that write or load, and
    what fails on one of them raises CheckpointError on all.
    """

    def __init__(self, folder: Path, process_group: ProcessGroup, keep: int):
        self.folder, self.process_group, self.keep = folder, process_group, keep
        self.newest: int | None = None  # the step of the last one saved or loaded here
        self._writing: tuple[Future, int] | None = None
        self._thread = ThreadPoolExecutor(1)

    def all(self) -> list[Path]:
        """From the oldest to the newest."""
        return sorted(path for path in self.folder.glob("step-*") if _NAME.fullmatch(path.name))

    def last(self) -> Path | None:
        return paths[-1] if (paths := self.all()) else None

    def save(
        self, step: int, model: nn.Module, optimizer: Any, extra: dict[str, Any], *, is_last: bool = False
    ) -> None:
        """Copy all state now, and write it while the caller goes on, until `finish`.

        `is_last`: nothing changes the state until then, so a CPU's is written as it stands. A GPU's goes to the host in
        this thread, whose device is the rank's.
        """
        self.finish()
        beside = self._beside(step)
        self._everywhere(step, self._make_room if self.process_group.is_main else None)
        weights, moments = (
            state_of(model, optimizer) if self.process_group.size == 1 else get_state_dict(model, optimizer)
        )
        state = {"model": weights, "optimizer": moments, "extra": dict(extra)}
        to: dict[str, Any] = {"storage_writer": _Writer(beside), "process_group": self.process_group.saving_group}
        written: Any
        if is_last and self.process_group.device.type == "cpu":
            written = self._thread.submit(dcp.save, state, **to)
        else:
            written = dcp.async_save(state, **to)
        self._writing, self.newest = (self._thread.submit(self._seal, written, beside), step), step

    @property
    def is_written(self) -> bool:
        """Whether this rank's part is on the disk, so that `finish` has not long to wait."""
        return self._writing is not None and self._writing[0].done()

    def finish(self) -> None:
        """Wait for what is being written, give it its name, and remove what is older than the last `keep`."""
        if self._writing is None:
            return
        (future, step), self._writing = self._writing, None
        self._everywhere(step, future.result)
        self._everywhere(step, (lambda: self._name(step)) if self.process_group.is_main else None)

    def load(self, path: Path, model: nn.Module, optimizer: Any, extra: dict[str, Any]) -> dict[str, Any]:
        """Fill a model and its optimizer; returns what `save` got as `extra`, which has the keys of `extra` here."""
        weights, moments = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": weights, "optimizer": moments}
        extra, older = dict(extra), [other for other in self.all() if other < path]
        hint = f"to go on from {older[-1].name}, remove {path.name}" if older else "there is no older checkpoint"
        if damage := next(filter(None, self.process_group.gather(self._damage(path))), None):
            raise CheckpointError(f"{path} cannot be read: {damage}; {hint}")
        try:
            dcp.load({**state, "extra": extra}, checkpoint_id=path, process_group=self.process_group.host_group)
        except (Exception, CheckpointException) as error:  # which is no Exception: weights of another model, mostly
            raise CheckpointError(f"{path} cannot be read: {_cause(error)}; {hint}") from error
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        self.newest = extra["step"]
        return extra

    def _beside(self, step: int) -> Path:
        return self.folder / f".writing-{step:09d}"

    def _everywhere(self, step: int, do: Callable[[], Any] | None) -> None:
        """Do something on this rank, or nothing, and wait for the others."""
        failed = ""
        try:
            if do is not None:
                do()
        except (Exception, CheckpointException) as error:  # a full disk, mostly
            failed = _cause(error)
        if cause := next(filter(None, self.process_group.gather(failed)), None):
            if self.process_group.is_main:
                shutil.rmtree(self._beside(step), ignore_errors=True)  # a full disk needs the room
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written: {cause}; {self.last() or 'none'} is the last one"
            )

    def _make_room(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for stale in self.folder.glob(".writing-*"):
            shutil.rmtree(stale)

    def _seal(self, written: Future, beside: Path) -> None:
        """Put this rank's files on the disk, and their checksums. In a thread."""
        written.result()
        files = list(beside.glob(f"__{self.process_group.rank}_*"))
        if self.process_group.is_main:
            files.append(beside / ".metadata")
        sums = beside / _SUMS.format(self.process_group.rank)
        sums.write_text(json.dumps({file.name: _checksum(file) for file in files}), encoding="utf-8")
        for path in (*files, sums):
            sync(path)

    def _name(self, step: int) -> None:
        path = self.folder / f"step-{step:09d}"
        move(self._beside(step), path)
        for old in self.all()[: -self.keep]:  # a kill must not leave a half of it under its name
            old.rename(gone := self.folder / f".writing-{old.name}")
            shutil.rmtree(gone)

    def _damage(self, path: Path) -> str:
        """What is wrong with this rank's share of a checkpoint's files, from any rank; empty if nothing is."""
        try:
            sums: dict[str, int] = {}
            for file in sorted(path.glob(_SUMS.format("*"))):
                sums |= json.loads(file.read_text(encoding="utf-8"))
            if ".metadata" not in sums:
                return f"{_SUMS.format(0)} is missing"
            for name in sorted(sums)[self.process_group.rank :: self.process_group.size]:
                if _checksum(path / name) != sums[name]:
                    return f"{name} is damaged, its checksum is not the one that was written"
        except (OSError, ValueError) as error:
            return _cause(error)
        return ""


def state_of(model: nn.Module, optimizer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `get_state_dict` gives for a model that nothing wraps: it imports torch._dynamo, to know its wrapper."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    ordered = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    packed = optimizer.state_dict()
    moments = {
        "state": {ordered[i]: state for i, state in packed["state"].items()},
        "param_groups": [
            {**group, "params": [ordered[i] for i in group["params"]]} for group in packed["param_groups"]
        ],
    }
    return model.state_dict(), moments


def _checksum(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            crc = zlib.crc32(block, crc)
    return crc


def _cause(error: BaseException) -> str:
    """The system's own word, a full disk mostly: what torch's writer of archives then says goes by where it was."""
    pending = [error]
    while pending:
        at = pending.pop()
        if isinstance(at, OSError):
            error = at
            break
        failures = [failure for failure, _ in at.failures.values()] if isinstance(at, CheckpointException) else []
        pending += [behind for behind in (*failures, at.__context__, at.__cause__) if behind is not None]
    text = str(error) or type(error).__name__
    return text.strip().splitlines()[-1]
