"""Writes a SentenceEncoder as a sentence-transformers folder, which sentence-transformers and from_pretrained read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer
from torch import nn

from fastbert.checkpoint.saving import beside
from fastbert.data.sentence_folder import Normalize
from fastbert.files import move

if TYPE_CHECKING:
    from fastbert.sentences.encoder import SentenceEncoder


def save_encoder(encoder: SentenceEncoder, folder: str | os.PathLike[str]) -> None:
    """The model's own files come last: a folder without them loads as none. Raises OSError."""
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    with beside(root) as new:
        modules = _write_modules(encoder, new)
        _write_json(new / "modules.json", [{"idx": i, "name": str(i), **entry} for i, entry in enumerate(modules)])
        _write_json(new / "config_sentence_transformers.json", _settings(encoder))
        own = {"max_seq_length": encoder.max_seq_length, "do_lower_case": encoder.settings.transformer.lowercase}
        own |= {f"{task}_length": length for task, length in encoder.settings.transformer.lengths.items()}
        _write_json(new / "sentence_bert_config.json", own)
        save_tokenizer(encoder, new)
        for path in sorted(path for path in new.rglob("*") if path.is_file()):
            target = root / path.relative_to(new)
            target.parent.mkdir(exist_ok=True)
            move(path, target)
    encoder.model.save_pretrained(root)


def save_tokenizer(encoder: SentenceEncoder, folder: Path) -> None:
    """tokenizer.json, and what transformers has beside it."""
    tokenizer = Tokenizer.from_str(encoder.tokenizer.to_str())
    tokenizer.no_truncation()
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, entries in encoder.settings.tokenizer_files.items():
        _write_json(folder / name, entries)


def _write_json(path: Path, entries: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(entries, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _settings(encoder: SentenceEncoder) -> dict[str, Any]:
    truncation = {} if encoder.truncate_dim is None else {"truncate_dim": encoder.truncate_dim}
    return {
        "model_type": "SentenceTransformer",
        "prompts": encoder.prompts,
        "default_prompt_name": encoder.default_prompt_name,
        "similarity_fn_name": encoder.similarity_fn_name,
        **truncation,
    }


def _write_modules(encoder: SentenceEncoder, root: Path) -> list[dict[str, str]]:
    """The folders of what follows the Transformer; the entries of modules.json."""
    recipe, rest = encoder.recipe, iter(encoder.recipe.modules)
    entries = [_entry("", "Transformer"), _entry("1_Pooling", "Pooling")]
    modes: Any = list(recipe.pooling) if len(recipe.pooling) > 1 else recipe.pooling[0]
    pooling = {"embedding_dimension": encoder.model.config.hidden_size, "pooling_mode": modes}
    _write_json(root / "1_Pooling/config.json", {**pooling, "include_prompt": recipe.prompt_is_pooled})
    for module in rest:
        name = f"{len(entries)}_{'Normalize' if isinstance(module, Normalize) else 'Dense'}"
        entries.append(_entry(name, name.partition("_")[2]))
        (root / name).mkdir()
        if not isinstance(module, Normalize):
            assert isinstance(module, nn.Linear)
            _write_dense(root / name, module, next(rest))
    return entries


def _entry(path: str, kind: str) -> dict[str, str]:
    return {"path": path, "type": f"sentence_transformers.models.{kind}"}


def _write_dense(folder: Path, linear: nn.Linear, activation: nn.Module) -> None:
    from safetensors.torch import save_file

    kind = type(activation)
    entries = {
        "in_features": linear.in_features,
        "out_features": linear.out_features,
        "bias": linear.bias is not None,
        "activation_function": f"{kind.__module__}.{kind.__qualname__}",
    }
    _write_json(folder / "config.json", entries)
    weights = {f"linear.{key}": t.detach().cpu().contiguous() for key, t in linear.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
