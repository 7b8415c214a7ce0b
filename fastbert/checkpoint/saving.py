"""Writes a folder whole or not at all, even if the writer is killed or the power fails.

New files are written into a second folder beside, made durable, and then renamed. A checkpoint is two files, which
cannot be renamed in one step. The rename of the weights is the step that counts: their metadata holds a hash of the
config.json that was saved with them, and its entries that decide shapes. Between the two renames the new config.json is
still in the second folder. `config_of` finds it there by its hash, and the next save moves it into place. So a folder
always loads as one save or the other.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from fastbert.checkpoint.weight_files import CHECKSUM, WEIGHTS, checksum, read_metadata
from fastbert.config import EncoderConfig
from fastbert.errors import CheckpointError, ConfigError
from fastbert.files import move, parse_json, rename, sync

CONFIG = "config.json"
SAVED_WITH = "fastbert_config"  # metadata of the weights: {"sha256": of config.json, "shapes": EncoderConfig.shapes()}
Result = TypeVar("Result")
BESIDE = ".fastbert-saving-"  # what the names of folders beside begin with


def save(folder: Path, weights: dict[str, torch.Tensor], entries: dict[str, Any]) -> None:
    """Replace a folder's model.safetensors and config.json by these, both or neither. Raises OSError."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    text = json.dumps(entries, indent=2, sort_keys=True) + "\n"
    shapes = EncoderConfig.from_dict(json.loads(text)).shapes()
    metadata = {
        "format": "pt",
        CHECKSUM: json.dumps({key: checksum(t) for key, t in weights.items()}),
        SAVED_WITH: json.dumps({"sha256": _digest(text.encode()), "shapes": shapes}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    with beside(folder) as new:
        try:
            save_file(weights, new / WEIGHTS, metadata=metadata)
            _sort_metadata(new / WEIGHTS)
        except SafetensorError as error:  # which is no OSError, not even where the disk is full
            raise OSError(f"{folder / WEIGHTS} cannot be written: {error}") from None
        (new / CONFIG).write_text(text, encoding="utf-8")
        for path in (new / CONFIG, new, folder):
            sync(path)
        move(new / WEIGHTS, folder / WEIGHTS)  # durable before the next rename, which is beside()'s


def _sort_metadata(path: Path) -> None:
    """In place: safetensors writes entries of the metadata in an order that is another in each process, and equal
    models are to be equal files. serde and json escape the same characters, so the header keeps its length.
    """
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        file.seek(8)
        file.write(json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode().ljust(size))


@contextmanager
def beside(folder: Path) -> Iterator[Path]:
    """A new folder in `folder` to write in, removed at the end, whatever happens, as are those of dead writers.

    Another writer into `folder` waits meanwhile, so that every other folder beside is a dead writer's. On a file system
    without such locks (some network ones) no writer waits, and nothing of others is removed.
    """
    import fcntl  # here: it is POSIX's, and loading needs none of it

    descriptor, locked = os.open(folder, os.O_RDONLY), True
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            warnings.warn(f"fastbert: waiting until another process has saved into {folder}", stacklevel=5)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:
            locked = False
        for left in folder.glob(f"{BESIDE}*") if locked else ():
            _finish(folder, left)
        new = Path(tempfile.mkdtemp(prefix=BESIDE, dir=folder))
        try:
            yield new
        finally:
            _finish(folder, new)
    finally:
        if locked:  # a process that was forked meanwhile holds the descriptor, too: closing it would not unlock
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _finish(folder: Path, left: Path) -> None:
    """Put the config.json in place that `folder`'s weights wait for, if it lies in `left`, and remove `left`."""
    try:
        saved = _saved_with(folder, read_metadata(folder))
    except CheckpointError:  # damaged weights must not keep a save from replacing them
        saved = None
    if saved is not None and left / CONFIG in _unfinished(folder) and _hash(left / CONFIG) == saved["sha256"]:
        rename(left / CONFIG, folder / CONFIG)
    (left / CONFIG).unlink(missing_ok=True)  # before the weights, without which it would look like a committed one
    shutil.rmtree(left, ignore_errors=True)


def _unfinished(folder: Path) -> list[Path]:
    """Each config.json in a folder beside whose weights have been renamed already."""
    return [left / CONFIG for left in folder.glob(f"{BESIDE}*") if not (left / WEIGHTS).exists()]


def config_of(folder: Path, metadata: dict[str, str]) -> EncoderConfig:
    """The config that belongs to weights with this metadata: config.json, or an unfinished save's.

    Weights of other writers say nothing of it. Raises ConfigError: absent, or it cannot be run. CheckpointError: an
    entry that decides shapes is another than the weights were saved with.
    """
    path = folder / CONFIG
    saved = _saved_with(folder, metadata)
    if saved is None:
        if not path.exists() and (folder / "adapter_config.json").exists():
            raise CheckpointError(
                f"{folder} holds an adapter of PEFT: load the model, then peft.PeftModel.from_pretrained(model, folder)"
            )
        return EncoderConfig.from_file(path)
    # Twice, since a save may finish between the look at config.json and the look beside.
    for candidate in (path, *_unfinished(folder), path):
        try:
            content = candidate.read_bytes()
        except OSError:
            continue
        if _digest(content) == saved["sha256"]:
            return EncoderConfig.from_dict(parse_json(content, candidate, ConfigError))
    config = EncoderConfig.from_file(path)  # edited since, which is no fault as long as shapes agree
    shapes = config.shapes()
    for name, value in saved["shapes"].items():
        if name in shapes and shapes[name] != value:
            raise CheckpointError(
                f"{path} has {name} {shapes[name]!r}, but {WEIGHTS} was saved with {value!r}: they do not belong"
                " together. Undo the change, or pass config=EncoderConfig.from_file(...) to go by it all the same"
            )
    return config


def of_one_save(folder: Path, read: Callable[[dict[str, str]], Result]) -> Result:
    """What `read` makes of the folder and of its weights' metadata, again if another process has saved meanwhile.

    Then an error, too, may come from files of two saves: only what is raised with the folder at rest is the folder's.
    """
    while True:
        metadata = read_metadata(folder)
        try:
            result = read(metadata)
        except (CheckpointError, ConfigError):
            if read_metadata(folder) == metadata:
                raise
            continue
        if read_metadata(folder) == metadata:
            return result


def _saved_with(folder: Path, metadata: dict[str, str]) -> dict[str, Any] | None:
    """What the weights say of their config.json; None if they are another writer's. Raises CheckpointError."""
    if SAVED_WITH not in metadata:
        return None
    where = f"{folder / WEIGHTS}: {SAVED_WITH}"
    saved = parse_json(metadata[SAVED_WITH], where, CheckpointError)
    if not isinstance(saved.get("sha256"), str) or not isinstance(saved.get("shapes"), dict):
        raise CheckpointError(f"{where} holds no sha256 with shapes: the file is damaged")
    return saved


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _hash(path: Path) -> str | None:
    try:
        return _digest(path.read_bytes())
    except OSError:
        return None
