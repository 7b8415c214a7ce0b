"""What a SentenceEncoder, a Reranker and a SparseEncoder share: a model, its tokenizer, their lengths and devices."""

from __future__ import annotations

from typing import ClassVar

import torch
from tokenizers import Tokenizer

from fastbert.config import ConfigError
from fastbert.data.sentence_folder import Settings
from fastbert.models.base import HasModel, PreTrainedModel
from fastbert.packing import InputError
from fastbert.sentences.batches import BATCH_TOKENS


class TextModel(HasModel):
    """A model in eval mode, and a tokenizer that cuts texts to `max_seq_length` tokens."""

    is_pair: ClassVar[bool] = False  # two texts are one input
    default_prompts: ClassVar[tuple[str, ...]] = ()  # that every model has: empty ones, unless its folder says more

    def __init__(
        self, model: PreTrainedModel, tokenizer: Tokenizer, max_seq_length: int, settings: Settings | None = None
    ):
        settings = Settings() if settings is None else settings
        tokenizer.no_padding()
        self.model, self.tokenizer = model.eval(), tokenizer
        self.max_seq_length = max_seq_length
        self.prompts = dict.fromkeys(self.default_prompts, "") | settings.prompts
        self.default_prompt_name = settings.default_prompt_name

    @property
    def max_seq_length(self) -> int:
        """Longer texts are cut to so many tokens, special ones included."""
        return self._max_seq_length

    @max_seq_length.setter
    def max_seq_length(self, length: int) -> None:
        limit, added = position_limit(self.model), self.tokenizer.num_special_tokens_to_add(self.is_pair)
        if not added < length <= limit:
            raise ConfigError(f"max_seq_length is {length}; this model allows {added + 1} to {limit} tokens")
        self.tokenizer.enable_truncation(length)
        self._max_seq_length = length

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def default_batch_tokens(self) -> int:
        return BATCH_TOKENS["cpu" if self.device.type == "cpu" else "cuda"]

    def prompt(self, name: str | None = None, text: str | None = None) -> str:
        """The prompt: `text`, or the one called `name`, or the default. Raises InputError if a name is unknown."""
        if text is not None and name is not None:
            raise InputError(f"prompt {text!r} and prompt_name {name!r} exclude each other")
        name = self.default_prompt_name if name is None else name
        if text is None and name is not None and name not in self.prompts:
            raise InputError(f"unknown prompt {name!r}; this model has: {', '.join(self.prompts) or 'no prompts'}")
        return text if text is not None else self.prompts[name] if name is not None else ""

    def batch_tokens(self, given: int | None) -> int:
        """The budget of a batch. Raises InputError for one below 1."""
        if given is not None and given < 1:
            raise InputError(f"batch_tokens is {given}; it must be at least 1")
        return self.default_batch_tokens if given is None else given


def position_limit(model: PreTrainedModel) -> int:
    """The longest sequence, in tokens, that the position table has room for; without one, what the config names."""
    limit = model.base_model.table_sizes().longest(model.config)
    return model.config.max_position_embeddings if limit is None else limit


def pick_device(device: torch.device | str | None) -> torch.device:
    """`device`, or CUDA where there is a GPU, else the CPU. Raises ConfigError for one that is not there."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        picked = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {device!r}: {str(error).splitlines()[0]}") from None
    gpu = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if gpu is not None else 0
    if picked.type != "cpu" and (gpu is None or picked.type != gpu.type or (picked.index or 0) >= count):
        there = "the CPU only" if gpu is None else f"the CPU and {count} of {gpu.type}"
        raise ConfigError(f"device {device!r} is not there: torch {torch.__version__} sees {there}")
    return picked
