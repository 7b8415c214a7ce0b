"""Reads the tensors of a checkpoint: safetensors, one file or shards, and pickles, without running code from them."""

from __future__ import annotations

import pickle
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fastbert.errors import CheckpointError
from fastbert.files import parse_json, read_json

WEIGHTS, BIN = "model.safetensors", "pytorch_model.bin"
CHECKSUM = "fastbert_crc32"  # metadata of the files that save_pretrained writes: {key: crc32 of the tensor's bytes}

# The floating-point numbers that a model can be made of. float8 means nothing without scales that stand elsewhere.
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# What torch.load raises for a damaged pickle, and for one that asks for more than tensors.
_PICKLE_ERRORS = (
    RuntimeError,
    pickle.UnpicklingError,
    EOFError,
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    struct.error,
)


def some(keys: list[str], limit: int = 8) -> str:
    """The first of them, and how many more there are."""
    return ", ".join(keys[:limit]) + (f" and {len(keys) - limit} more" if len(keys) > limit else "")


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint folder: safetensors, sharded safetensors, or a pickle read with weights_only=True.

    Raises CheckpointError, naming the file: none is there, it is damaged, or it holds what is no plain tensor of
    integers or of one of FLOATS.
    """
    for name in (WEIGHTS, BIN):
        if (folder / name).is_file():
            return _read_file(folder / name)
        index = folder / f"{name}.index.json"
        if index.is_file():
            return _read_shards(index)
    raise CheckpointError(f"{folder} has no weights: none of {WEIGHTS}, {WEIGHTS}.index.json, {BIN}, {BIN}.index.json")


def read_metadata(folder: Path) -> dict[str, str]:
    """What model.safetensors says of itself; empty where there is no such file. Raises CheckpointError."""
    if not (folder / WEIGHTS).is_file():
        return {}
    with _open_safetensors(folder / WEIGHTS) as file:
        return file.metadata() or {}


def _read_shards(index: Path) -> dict[str, torch.Tensor]:
    try:
        weight_map = read_json(index, CheckpointError)["weight_map"]
    except KeyError as error:
        raise CheckpointError(f"{index} is no shard index: {error!r}") from None
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{index} is no shard index: weight_map does not map tensors to files")
    weights: dict[str, torch.Tensor] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard or not (index.parent / shard).is_file():
            raise CheckpointError(f"{index} names the shard {shard!r}, which is not in its folder")
        weights.update(_read_file(index.parent / shard))
    absent = sorted(set(weight_map) - set(weights))
    if absent:
        raise CheckpointError(f"{index} names tensors that its shards do not hold: {some(absent)}")
    return weights


def _read_file(path: Path) -> dict[str, torch.Tensor]:
    weights = _read_pickle(path) if path.suffix == ".bin" else _read_safetensors(path)
    for key, t in weights.items():
        if t.layout is not torch.strided or t.is_quantized or t.is_meta:
            raise CheckpointError(f"{path}: {key} is no plain tensor: {t.layout} {t.dtype} on {t.device}")
        if t.is_floating_point() and t.dtype not in FLOATS:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
            raise CheckpointError(f"{path}: {key} is {t.dtype}; of floating point fastbert reads {known}")
    return weights


def _read_pickle(path: Path) -> dict[str, torch.Tensor]:
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except _PICKLE_ERRORS as error:
        reason = next(iter(str(error).splitlines()), "")
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__} {reason}") from None
    if not isinstance(weights, dict) or not all(
        isinstance(key, str) and isinstance(t, torch.Tensor) for key, t in weights.items()
    ):
        raise CheckpointError(f"{path} is no state dict: it holds something else than named tensors")
    return weights


@contextmanager
def _open_safetensors(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError, ValueError) as error:
        size = path.stat().st_size if path.exists() else 0
        raise CheckpointError(f"{path} ({size} bytes) is not a whole safetensors file: {error}") from None


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    with _open_safetensors(path) as file:
        weights = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
        metadata = file.metadata() or {}
    checksums = parse_json(metadata.get(CHECKSUM, "{}"), f"{path}: {CHECKSUM}", CheckpointError)
    for key, expected in checksums.items():
        if type(expected) is not int:
            raise CheckpointError(f"{path} is damaged: the checksum of {key} is {expected!r}, which is no integer")
        if key not in weights:
            raise CheckpointError(f"{path} is damaged: it was saved with a tensor {key}, which it does not hold")
        if checksum(weights[key]) != expected:
            raise CheckpointError(f"{path} is damaged: tensor {key} does not match the checksum it was saved with")
    return weights


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of a tensor's bytes."""
    return zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
