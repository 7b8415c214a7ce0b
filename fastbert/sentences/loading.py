"""What is said where a model for sentences is loaded: sentence-transformers' names, with its meaning or one error."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch
from tokenizers import Tokenizer

from fastbert.checkpoint.arguments import check_format, chosen_device, left_over
from fastbert.checkpoint.dtypes import NAMES, parse_dtype
from fastbert.checkpoint.tokenizer_files import SETTINGS
from fastbert.checkpoint.weight_files import some
from fastbert.data.sentence_folder import (
    FolderSettings,
    check_alone,
    is_colbert_ai,
    read_settings,
    transformer_folder,
    transformer_settings,
)
from fastbert.data.tokenization import load_cutting_tokenizer
from fastbert.errors import CheckpointError, ConfigError
from fastbert.hub import HubOptions, resolve
from fastbert.models.base import PreTrainedModel
from fastbert.models.quantized import is_quantized, linears_of, make_int8
from fastbert.sentences.batches import check_text
from fastbert.sentences.text_model import pick_device, position_limit


class LoadArguments(TypedDict, total=False):
    """What every constructor and `from_pretrained` of a model for sentences takes beside a name.

    dtype: a torch dtype or its name. "auto" keeps the checkpoint's own; "int8" quantises it.
    device: where to run. The default is CUDA if there is a GPU, else the CPU.
    max_seq_length: longer inputs are cut to so many tokens, special ones included. Default: the folder's.
    prompts, default_prompt_name: added to the folder's prompts; which of them every text gets.
    revision, token, local_files_only, force_download, subfolder; cache_folder or cache_dir: for what is on the hub.
    model_kwargs: dtype or torch_dtype, device_map, use_safetensors, attn_implementation, as in transformers.
    processor_kwargs, or tokenizer_kwargs: model_max_length, truncation_side, do_lower_case, as in transformers.
    config_kwargs: entries of the config to change.
    backend: "torch", and trust_remote_code: False. Others are refused: no code from a checkpoint ever runs.
    """

    dtype: torch.dtype | str | None
    device: torch.device | str | None
    max_seq_length: int | None
    prompts: Mapping[str, str] | None
    default_prompt_name: str | None
    cache_folder: str | os.PathLike[str] | None
    cache_dir: str | os.PathLike[str] | None
    revision: str | None
    token: bool | str | None
    local_files_only: bool
    force_download: bool
    subfolder: str
    trust_remote_code: bool
    model_kwargs: Mapping[str, Any] | None
    processor_kwargs: Mapping[str, Any] | None
    tokenizer_kwargs: Mapping[str, Any] | None
    config_kwargs: Mapping[str, Any] | None
    backend: str


_HUB = ("revision", "token", "local_files_only", "force_download", "subfolder", "cache_dir")
_OF_MODEL = ("dtype", "torch_dtype", "device_map", "use_safetensors")
_OF_TOKENIZER = ("model_max_length", "truncation_side", "do_lower_case")
# What says nothing to a tokenizer of ours: nothing is padded, and there is one kind.
_WITHOUT_EFFECT = ("padding_side", "use_fast", "clean_up_tokenization_spaces")


@dataclass
class Opened:
    """A folder whose files were found and whose settings were read, before its weights are."""

    name: str  # what it was loaded from, as the caller wrote it
    root: Path
    folder: Path  # of the transformer in it
    settings: FolderSettings
    device: torch.device
    dtype: torch.dtype | None  # None: the checkpoint's own
    int8: bool
    config: dict[str, Any]  # entries of it to change
    given_length: int | None
    tokenizer_entries: dict[str, Any]  # entries of tokenizer_config.json to change

    def quantised(self, model: PreTrainedModel) -> PreTrainedModel:
        """The model under its name and on its device, frozen, in int8 where that is asked for."""
        model.name_or_path = model.config.name_or_path = self.name
        model.requires_grad_(False).to(self.device)
        if self.int8 and not is_quantized(model):
            make_int8(model, linears_of(model), {})
        return model

    def tokenizer(self) -> Tokenizer:
        return load_cutting_tokenizer(
            self.folder, lowercase=self.settings.transformer.lowercase, overrides=self.tokenizer_entries
        )

    def whole(self, auto: Any, what: str) -> Any:
        """The model of an Auto class, all of whose weights are there. Raises CheckpointError: the folder is no `what`,
        for some are not.
        """
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model = auto.from_pretrained(self.folder, dtype=self.dtype or "auto", **self.config)
        if model.missing_keys:
            raise CheckpointError(
                f"{self.root} is no {what}: its checkpoint lacks {some(model.missing_keys)}, and random weights say"
                " nothing"
            )
        for one in said:
            warnings.warn(one.message, stacklevel=4)
        return self.quantised(model)

    def length(self, model: PreTrainedModel) -> int:
        if self.given_length is not None:
            return self.given_length
        limit = position_limit(model)
        return min(self.settings.transformer.max_seq_length or limit, limit)


def open_folder(
    name_or_path: str | os.PathLike[str],
    task: str,
    organisation: str | None,
    options: Mapping[str, Any],
    kinds: tuple[str, ...] = ("Transformer",),
    expands_queries: bool = False,
) -> Opened:
    """Find the folder of a name, read its settings, and put together with them what the caller says.

    `organisation`: where the hub has what is named without one. Raises TypeError for an argument that is unknown,
    CheckpointError and ConfigError.
    """
    if unknown := [name for name in options if name not in LoadArguments.__annotations__]:
        raise TypeError(f"unknown argument {unknown[0]!r}; there are: {', '.join(LoadArguments.__annotations__)}")
    if options.get("backend", "torch") != "torch":
        raise ConfigError(f"backend={options['backend']!r} is not supported: fastbert has its own kernels")
    model_kwargs, config = _of_model(options, "model_kwargs"), _of_config(options)
    device_option = options.get("device")
    if model_kwargs.get("device_map") is not None:
        device_option = chosen_device(device_option, model_kwargs["device_map"])
    device = pick_device(device_option)
    root = resolve(name_or_path, options=_hub_options({**model_kwargs, **options}), organisation=organisation)
    folder = transformer_folder(root, kinds)
    check_format(folder, model_kwargs.get("use_safetensors"))
    transformer = transformer_settings(folder, task, expands_queries)
    if task == "sequence-classification":
        check_alone(root)
    if not expands_queries and is_colbert_ai(folder):
        raise ConfigError(f"{folder} is ColBERT's, a vector for each token: fastbert.MultiVectorEncoder loads it")
    own = _of_model(transformer.handed_on, "model_kwargs")
    dtype = _dtype(_dtype(options.get("dtype", "auto"), model_kwargs), own, overrides=True)
    cut = transformer.handed_on.get("processor_kwargs", {})
    for name in ("processor_kwargs", "tokenizer_kwargs"):
        cut = {**cut, **(options.get(name) or {})}
    length, tokenizer_entries = _of_tokenizer(cut)
    transformer.max_seq_length = transformer.max_seq_length if length is None else length
    settings = read_settings(root, folder, transformer)
    settings.tokenizer_files[SETTINGS] = settings.tokenizer_files.get(SETTINGS, {}) | tokenizer_entries
    prompts = dict(options.get("prompts") or {})
    for name, text in prompts.items():
        check_text(f"prompts[{name!r}]", text)
    settings.prompts |= prompts
    prompt_name = options.get("default_prompt_name")
    settings.default_prompt_name = settings.default_prompt_name if prompt_name is None else prompt_name
    int8 = dtype in ("int8", torch.int8)
    return Opened(
        name=str(name_or_path),
        root=root,
        folder=folder,
        settings=settings,
        device=device,
        dtype=None if int8 else parse_dtype(dtype, ("int8",)),
        int8=int8,
        config={**_of_config(transformer.handed_on), **config},
        given_length=options.get("max_seq_length"),
        tokenizer_entries=tokenizer_entries,
    )


def _of_model(options: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What is handed to a model's `from_pretrained`. Raises ConfigError for what fastbert does not have."""
    refused = left_over({"trust_remote_code": options.get("trust_remote_code")})
    arguments = dict(options.get(name) or {})
    kept = {key: arguments.pop(key) for key in (*_OF_MODEL, *_HUB) if key in arguments}
    arguments.pop("add_pooling_layer", None)  # no sentence vector goes through it
    if others := [*left_over(arguments), *refused]:
        raise ConfigError(f"{name} has {others[0]!r}; fastbert has: {', '.join((*_OF_MODEL, 'attn_implementation'))}")
    return kept


