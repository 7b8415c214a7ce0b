"""A SentenceTransformer that runs a SentenceEncoder, for tools that take no other class (KeyBERT, BERTopic, SetFit).

Its `encode` is the SentenceEncoder's. Its modules run the same weights, one after the other, as sentence-transformers'
trainer needs them to.
"""

from __future__ import annotations

import copy
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from fastbert.data.sentence_folder import Normalize
from fastbert.data.tokenized import Text
from fastbert.errors import ConfigError
from fastbert.models.quantized import is_quantized
from fastbert.sentences.batches import check_texts, takes_sentences
from fastbert.sentences.saving import save_tokenizer
from fastbert.sentences.similarity import Similarity
from fastbert.sentences.text_model import prompted

if TYPE_CHECKING:
    from fastbert.sentences.encoder import SentenceEncoder

_SETTINGS = ("default_prompt_name", "similarity_fn_name", "truncate_dim")  # beside the prompts


def as_sentence_transformer(encoder: SentenceEncoder) -> Any:
    """See SentenceEncoder.as_sentence_transformer."""
    return _class()(encoder)


def _made_again(encoder: SentenceEncoder, settings: dict[str, Any]) -> Any:
    """Out of a pickle."""
    model = as_sentence_transformer(encoder)
    for name, value in settings.items():
        setattr(model, name, value)
    return model


class PackedTransformer(nn.Module):
    """The first module: token ids in, `token_embeddings` out. Padding is there for the modules that follow only."""

    def __init__(self, encoder: SentenceEncoder, tokenizer: Any):
        super().__init__()
        self.auto_model = encoder.model
        self.tokenizer = tokenizer  # transformers' form of the same one
        self._encoder = encoder

    def preprocess(self, inputs: list[Text], prompt: str | None = None, **options: Any) -> dict[str, Any]:
        texts = [prompted(prompt or "", one) for one in check_texts(inputs, pairs=True)]
        length = options.get("max_length") or self._encoder.settings.transformer.lengths.get(options.get("task", ""))
        length = length or self.max_seq_length
        features = dict(self.tokenizer(texts, padding=True, truncation=True, max_length=length, return_tensors="pt"))
        if prompt:
            features["prompt_length"] = self._encoder._prompt_tokens(prompt)
        return features

    tokenize = preprocess  # what releases before 6 called it

    def forward(self, features: dict[str, Any], **options: Any) -> dict[str, Any]:
        inputs = {
            name: features[name] for name in ("input_ids", "attention_mask", "token_type_ids") if name in features
        }
        return {**features, "token_embeddings": self.auto_model(**inputs).last_hidden_state}

    @property
    def max_seq_length(self) -> int:
        return self._encoder.max_seq_length

    @max_seq_length.setter
    def max_seq_length(self, length: int) -> None:
        self._encoder.max_seq_length = length

    def get_embedding_dimension(self) -> int:
        return self.auto_model.config.hidden_size

    get_word_embedding_dimension = get_embedding_dimension


def _trains(module: nn.Module) -> bool:
    """Whether it, or a module in it, is in training mode. `eval` writes to each of a hundred modules: 0.3 ms a call."""
    return module.training or any([_trains(child) for child in module._modules.values() if child is not None])


@cache
def _class() -> type:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        raise ConfigError(
            "as_sentence_transformer needs sentence-transformers: pip install sentence-transformers"
        ) from None

    class PackedSentenceTransformer(SentenceTransformer):
        def __init__(self, encoder: SentenceEncoder):
            super().__init__(
                modules=_modules(encoder),
                device=str(encoder.device),
                prompts=dict(encoder.prompts),
                default_prompt_name=encoder.default_prompt_name,
                similarity_fn_name=cast(Similarity, encoder.similarity_fn_name),
                truncate_dim=encoder.truncate_dim,
            )
            self.encoder = encoder

        @takes_sentences
        def encode(self, inputs: Any, prompt_name: Any = None, prompt: Any = None, *args: Any, **options: Any):
            if options.get("batch_size") == 32:  # the default of theirs; ours goes by tokens
                del options["batch_size"]
            if options.get("truncate_dim") is None:
                options["truncate_dim"] = self.truncate_dim
            if _trains(self):
                self.eval()
            return self.encoder.encode(inputs, None, self._resolve_prompt(prompt, prompt_name), *args, **options)

        def start_multi_process_pool(self, target_devices: list[str] | None = None) -> Any:
            return self.encoder.start_multi_process_pool(target_devices)

        @staticmethod
        def stop_multi_process_pool(pool: Any) -> None:
            pool.close()

        def save_pretrained(self, path: str, *args: Any, **options: Any) -> None:
            """The encoder's folder, with what was set on this model: on a copy, for the encoder is its caller's."""
            told = copy.copy(self.encoder)
            for name, value in self._settings().items():
                setattr(told, name, value)
            told.save_pretrained(path, *args, **options)

        save = save_pretrained

        def __reduce__(self) -> Any:
            return _made_again, (self.encoder, self._settings())

        def _settings(self) -> dict[str, Any]:
            """What may be set on this model, and does not reach the encoder."""
            return {"prompts": dict(self.prompts)} | {name: getattr(self, name) for name in _SETTINGS}

    return PackedSentenceTransformer


def _modules(encoder: SentenceEncoder) -> list[nn.Module]:
    """Theirs, with our weights, which become trainable; those of int8 layers do not."""
    from sentence_transformers.sentence_transformer import modules as theirs
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(encoder, Path(folder))
        Path(folder, "config.json").write_text(json.dumps(encoder.model.live_config.to_dict()))
        tokenizer = AutoTokenizer.from_pretrained(folder)
    width, trains = encoder.model.config.hidden_size, not is_quantized(encoder.model)
    encoder.model.requires_grad_(trains)
    pooling = theirs.Pooling(width, list(encoder.recipe.pooling), include_prompt=encoder.recipe.prompt_is_pooled)
    own_modules: list[nn.Module] = [PackedTransformer(encoder, tokenizer), pooling]
    rest = iter(encoder.recipe.modules)
    for module in rest:
        if isinstance(module, Normalize):
            own_modules.append(theirs.Normalize())
            continue
        assert isinstance(module, nn.Linear)
        has_bias = module.bias is not None
        dense = theirs.Dense(module.in_features, module.out_features, has_bias, next(rest))
        dense.linear = module.requires_grad_(trains)
        own_modules.append(dense)
    return own_modules
