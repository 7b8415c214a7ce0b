"""The Auto classes. They choose the class of a model by the model_type of its checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from fastbert.checkpoint.pretrained import (
    check_layers,
    load_weights,
    read_checkpoint,
    read_config,
    resolve,
    without_pooler,
)
from fastbert.checkpoint.unfilled import unfilled
from fastbert.config import ConfigError, EncoderConfig
from fastbert.families import FAMILIES
from fastbert.models.base import EncoderModel, PreTrainedModel
from fastbert.models.classes import CLASSES


def model_class(model_type: str, head: str = "Model") -> type[PreTrainedModel]:
    """The class of a family's base model ("Model") or head. Raises ConfigError, with the ones there are."""
    if (model_type, head) not in CLASSES:
        heads = ", ".join(h for m, h in sorted(CLASSES) if m == model_type and h != "Model")
        if heads:
            raise ConfigError(f"{model_type} has no head {head}; it has: {heads}")
        raise ConfigError(f"unknown model_type {model_type!r}; fastbert has: {', '.join(sorted(FAMILIES))}")
    return CLASSES[model_type, head]


def model_classes(model_type: str) -> dict[str, type[PreTrainedModel]]:
    """A family's classes, by their names in the `architectures` of a config.json."""
    return {kind.__name__: kind for (family, _), kind in CLASSES.items() if family == model_type}


def base_class(model_type: str) -> type[EncoderModel]:
    return CLASSES[model_type, "Model"]  # type: ignore[return-value]


def load_encoder(folder: Path, source: str, dtype: torch.dtype | None) -> EncoderModel:
    """A folder's encoder without its pooler, which no sentence vector goes through; frozen. Errors name `source`."""
    config, weights = read_checkpoint(folder)
    check_layers(config, weights, source)
    with unfilled():
        model = base_class(config.model_type)(config, add_pooling_layer=False)
    load_weights(model, without_pooler(model, weights), source, dtype)
    return model.requires_grad_(False)


class _Auto:
    head = "Model"

    @classmethod
    def from_pretrained(cls, name_or_path: str | os.PathLike, **options: Any) -> Any:
        """Load the model that config.json describes. The options are those of a model class's `from_pretrained`."""
        folder = resolve(name_or_path)
        config = options.get("config") or read_config(folder)
        return model_class(config.model_type, cls.head).from_pretrained(folder, **options)

    @classmethod
    def from_config(cls, config: EncoderConfig) -> Any:
        """A model with new, random weights."""
        return model_class(config.model_type, cls.head)(config)


class AutoModel(_Auto):
    pass


class AutoModelForMaskedLM(_Auto):
    head = "MaskedLM"


class AutoModelForPreTraining(_Auto):
    head = "PreTraining"


class AutoModelForNextSentencePrediction(_Auto):
    head = "NextSentencePrediction"


class AutoModelForSequenceClassification(_Auto):
    head = "SequenceClassification"


class AutoModelForTokenClassification(_Auto):
    head = "TokenClassification"


class AutoModelForQuestionAnswering(_Auto):
    head = "QuestionAnswering"


class AutoModelForMultipleChoice(_Auto):
    head = "MultipleChoice"