def _of_config(options: Mapping[str, Any]) -> dict[str, Any]:
    entries = {key: value for key, value in (options.get("config_kwargs") or {}).items() if key not in _HUB}
    return left_over(entries)


def _dtype(dtype: Any, model_kwargs: Mapping[str, Any], *, overrides: bool = False) -> Any:
    """Of `dtype` and of model_kwargs, which must say the same, unless `dtype` `overrides` them."""
    named = model_kwargs.get("dtype") or model_kwargs.get("torch_dtype") or "auto"
    if dtype == "auto":
        return named
    names = [str(NAMES.get(each, each)) for each in (named, dtype)]
    if not overrides and named != "auto" and names[0] != names[1]:
        raise ConfigError(f"dtype={dtype!r} and the dtype {named!r} of model_kwargs contradict each other")
    return dtype


def _of_tokenizer(arguments: Mapping[str, Any]) -> tuple[int | None, dict[str, Any]]:
    """The length, and the other entries of tokenizer_config.json to change. Raises ConfigError."""
    length, side, lowercase = (arguments.get(name) for name in _OF_TOKENIZER)
    for name in arguments:
        if name not in (*_OF_TOKENIZER, *_HUB, *_WITHOUT_EFFECT, "trust_remote_code"):
            raise ConfigError(f"processor_kwargs has {name!r}; fastbert has: {', '.join(_OF_TOKENIZER)}")
    left_over({"trust_remote_code": arguments.get("trust_remote_code")})
    if length is not None and (type(length) is not int or length < 1):
        raise ConfigError(f"model_max_length is {length!r}; it must be a whole number of at least 1")
    if side not in (None, "left", "right"):
        raise ConfigError(f"truncation_side is {side!r}; it must be left or right")
    if lowercase not in (None, True, False):
        raise ConfigError(f"do_lower_case is {lowercase!r}; it must be True or False")
    return length, {name: arguments[name] for name in _OF_TOKENIZER[1:] if arguments.get(name) is not None}


def _hub_options(options: Mapping[str, Any]) -> HubOptions:
    folders = {str(options[name]) for name in ("cache_folder", "cache_dir") if options.get(name) is not None}
    if len(folders) > 1:
        raise ConfigError(f"cache_folder and cache_dir say the same: give one of {' and '.join(sorted(folders))}")
    chosen = {name: options[name] for name in _HUB if options.get(name) is not None}
    return HubOptions(**{**chosen, **({"cache_dir": folders.pop()} if folders else {})})
