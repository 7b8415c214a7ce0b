"""The checkpoint that a fine-tuning starts from, with the head of its task; adapters of PEFT in it."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from fastbert.checkpoint.tokenizer_files import gives_types
from fastbert.checkpoint.weight_files import some
from fastbert.data.chunks import Windows
from fastbert.data.sentence_folder import FolderSettings, TransformerSettings, transformer_folder, transformer_settings
from fastbert.data.tokenization import load_cutting_tokenizer
from fastbert.errors import CheckpointError, ConfigError, InputError
from fastbert.hub import resolve
from fastbert.models.base import PreTrainedModel
from fastbert.sentences.documents import cutter_of
from fastbert.sentences.text_model import TextModel, position_limit
from fastbert.training.options import FinetuneOptions


def find_base(options: FinetuneOptions) -> Path:
    """The folder of --model. Raises ConfigError, CheckpointError."""
    if not options.model:
        raise ConfigError("model is missing: a folder, a hub id, or all-MiniLM-L6-v2")
    return transformer_folder(resolve(options.model))


def load_base(
    folder: Path, auto: Any, options: FinetuneOptions, config: dict[str, Any]
) -> tuple[PreTrainedModel, Tokenizer]:
    """A folder's model with the head of `auto`, in float32, and its tokenizer, which knows at which side to cut.

    `config`: entries that the task decides. Raises ConfigError: a head for other labels, or what is longer than the
    position table; CheckpointError.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a new head is what is wanted
        model = auto.from_pretrained(folder, dtype=torch.float32, ignore_mismatched_sizes=True, **config)
    model.name_or_path = model.config.name_or_path = options.model
    if model.mismatched_keys:
        key, stored, asked = model.mismatched_keys[0]
        raise ConfigError(
            f"{options.model} has {key} for {stored[0]} labels, and the data have {asked[0]}: start from a checkpoint"
            " without a head, or with the same labels"
        )
    inner = f"{model.family.prefix}."
    pooler = f"{inner}{model.family.pooler}."
    lacking = [key for key in model.missing_keys if key.startswith(inner) and not key.startswith(pooler)]
    if lacking:
        raise CheckpointError(
            f"{options.model} is no checkpoint of a {model.config.model_type}: it lacks {some(lacking)}"
        )
    tokenizer = load_cutting_tokenizer(folder, lowercase=transformer_settings(folder).lowercase)
    limit = position_limit(model)
    if options.max_length > limit:
        raise ConfigError(f"max_length is {options.max_length}; {options.model} has positions for {limit} tokens")
    if options.max_length <= (added := tokenizer.num_special_tokens_to_add(False)):
        raise ConfigError(f"max_length is {options.max_length}; the special tokens alone take {added}")
    return model, tokenizer


def settings_of(folder: Path) -> FolderSettings:
    """What a folder says of how its model is given texts."""
    return FolderSettings(transformer=TransformerSettings(gives_types=gives_types(folder)))


def check_stride(model: TextModel, windows: Windows) -> None:
    """Raises ConfigError: chunks would overlap by more than they have room for."""
    try:
        cutter_of(model, windows)
    except InputError as error:
        raise ConfigError(f"doc_stride is {windows.overlap}: {error}") from None


def say_notes(*notes: str) -> None:
    """Warn a user, once for all ranks, of what was made of the data; empty notes are none."""
    for note in notes:
        if note and os.environ.get("RANK", "0") == "0":
            warnings.warn(note, stacklevel=3)
