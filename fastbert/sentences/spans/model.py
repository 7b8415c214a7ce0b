"""What a TokenClassifier and a QuestionAnswerer share: a folder that was fine-tuned, and chunks of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from tokenizers import Tokenizer

from fastbert.data.chunks import Cutter, Windows
from fastbert.data.sentence_folder import FolderSettings
from fastbert.data.usage import Usage, read_usage
from fastbert.errors import ConfigError, InputError
from fastbert.models.base import PreTrainedModel
from fastbert.sentences.documents import cutter_of
from fastbert.sentences.loading import open_folder
from fastbert.sentences.text_model import TextModel, position_limit


class SpanModel(TextModel):
    """A model with a head over tokens, a tokenizer, and `windows`: how texts are cut unless a call says more."""

    task: ClassVar[str]  # as --task of fine-tuning
    what: ClassVar[str]  # that it is given, in messages
    transformer_task = "sequence-classification"  # sentence-transformers has none for spans
    usage: Usage

    def _load(self, auto: Any, name_or_path: str | os.PathLike[str], options: Mapping[str, Any]) -> None:
        opened = open_folder(name_or_path, self.transformer_task, None, options)
        usage = read_usage(opened.folder, str(name_or_path))
        if usage.task != self.task:
            raise ConfigError(f"{name_or_path} is no {self.what}: it is for {usage.task}")
        model = opened.whole(auto, self.what)
        length = opened.given_length or self.length_of(model, usage)
        self._assemble(model, opened.tokenizer(), length, opened.settings, usage)
        self.folder = opened.root

    def _assemble(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        max_seq_length: int,
        settings: FolderSettings | None = None,
        usage: Usage | None = None,
    ) -> None:
        super()._assemble(model, tokenizer, max_seq_length, settings)
        self.usage = Usage(self.task) if usage is None else usage
        self.has_types = self.settings.transformer.gives_types and model.base_model.table_sizes().has_types
        self.windows = self.own_windows()

    def saved_usage(self) -> Usage:
        return replace(self.usage, max_length=self.max_seq_length)

    @staticmethod
    def length_of(model: PreTrainedModel, usage: Usage) -> int:
        """Tokens of a chunk."""
        return usage.max_length or position_limit(model)

    def own_windows(self) -> Windows:
        """Those of the training; `max_seq_length` says their length. Raises ConfigError: there can be none."""
        return replace(self.usage.own_windows, length=None)

    def cutter(self, windows: Windows | None = None) -> Cutter:
        """By these chunks, or else by its own. Raises InputError."""
        windows = self.windows if windows is None else windows
        windows = Windows() if windows is None else windows
        if windows.pool not in (None, "first"):
            raise InputError(f"pool of windows is {windows.pool!r}, and spans have only 'first': the begin of a text")
        return cutter_of(self, windows)
