"""The layers of a model that are int8, and the entry of config.json that says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fastbert.config import ConfigError, EncoderConfig
from fastbert.layers.leaves import get_leaf, place
from fastbert.layers.quantized import QuantizedLinear
from fastbert.models.family import Family

# Where transformers, too, looks for how a checkpoint was quantised. A quant_method that it does not know makes it warn
# and read the integers as weights; an entry without one makes it raise. So ours has none.
ENTRY, METHOD, SCHEME, KEEP = "quantization_config", "fastbert", "int8", "keep"


def entry_of(root: nn.Module, family: Family, config: EncoderConfig) -> dict[str, Any] | None:
    """What config.json holds under ENTRY, with the layers that are not int8 in KEEP; None where no layer is."""
    paths = family.linear_paths(config)
    kept = [path for path in paths if not isinstance(get_leaf(root, path), QuantizedLinear)]
    return None if len(kept) == len(paths) else {METHOD: SCHEME, KEEP: kept}


def place_int8(root: nn.Module, family: Family, config: EncoderConfig) -> bool:
    """Put empty int8 layers into a base model where its config's entry asks for them; whether it does for any.

    Raises ConfigError: the entry is another library's, or names a layer that is not there.
    """
    entry = config.extra.get(ENTRY)
    if entry is None:
        return False
    if not isinstance(entry, Mapping) or entry.get(METHOD) != SCHEME or not isinstance(entry.get(KEEP), list):
        raise ConfigError(f"{ENTRY} is {entry!r}; fastbert reads what fastbert.quantize has written, and no other")
    paths = family.linear_paths(config)
    if unknown := [path for path in entry[KEEP] if path not in paths]:
        raise ConfigError(f"{ENTRY} keeps {unknown[0]!r}, which is no layer of the model")
    for path in paths:
        if path not in entry[KEEP]:
            leaf = get_leaf(root, path)
            assert isinstance(leaf, nn.Linear)
            like = {"device": leaf.weight.device, "dtype": leaf.weight.dtype}
            place(root, path, QuantizedLinear(leaf.in_features, leaf.out_features, leaf.bias is not None, **like))
    return len(entry[KEEP]) < len(paths)
