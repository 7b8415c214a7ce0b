"""The Auto classes. They choose the class of a model by the model_type of its checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch

from fastbert.checkpoint.arguments import given_config, left_over
from fastbert.checkpoint.pretrained import (
    check_layers,
    load_weights,
    read_checkpoint,
    read_config,
    without_pooler,
)
from fastbert.checkpoint.unfilled import unfilled
from fastbert.config import EncoderConfig
from fastbert.errors import ConfigError
from fastbert.families import FAMILIES
from fastbert.hub import HubOptions, resolve
from fastbert.models.base import EncoderModel, PreTrainedModel
from fastbert.models.classes import CLASSES
from fastbert.models.classifiers import (
    ForMultipleChoice,
    ForQuestionAnswering,
    ForSequenceClassification,
    ForTokenClassification,
)
from fastbert.models.heads import HeadModel
from fastbert.models.masked_lm import ForMaskedLM, ForNextSentencePrediction


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
    return {cls.__name__: cls for (family, _), cls in CLASSES.items() if family == model_type}


def base_class(model_type: str) -> type[EncoderModel]:
    return CLASSES[model_type, "Model"]  # type: ignore[return-value]


def load_encoder(
    folder: Path,
    source: str,
    dtype: torch.dtype | None,
    config_changes: dict[str, Any] | None = None,
    others: tuple[str, ...] = (),
) -> EncoderModel:
    """A folder's encoder without its pooler, which no sentence vector goes through; frozen. Errors name `source`.

    others: keys of the checkpoint that the caller reads.
    """
    config, weights = read_checkpoint(folder)
    weights = {key: t for key, t in weights.items() if key not in others}
    config = config.replace(**config_changes) if config_changes else config
    check_layers(config, weights, source)
    with unfilled():
        model = base_class(config.model_type)(config, add_pooling_layer=False)
    load_weights(model, without_pooler(model, weights), source, dtype)
    return model.requires_grad_(False)


Model = TypeVar("Model", bound=PreTrainedModel)


class AutoConfig:
    """The config of a folder or hub id: an EncoderConfig, whatever the family."""

    @staticmethod
    def from_pretrained(pretrained_model_name_or_path: str | os.PathLike[str], **options: Any) -> EncoderConfig:
        """Read config.json; options of the hub (`revision`, `token`, ...), and entries to change (`num_labels=3`)."""
        return EncoderConfig.from_pretrained(pretrained_model_name_or_path, **left_over(options))


class _Auto(Generic[Model]):
    head: ClassVar[str] = "Model"

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], *, config: Any = None, **options: Any
    ) -> Model:
        """Load the model that config.json describes. The options are those of a model class's `from_pretrained`."""
        left_over(options)  # refuses before anything is fetched
        hub = {name: options.pop(name) for name in HubOptions.__dataclass_fields__ if name in options}
        folder = resolve(pretrained_model_name_or_path, options=HubOptions(**hub))
        described = given_config(config) or read_config(folder)
        loaded = model_class(described.model_type, cls.head).from_pretrained(folder, config=config, **options)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.name_or_path = model.config.name_or_path = str(pretrained_model_name_or_path)
        return loaded  # type: ignore[return-value]

    @classmethod
    def from_config(cls, config: Any, **options: Any) -> Model:
        """A model with new, random weights, of a config of ours or of transformers."""
        described = given_config(config)
        assert described is not None
        return model_class(described.model_type, cls.head).from_config(described, **options)  # type: ignore[return-value]


class AutoModel(_Auto[EncoderModel]):
    pass


class AutoModelForMaskedLM(_Auto[ForMaskedLM]):
    head = "MaskedLM"


class AutoModelForPreTraining(_Auto[HeadModel]):
    head = "PreTraining"


class AutoModelForNextSentencePrediction(_Auto[ForNextSentencePrediction]):
    head = "NextSentencePrediction"


class AutoModelForSequenceClassification(_Auto[ForSequenceClassification]):
    head = "SequenceClassification"


class AutoModelForTokenClassification(_Auto[ForTokenClassification]):
    head = "TokenClassification"


class AutoModelForQuestionAnswering(_Auto[ForQuestionAnswering]):
    head = "QuestionAnswering"


class AutoModelForMultipleChoice(_Auto[ForMultipleChoice]):
    head = "MultipleChoice"
