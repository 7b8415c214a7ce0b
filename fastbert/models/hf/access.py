"""Methods that transformers' models have besides from_pretrained and forward, for its users and tools."""

from __future__ import annotations

from typing import Any

from torch import nn

from fastbert.errors import ConfigError
from fastbert.layers.leaves import get_leaf, set_module
from fastbert.layers.resizing import resize_rows
from fastbert.models.hf.methods import TheirMethods


class ModelAccess(TheirMethods):
    """What every model class has: its tables, gradient checkpointing, counts."""

    @property
    def base_model(self) -> Any:
        raise NotImplementedError

    def tie_weights(self) -> None:
        """Make weights that share one tensor share it again; a no-op where nothing is tied."""

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        tables = {id(p) for m in self.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
        skipped = tables if exclude_embeddings else set()
        return sum(p.numel() for p in self.parameters() if id(p) not in skipped and p.requires_grad >= only_trainable)

    def get_input_embeddings(self) -> nn.Module:
        return get_leaf(self.base_model, self.config.embeddings.word)

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the word table. As in transformers, what is tied to it follows with `tie_weights`."""
        set_module(self.base_model, self.config.embeddings.word, value)

    def get_output_embeddings(self) -> nn.Module | None:
        """The decoder over words; None where a model has none."""
        return None

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """Give the word table, and the decoder over words if there is one, other rows; the table.

        Args:
            new_num_tokens: how many; None keeps them, or rounds them up.
            pad_to_multiple_of: round up to a multiple of it.
            mean_resizing: draw new rows around the mean of the old, else around 0 with initializer_range.
        """
        word = self.get_input_embeddings()
        if not isinstance(word, nn.Embedding):
            raise TypeError(f"the word table is a {type(word).__name__}; only an nn.Embedding can be resized")
        rows = word.weight.shape[0] if new_num_tokens is None else new_num_tokens
        if pad_to_multiple_of is not None:
            rows = -(-rows // pad_to_multiple_of) * pad_to_multiple_of
        if rows != word.weight.shape[0]:
            self.config.set_checked(vocab_size=rows)  # first: it is this that says no
            self.vocab_size = rows  # as in transformers, which has it from then on
            std = None if mean_resizing else self.config.initializer_range
            resize_rows(word, rows, std)
            self.resize_decoder(rows, std)
            self.tie_weights()
        return word

    def resize_decoder(self, rows: int, std: float | None) -> None:
        """Of a model that has one; `std` as in `resize_rows`."""

    def get_position_embeddings(self) -> nn.Module:
        """The table of positions. Raises ConfigError where a family has none (rotary positions, relative ones)."""
        path = self.config.embeddings.position
        if path is None:
            raise ConfigError(f"{self.config.model_type} has no table of positions")
        return get_leaf(self.base_model, path)

    def resize_position_embeddings(self, new_num_position_embeddings: int) -> None:
        """Give the table of positions other rows: the first stay, new ones are drawn with initializer_range."""
        table = self.get_position_embeddings()
        if not isinstance(table, nn.Embedding):
            raise TypeError(f"the table of positions is a {type(table).__name__}; only an nn.Embedding can be resized")
        if new_num_position_embeddings != table.weight.shape[0]:
            self.config.set_checked(
                max_position_embeddings=new_num_position_embeddings
            )  # first: it is this that says no
            resize_rows(table, new_num_position_embeddings, self.config.initializer_range)

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: dict | None = None, every_n_layers: int = 1, offload: bool = False
    ) -> None:
        """Keep only each layer's input for backward and run the layer again there (Chen et al. 2016).

        The arguments are transformers'. Of them, re-entrant checkpointing, which loses gradients, is not offered, nor
        are some layers only (`every_n_layers`) and inputs that wait in another memory (`offload`).
        """
        if (activation_checkpointing_kwargs or {}).get("use_reentrant"):
            raise ValueError("use_reentrant=True is not supported; leave it out")
        if every_n_layers != 1 or offload:
            raise ValueError(f"every_n_layers={every_n_layers} and offload={offload} are not supported; leave them out")
        self.base_model.gradient_checkpointing = True

    def activation_checkpointing_disable(self) -> None:
        self.base_model.gradient_checkpointing = False

    @property
    def is_activation_checkpointing(self) -> bool:
        return self.base_model.gradient_checkpointing

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict | None = None, **options: Any) -> None:
        """The name of `activation_checkpointing_enable` before transformers 5.23; both are in use."""
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs, **options)

    gradient_checkpointing_disable = activation_checkpointing_disable
    is_gradient_checkpointing = is_activation_checkpointing
    supports_gradient_checkpointing = True
