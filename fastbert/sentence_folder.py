"""A sentence-transformers folder: modules.json names modules, each in a folder of its own, in the order they run.

Transformer, then Pooling, then any of Dense, Normalize and Dropout. A plain encoder's folder, which has no
modules.json, is read as a Transformer with mean pooling, as sentence-transformers does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastbert.config import ConfigError, EncoderConfig, read_json
from fastbert.hub import CheckpointError, load_weights, read_weights, without_pooler
from fastbert.models.auto import FAMILIES
from fastbert.models.base import EncoderModel

POOLING_MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens")
# The flags of older folders; with several set the vectors are concatenated in this order.
_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_DENSE_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "Tanh": nn.Tanh,
    "Identity": nn.Identity,
    "ReLU": nn.ReLU,
    "GELU": nn.GELU,
    "Sigmoid": nn.Sigmoid,
}


@dataclass
class Recipe:
    """What follows the encoder: pooling modes, concatenated, then modules, (batch, width) -> (batch, other width).

    `prompts` are texts, by name, that may be put before every text.
    """

    pooling: tuple[str, ...] = ("mean",)
    modules: list[nn.Module] = field(default_factory=list)
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    prompt_is_pooled: bool = True


class Normalize(nn.Module):
    """x / ||x||, row by row, in fp32; a zero row stays zero."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.normalize(x.float(), dim=-1)


def _list_modules(root: Path) -> list[tuple[str, Path]]:
    """(class name, folder) of each module; empty for a folder without modules.json. Raises CheckpointError."""
    path = root / "modules.json"
    if not path.is_file():
        return []
    try:
        modules = [
            (entry["type"].rpartition(".")[2], entry["path"]) for entry in read_json(path, CheckpointError, list)
        ]
    except (TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is no list of modules with a type and a path: {error!r}") from None
    for _, folder in modules:
        if Path(folder).is_absolute() or ".." in Path(folder).parts:
            raise CheckpointError(f"{path} names the folder {folder!r}, which is not inside its own")
    return [(name, root / folder) for name, folder in modules]


def transformer_folder(root: Path) -> Path:
    """Where config.json, weights and tokenizer are. Raises ConfigError if the first module is no Transformer."""
    modules = _list_modules(root)
    if not modules:
        return root
    name, folder = modules[0]
    if name != "Transformer":
        raise ConfigError(f"{root / 'modules.json'} starts with {name}; fastbert needs a Transformer there")
    return folder


def transformer_settings(folder: Path) -> dict[str, Any]:
    """sentence_bert_config.json, or what older releases called it; max_seq_length is None where no file has one."""
    path = next(iter(sorted(folder.glob("sentence_*_config.json"))), folder / "sentence_bert_config.json")
    length = _optional_json(folder / "tokenizer_config.json").get("model_max_length")
    settings = {"max_seq_length": length and int(length), **_optional_json(path)}
    if (task := settings.get("transformer_task", "feature-extraction")) != "feature-extraction":
        raise ConfigError(f"{path} has transformer_task {task!r}; fastbert has 'feature-extraction'")
    return settings


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path, CheckpointError) if path.is_file() else {}


def load_encoder(folder: Path, source: str, dtype: torch.dtype | None) -> EncoderModel:
    """The encoder without its pooler, which no sentence vector goes through."""
    config = EncoderConfig.from_file(folder / "config.json")
    with torch.device("meta"):
        model = FAMILIES[config.model_type](config, add_pooling_layer=False)
    load_weights(model, without_pooler(model, read_weights(folder)), source, dtype)
    return model.requires_grad_(False)


def read_recipe(root: Path, hidden_size: int) -> Recipe:
    """What follows the Transformer. Raises ConfigError, naming the folder, for a module that fastbert does not have."""
    recipe, modules = Recipe(), _list_modules(root)
    if modules:
        names = [name for name, _ in modules]
        if names[1:2] != ["Pooling"]:
            raise ConfigError(f"{root / 'modules.json'} has {', '.join(names)}; fastbert needs Pooling in second place")
        entries = read_json(modules[1][1] / "config.json", CheckpointError)
        recipe.pooling = _pooling_modes(modules[1][1], entries)
        recipe.prompt_is_pooled = entries.get("include_prompt", True)
    width = hidden_size * len(recipe.pooling)
    for name, folder in modules[2:]:
        if name == "Normalize":
            recipe.modules.append(Normalize())
        elif name == "Dense":
            linear, activation = _read_dense(folder, width)
            recipe.modules += [linear, activation]
            width = linear.out_features
        elif name != "Dropout":  # nothing at inference
            raise ConfigError(f"{folder} is a {name}; fastbert has Transformer, Pooling, Dense, Normalize and Dropout")
    settings = _optional_json(root / "config_sentence_transformers.json")
    recipe.prompts = {name: text or "" for name, text in (settings.get("prompts") or {}).items()}
    recipe.default_prompt_name = settings.get("default_prompt_name")
    return recipe


def _pooling_modes(folder: Path, entries: dict[str, Any]) -> tuple[str, ...]:
    """From today's `pooling_mode`, a name or a list of them, or from the flags of older folders."""
    path, named = folder / "config.json", entries.get("pooling_mode")
    flagged = [mode for flag, mode in _POOLING_FLAGS.items() if entries.get(flag)]
    modes = tuple(flagged or ["mean"]) if named is None else (named,) if isinstance(named, str) else tuple(named)
    for mode in modes:
        if mode not in POOLING_MODES:
            raise ConfigError(f"{path}: pooling mode {mode!r}; fastbert has: {', '.join(POOLING_MODES)}")
    return modes


def _read_dense(folder: Path, width: int) -> tuple[nn.Linear, nn.Module]:
    """x -> activation(weight x + bias). Raises ConfigError, naming the module's folder, for anything more."""
    entries = read_json(folder / "config.json", CheckpointError)
    activation = str(entries.get("activation_function", "torch.nn.modules.activation.Tanh"))
    kind = activation.rpartition(".")[2]
    if not activation.startswith("torch.nn.") or kind not in _DENSE_ACTIVATIONS:
        raise ConfigError(f"{folder} has activation {activation!r}; fastbert has: {', '.join(_DENSE_ACTIVATIONS)}")
    vector = "sentence_embedding"
    plain = {"use_residual": False, "module_input_name": vector, "module_output_name": vector, "in_features": width}
    for name, only in plain.items():
        if entries.get(name) not in (only, None):
            raise ConfigError(f"{folder} is a Dense with {name} {entries[name]!r}; fastbert takes {only!r} here")
    weights = {key.removeprefix("linear."): tensor for key, tensor in read_weights(folder).items()}
    try:
        linear = nn.Linear(width, entries["out_features"], bias=entries.get("bias", True))
        linear.load_state_dict(weights)
    except (RuntimeError, KeyError) as error:
        raise CheckpointError(f"{folder}: the config contradicts the weights: {' '.join(str(error).split())}") from None
    return linear, _DENSE_ACTIVATIONS[kind]()
