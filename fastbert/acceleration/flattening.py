"""Batches without padding for sentence-transformers' trainers, over a model that fastbert.accelerate has sped up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fastbert.acceleration.forward import Forward
from fastbert.acceleration.instance import argument_names, put_by_us
from fastbert.errors import ConfigError

# Of a batch in one row, under transformers' names (FlashAttentionKwargs); sentence-transformers' pooling reads them.
_OFFSETS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


class SentencePackingCollator:
    """A `data_collator` for SentenceTransformerTrainer: a column's texts become one row of tokens, without padding.

    It does what sentence-transformers' own collator does (prompts, labels, task lengths), with the model's own
    tokenizer. The losses are those of padded batches, to rounding.

    Args:
        model: a SentenceTransformer, after `fastbert.accelerate(model)`.
        options: of sentence-transformers' collator: `prompts`, `router_mapping`, `max_length`, `valid_label_columns`.

    Raises ConfigError: the model is not accelerated, or not a Transformer with a Pooling behind it.
    """

    def __init__(self, model: Any, **options: Any):
        from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator

        self.preprocess = _Flatten(model)
        self.theirs = SentenceTransformerDataCollator(preprocess_fn=self.preprocess, **options)
        self.valid_label_columns = self.theirs.valid_label_columns  # the trainer asks for them

    def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return self.theirs(list(examples))


class _Flatten:
    """What stands in the place of a model's `preprocess`: its tokens, in one row."""

    def __init__(self, model: Any):
        from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

        kinds = [type(module).__name__ for module in model]
        if not isinstance(model[0], Transformer) or len(kinds) < 2 or not isinstance(model[1], Pooling):
            raise ConfigError(f"the model has {', '.join(kinds)}; a Transformer and a Pooling must come first")
        placed = [put_by_us(module) for module in model[0].modules()]
        forward = next((one for one in placed if isinstance(one, Forward)), None)
        if forward is None:
            raise ConfigError(
                "the model is not accelerated: call fastbert.accelerate(model) first. (fastbert's own classes in a"
                " SentenceTransformer take the batches of its own collator, and pack them themselves)"
            )
        config = forward.config_now()
        self.model, self.first_position = model, 0
        if config.family.positions_from_ids:
            assert config.padding_idx is not None
            self.first_position = config.padding_idx + 1
        self.has_positions = "position_ids" in argument_names(type(forward.module))
        if model[0].model_forward_params is not None:  # else its forward takes any name
            model[0].model_forward_params |= {*_OFFSETS, "position_ids"}

    def __call__(self, texts: list[Any], prompt: str | None = None, **options: Any) -> dict[str, Any]:
        features = dict(self.model.preprocess(texts, prompt=prompt, **options))
        real = features.pop("attention_mask") != 0
        lengths = real.sum(1)
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        token = torch.arange(int(offsets[-1]))
        sequence = torch.arange(len(texts)).repeat_interleave(lengths)
        flat = {name: features.pop(name)[real][None] for name in ("input_ids", "token_type_ids") if name in features}
        longest = int(lengths.max())
        flat |= dict(zip(_OFFSETS, (offsets, offsets, longest, longest, sequence[None].int()), strict=True))
        if self.has_positions:
            flat["position_ids"] = (token - offsets[sequence] + self.first_position)[None]
        return features | flat
