"""The model of a run from texts to vectors: found once, and written as the one folder that every contestant loads."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from fastbert.bench import worker
from fastbert.bench.compete import BenchmarkError
from fastbert.bench.jobs import fields_without_type
from fastbert.config import EncoderConfig
from fastbert.config.operations import weights_of_layer
from fastbert.data.sentence_folder import transformer_folder, transformer_settings
from fastbert.data.tokenization import load_tokenizer
from fastbert.errors import CheckpointError, ConfigError
from fastbert.hub import resolve
from fastbert.models.auto import AutoModel
from fastbert.testing.cases import MODELS

VOCABULARY = "all-MiniLM-L6-v2"  # has the tokenizer of the shapes, BERT's uncased one: its 30,522 tokens are theirs
SHAPES = tuple(name for name, fields in MODELS.items() if "model_type" not in fields)  # BERT's
EXPORTED_IDS = 30000  # `runtimes` traces and calibrates with ids below
WORDS = 2000  # that texts are made of

# What the folder says beside the encoder, in sentence-transformers' words: whatever the model, a text is the mean of
# its tokens, of length 1.
_MODULES = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
_WRITTEN = (
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


@dataclass(frozen=True)
class Source:
    """A model before anything is written. `shape` is a key of MODELS, whose weights are random, or None."""

    name: str
    shape: str | None
    folder: Path  # has the tokenizer, and without a shape the weights
    config: EncoderConfig
    longest: int  # text, in tokens
    special: int  # tokens of each text

    @property
    def weights(self) -> int:
        """How many a text is multiplied by in all layers."""
        return sum(weights_of_layer(spec, self.config.hidden_size) for spec in self.config.layer_specs)


def find(name: str) -> Source:
    """A shape by its name, or a folder, or a name that `fastbert.hub.resolve` finds. Raises BenchmarkError."""
    shape = name if name in SHAPES else None
    if shape is None and name in MODELS:
        known = ", ".join(SHAPES)
        raise BenchmarkError(f"--model {name}: there is no tokenizer for this shape; texts are for {known} or a folder")
    try:
        folder = transformer_folder(resolve(VOCABULARY if shape else name))
        if shape is not None:
            config = EncoderConfig.of_family("bert", **fields_without_type(MODELS[shape]))
            folder_limit = None
        else:
            config = EncoderConfig.from_file(folder / "config.json")
            folder_limit = transformer_settings(folder).max_seq_length
        special = load_tokenizer(folder).num_special_tokens_to_add(False)
    except (CheckpointError, ConfigError, OSError) as error:
        asks = f"the tokenizer of {name}" if shape else f"--model {name}"
        raise BenchmarkError(f"{asks}: {error}") from None
    if config.vocab_size < EXPORTED_IDS:
        raise BenchmarkError(f"--model {name} has {config.vocab_size} tokens; at least {EXPORTED_IDS} are needed")
    with torch.device("meta"):
        limit = AutoModel.from_config(config).base_model.table_sizes().longest(config)
    limits = [n for n in (folder_limit, limit) if n is not None]
    if not limits:
        raise BenchmarkError(f"--model {name}: neither the folder nor the model says how long a text may be")
    return Source(name, shape, folder, config, min(limits), special)


def write(shape: str | None, source: Path, longest: int, target: Path) -> None:
    """The folder `target`, with random weights of a shape or with those of `source`, and the tokenizer of `source`."""
    if shape is None:
        target.mkdir()
        for path in source.iterdir():
            if path.is_file() and path.name not in _WRITTEN:
                (target / path.name).symlink_to(path.resolve())
    else:
        worker.write_checkpoint(shape, target)
        # As BERT's own folders say. transformers no longer writes it, and CTranslate2 asks for it.
        config = json.loads((target / "config.json").read_text(encoding="utf-8"))
        _write_json(target / "config.json", {**config, "position_embedding_type": "absolute"})
    own = source / "tokenizer_config.json"
    settings = json.loads(own.read_text(encoding="utf-8")) if own.is_file() else {}
    _write_json(target / "tokenizer_config.json", {**settings, "model_max_length": longest})
    load_tokenizer(source, lowercase=transformer_settings(source).lowercase).save(str(target / "tokenizer.json"))
    types = "sentence_transformers.models."
    _write_json(
        target / "modules.json",
        [{"idx": i, "name": str(i), "path": path, "type": types + module} for i, (path, module) in enumerate(_MODULES)],
    )
    _write_json(target / "sentence_bert_config.json", {"max_seq_length": longest, "do_lower_case": False})
    width = EncoderConfig.from_file(target / "config.json").hidden_size
    (target / "1_Pooling").mkdir()
    _write_json(
        target / "1_Pooling" / "config.json", {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True}
    )
    (target / "2_Normalize").mkdir()


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def cutting_tokenizer(folder: Path) -> Tokenizer:
    """Of a folder that `write` made: it cuts texts to the longest that the model takes, and pads none."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "sentence_bert_config.json").read_text(encoding="utf-8"))
    tokenizer.enable_truncation(settings["max_seq_length"])
    tokenizer.no_padding()
    return tokenizer


def make_texts(tokenizer: Tokenizer, length: int, count: int, words: list[str]) -> list[str]:
    """`count` different texts of so many tokens, special ones included. Raises BenchmarkError."""
    wanted = length - tokenizer.num_special_tokens_to_add(False)
    draw = random.Random(length)
    texts = [" ".join(draw.choices(words, k=wanted)) for _ in range(count)]
    for text in texts:
        if (actual := len(tokenizer.encode(text).ids)) != length:
            raise BenchmarkError(
                f"this tokenizer joins words: a text of {wanted} words of a token each has {actual} tokens, not"
                f" {length}"
            )
    return texts


def one_token_words(tokenizer: Tokenizer) -> list[str]:
    """Up to WORDS words that are one token each, wherever they stand in a text. Raises BenchmarkError."""
    candidates = sorted({token.lstrip("▁Ġ") for token in tokenizer.get_vocab()})  # SentencePiece's and GPT's spaces
    candidates = [word for word in candidates if word.isascii() and word.isalpha() and len(word) > 1]
    random.Random(0).shuffle(candidates)
    words: list[str] = []
    for word in candidates:
        if len(words) == WORDS:
            break
        if len(tokenizer.encode(f"{word} {word}", add_special_tokens=False).ids) == 2:
            words.append(word)
    if not words:
        raise BenchmarkError("no word of ASCII letters is one token in this vocabulary")
    return words
