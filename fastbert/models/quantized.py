"""The layers of a model in int8: which can be, how they become int8, and the entry of config.json that says so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from fastbert import ops
from fastbert.config import EncoderConfig
from fastbert.errors import ConfigError
from fastbert.layers.guard import forget_all
from fastbert.layers.leaves import get_leaf, is_plain, set_module
from fastbert.layers.quantized import QuantizedLinear
from fastbert.models.tree import RunsBaseModel, base_models, linear_paths
from fastbert.native.memory import give_back

# Where transformers, too, looks for how a checkpoint was quantised. A quant_method that it does not know makes it warn
# and read the integers as weights; an entry without one makes it raise. So ours has none.
ENTRY, METHOD, SCHEME, KEEP = "quantization_config", "fastbert", "int8", "keep"


def int8_weights(module: nn.Module) -> list[torch.Tensor]:
    """The weights and biases of int8 layers, which are no parameters."""
    leaves = [leaf for leaf in module.modules() if isinstance(leaf, QuantizedLinear)]
    return [t for leaf in leaves for t in (leaf.weight, leaf.bias) if t is not None]


def entry_of(root: nn.Module, config: EncoderConfig) -> dict[str, Any] | None:
    """What config.json holds under ENTRY, with the layers that are not int8 in KEEP; None where no layer is."""
    paths = linear_paths(config)
    kept = [path for path in paths if not isinstance(get_leaf(root, path), QuantizedLinear)]
    return None if len(kept) == len(paths) else {METHOD: SCHEME, KEEP: kept}


def place_int8(root: nn.Module, config: EncoderConfig) -> bool:
    """Put empty int8 layers into a base model where its config's entry asks for them; whether it does for any.

    Raises ConfigError: the entry is another library's, or names a layer that is not there.
    """
    entry = config.extra.get(ENTRY)
    if entry is None:
        return False
    if not isinstance(entry, Mapping) or entry.get(METHOD) != SCHEME or not isinstance(entry.get(KEEP), list):
        raise ConfigError(f"{ENTRY} is {entry!r}; fastbert reads what fastbert.quantize has written, and no other")
    paths = linear_paths(config)
    if unknown := [path for path in entry[KEEP] if path not in paths]:
        raise ConfigError(f"{ENTRY} keeps {unknown[0]!r}, which is no layer of the model")
    for path in paths:
        if path not in entry[KEEP]:
            leaf = get_leaf(root, path)
            assert isinstance(leaf, nn.Linear)
            like = {"device": leaf.weight.device, "dtype": leaf.weight.dtype}
            set_module(root, path, QuantizedLinear(leaf.in_features, leaf.out_features, leaf.bias is not None, **like))
    return len(entry[KEEP]) < len(paths)


def is_quantized(model: nn.Module) -> bool:
    return any(isinstance(module, QuantizedLinear) for module in model.modules())


def linears_of(model: nn.Module, keep: Iterable[str] = ()) -> dict[str, nn.Linear]:
    """The Linear leaves of the layers, by name, without those that `keep` names. Raises ConfigError."""
    names = {
        f"{name}.{path}".removeprefix("."): get_leaf(root, path)
        for name, root, config in base_models(model)
        for path in linear_paths(config)
    }
    matches = {pattern: [name for name in names if _names(pattern, name)] for pattern in keep}
    for pattern, matched in matches.items():
        if not matched:
            raise ConfigError(f"keep: {pattern!r} names no layer; they are called {', '.join(list(names)[:6])}, ...")
    leaves: dict[str, nn.Linear] = {}
    for name, leaf in names.items():
        if any(name in matched for matched in matches.values()):
            continue
        if isinstance(leaf, QuantizedLinear):
            raise ConfigError(f"{name} is int8 already")
        if not is_plain(leaf, nn.Linear):
            raise ConfigError(
                f"{name} is a {type(leaf).__name__} with hooks or a forward of its own, or no nn.Linear: merge adapters"
                " and remove hooks first, or keep it"
            )
        if not torch.isfinite(leaf.weight).all():
            raise ConfigError(f"{name} has a weight that is not finite")
        leaves[name] = leaf
    return leaves


def _names(pattern: str, name: str) -> bool:
    """Whether `pattern` matches a module's name, or that of a module which holds it."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[: i + 1]), pattern) for i in range(len(parts)))


def make_int8(model: nn.Module, leaves: dict[str, nn.Linear], scales: Mapping[str, float]) -> None:
    """Put int8 layers in the places of `leaves`, which is emptied meanwhile: each old weight is freed at once.

    The rest of the model becomes frozen, in eval mode, and of the dtype that fits int8 layers on its device. `scales`:
    those of the inputs; without one a layer measures what it gets.
    """
    bases = list(base_models(model))
    device = next(iter(leaves.values())).weight.device if leaves else torch.device("cpu")
    for _, root, _ in bases:
        forget_all(root)
    with torch.inference_mode(False):  # tensors made in inference mode keep no version of what is written to them
        for name in list(leaves):
            set_module(model, name, QuantizedLinear.from_linear(leaves.pop(name), scales.get(name, 0.0)))
        model.to(_companion_dtype(device)).requires_grad_(False).eval()
    give_back()
    for _, root, config in bases:
        entry = entry_of(root, config)
        if entry is not None and not isinstance(root, RunsBaseModel):
            setattr(root.config, ENTRY, entry)  # which is what transformers' save_pretrained writes


def _companion_dtype(device: torch.device) -> torch.dtype:
    """What a model computes in between its int8 layers: bfloat16, but never an emulated one."""
    return torch.bfloat16 if ops.multiplies_bf16(device) else torch.float32
