"""Arguments of from_pretrained and save_pretrained: transformers' meaning, or one error that says what is allowed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fastbert.checkpoint.dtypes import parse_dtype
from fastbert.checkpoint.weight_files import BIN, WEIGHTS
from fastbert.config import EncoderConfig
from fastbert.errors import CheckpointError, ConfigError

# Ways to compute softmax(q k^T / sqrt(d)) v, which is what fastbert's kernels compute whichever is asked for.
ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")

# What transformers takes and fastbert does not have -> what to do. None, False and transformers' defaults may be given.
_REFUSED = {
    "quantization_config": 'load the model as it is, then fastbert.quantize(model, "int8")',
    "variant": "give the folder of the files",
    "max_memory": "a model stands on one device: device_map",
    "offload_folder": "a model stands on one device: device_map",
    "offload_buffers": "a model stands on one device: device_map",
    "offload_state_dict": "a model stands on one device: device_map",
    "tp_size": "a model stands on one device: device_map",
    "tp_plan": "a model stands on one device: device_map",
    "device_mesh": "a model stands on one device: device_map",
    "distributed_config": "a model stands on one device: device_map",
    "gguf_file": "only safetensors and pytorch_model.bin are read",
    "key_mapping": "rename the tensors of the file",
    "proxies": "set HTTPS_PROXY",
    "from_tf": "only safetensors and pytorch_model.bin are read",
    "from_flax": "only safetensors and pytorch_model.bin are read",
    "use_kernels": "fastbert has its own kernels",
    "kernel_config": "fastbert has its own kernels",
    "allow_all_kernels": "fastbert has its own kernels",
    "experts_implementation": "there are no experts",
    "generation_config": "these models generate nothing",
    "code_revision": "fastbert never runs code from a checkpoint",
    "adapter_name": "peft.PeftModel.from_pretrained(model, adapter, adapter_name)",
    "fusion_config": "fastbert fuses layers by itself",
    "adapter_kwargs": "peft.PeftModel.from_pretrained(model, adapter)",
    "use_flash_attention_2": "fastbert has its own attention",
}
# What says nothing that fastbert does not do anyway.
_DONE_ANYWAY = {
    "low_cpu_mem_usage": (True, False, None),
    "weights_only": (True,),
    "_fast_init": (True, False),
    "disable_mmap": (True, False, None),
    "_from_auto": (True, False),
}


def left_over(options: dict[str, Any]) -> dict[str, Any]:
    """The entries of the config among keyword arguments that from_pretrained does not name. Raises ConfigError."""
    changes = dict(options)
    for name, advice in _REFUSED.items():
        value = changes.pop(name, None)
        if value is not None and value is not False:
            raise ConfigError(f"{name}={value!r} is not supported: {advice}")
    for name, allowed in _DONE_ANYWAY.items():
        if name in changes and (value := changes.pop(name)) not in allowed:
            raise ConfigError(f"{name}={value!r} is not supported; allowed: {', '.join(map(repr, allowed))}")
    if changes.pop("trust_remote_code", None):
        raise ConfigError("trust_remote_code=True is not supported: fastbert never runs code from a checkpoint")
    attention = changes.pop("attn_implementation", None)
    if attention not in (None, *ATTENTION):
        raise ConfigError(
            f"attn_implementation={attention!r} is none of {', '.join(ATTENTION)}; fastbert runs its own kernels"
        )
    return changes


def chosen_dtype(dtype: Any, torch_dtype: Any) -> torch.dtype | None:
    """What `dtype` and its old name say; None keeps the checkpoint's own."""
    chosen, old = parse_dtype(dtype), parse_dtype(torch_dtype)
    if None not in (chosen, old) and chosen != old:
        raise ConfigError(f"dtype={dtype!r} and torch_dtype={torch_dtype!r} contradict each other: give dtype")
    return old if chosen is None else chosen


def chosen_device(device: Any, device_map: Any) -> torch.device | None:
    """The one device of a model: of `device`, or of transformers' `device_map`. None: the CPU."""
    if device_map is None:
        return None if device is None else torch.device(device)
    if device is not None:
        raise ConfigError(f"device={device!r} and device_map={device_map!r} say the same: give one of them")
    if isinstance(device_map, Mapping):
        targets = {str(target): target for target in device_map.values()}
        if len(targets) != 1:
            raise ConfigError(
                f"device_map={dict(device_map)!r}: a model stands on one device, for example {{'': 'cpu'}}"
            )
        (device_map,) = targets.values()
    if device_map in ("auto", "balanced", "balanced_low_0", "sequential"):
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return torch.device("cpu") if accelerator is None else accelerator
    try:
        return torch.device(device_map)
    except (RuntimeError, TypeError):
        raise ConfigError(
            f"device_map={device_map!r} is no device; allowed: auto, cpu, cuda:0, {{'': device}}"
        ) from None


def given_config(config: Any) -> EncoderConfig | None:
    """The config of a caller: ours, transformers' (or an entry dict), or where config.json is. None: the folder's."""
    if config is None or isinstance(config, EncoderConfig):
        return config
    if isinstance(config, Mapping):
        return EncoderConfig.from_dict(config)
    if isinstance(config, (str, os.PathLike)):
        path = Path(config)
        return EncoderConfig.from_file(path / "config.json" if path.is_dir() else path)
    return EncoderConfig.from_dict(config.to_dict())


def check_format(folder: Path, use_safetensors: bool | None) -> None:
    """Raise CheckpointError where a folder's weights are not in the format that the caller insists on."""
    if use_safetensors is None:
        return
    has_safetensors = (folder / WEIGHTS).is_file() or (folder / f"{WEIGHTS}.index.json").is_file()
    if has_safetensors != use_safetensors:
        formats = "safetensors, which are read first" if has_safetensors else f"{BIN} only"
        raise CheckpointError(f"use_safetensors={use_safetensors}: {folder} has {formats}")


def check_saving(safe_serialization: Any, variant: Any, max_shard_size: Any, size: int, others: dict[str, Any]) -> None:
    """Raise ConfigError for what save_pretrained of transformers takes and fastbert does not write."""
    if safe_serialization is not True:
        raise ConfigError("safe_serialization=False is not supported: fastbert writes safetensors")
    if variant is not None:
        raise ConfigError(f"variant={variant!r} is not supported: fastbert writes {WEIGHTS}")
    if max_shard_size is not None and size > (limit := _bytes(max_shard_size)):
        raise ConfigError(
            f"max_shard_size={max_shard_size!r}: fastbert writes one file, here of {size} of {limit} bytes"
        )
    if others.pop("distributed_checkpoint", False):
        raise ConfigError(f"distributed_checkpoint=True is not supported: fastbert writes one {WEIGHTS}")
    if unknown := [name for name in others if name not in ("save_peft_format", "save_original_format")]:
        raise ConfigError(f"save_pretrained takes no {unknown[0]}")


def _bytes(size: int | str) -> int:
    units = {
        "KB": 10**3,
        "MB": 10**6,
        "GB": 10**9,
        "TB": 10**12,
        "KIB": 2**10,
        "MIB": 2**20,
        "GIB": 2**30,
        "TIB": 2**40,
    }
    if isinstance(size, int):
        return size
    for unit, factor in sorted(units.items(), key=lambda item: -len(item[0])):
        if str(size).upper().endswith(unit) and str(size)[: -len(unit)].strip().replace(".", "", 1).isdigit():
            return int(float(str(size)[: -len(unit)]) * factor)
    raise ConfigError(f"max_shard_size={size!r} is no number of bytes, such as 5000000 or '5GB'")
