"""Writes the folder of a model for texts, which sentence-transformers and from_pretrained read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer
from torch import nn

from fastbert.checkpoint.arguments import check_saving
from fastbert.checkpoint.publishing import model_card
from fastbert.checkpoint.saving import beside
from fastbert.checkpoint.tokenizer_files import SETTINGS
from fastbert.data.sentence_folder import Normalize, Recipe, Residual
from fastbert.files import move

if TYPE_CHECKING:
    from fastbert.sentences.multi_vector.folder import MultiVectorRecipe
    from fastbert.sentences.text_model import TextModel


@dataclass(frozen=True)
class SavedModule:
    """What follows the Transformer: its class, by its path in `sentence_transformers`, its config and its weights."""

    path: str
    config: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def class_name(self) -> str:
        return self.path.rpartition(".")[2]


def save_text_model(
    model: TextModel, folder: str | os.PathLike[str], name: str | None, with_card: bool, safe_serialization: bool
) -> None:
    """See TextModel.save_pretrained. The model's own files come last: a folder without them loads as none."""
    check_saving(safe_serialization, None, None, 0, {})
    modules, settings, usage = model.saved_modules(), model.saved_settings(), model.saved_usage()
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    with beside(root) as new:
        if model.model_type:
            own: dict[str, Any] = {"model_type": model.model_type, "prompts": model.prompts}
            own |= {"default_prompt_name": model.default_prompt_name, **settings}
            _write_json(new / "config_sentence_transformers.json", own)
            _write_modules(modules, new)
        _write_json(new / "sentence_bert_config.json", _transformer(model))
        if usage is not None:
            usage.save(new)
        save_tokenizer(model, new)
        if with_card and not (root / "README.md").exists():
            card = model_card(
                type(model).__name__, model.model.live_config, name or root.name, model.model.name_or_path, []
            )
            (new / "README.md").write_text(card, encoding="utf-8")
        for path in sorted(path for path in new.rglob("*") if path.is_file()):
            target = root / path.relative_to(new)
            target.parent.mkdir(exist_ok=True)
            move(path, target)
    model.model.save_pretrained(root)


def saved_recipe(recipe: Recipe, hidden_size: int) -> list[SavedModule]:
    """What makes a vector of an encoder's hidden states."""
    rest = iter(recipe.modules)
    modes: Any = list(recipe.pooling) if len(recipe.pooling) > 1 else recipe.pooling[0]
    pooling = {"embedding_dimension": hidden_size, "pooling_mode": modes, "include_prompt": recipe.prompt_is_pooled}
    saved = [SavedModule("models.Pooling", pooling)]
    for module in rest:
        if isinstance(module, Normalize):
            saved.append(SavedModule("models.Normalize"))
            continue
        saved.append(_dense(module, rest))
    return saved


def saved_multi_vector(recipe: MultiVectorRecipe) -> list[SavedModule]:
    """What makes scored vectors of an encoder's hidden states."""
    rest, saved = iter(recipe.modules), []
    token = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
    for module in rest:
        if isinstance(module, Normalize):
            saved.append(SavedModule("base.modules.Normalize", token))
        else:
            dense = _dense(module, rest)
            saved.append(replace(dense, path="base.modules.Dense", config=dense.config | token))
    if recipe.scores_expansion:
        mask: dict[str, Any] = {"skiplist_words": recipe.skiplist_words, "skiplist_tasks": recipe.skiplist_tasks}
        mask |= {"keep_only_token_ids": recipe.keep_only_token_ids}
        saved.append(SavedModule("multi_vector_encoder.modules.MultiVectorMask", mask))
    if (pooling := recipe.token_pooling) is not None:
        config: dict[str, Any] = {"pool_factor": pooling.factor, "num_protected_tokens": pooling.protected}
        config |= {"normalize_embeddings": pooling.normalizes, "tasks": pooling.tasks}
        saved.append(SavedModule("multi_vector_encoder.modules.HierarchicalTokenPooling", config))
    return saved


def _dense(module: nn.Module, rest: Iterator[nn.Module]) -> SavedModule:
    """Of a Residual, or of a Linear, whose activation comes next; a projection by itself has none."""
    linear = module.linear if isinstance(module, Residual) else module
    assert isinstance(linear, nn.Linear)
    activation = type(module.activation if isinstance(module, Residual) else next(rest))
    config = {
        "in_features": linear.in_features,
        "out_features": linear.out_features,
        "bias": linear.bias is not None,
        "activation_function": f"{activation.__module__}.{activation.__qualname__}",
    }
    weights = {f"linear.{key}": t for key, t in linear.state_dict().items()}
    if isinstance(module, Residual):
        config["use_residual"] = True
        weights |= {} if module.residual is None else {"residual.weight": module.residual.weight}
    return SavedModule("models.Dense", config, weights)


def _transformer(model: TextModel) -> dict[str, Any]:
    own: dict[str, Any] = {
        "max_seq_length": model.max_seq_length,
        "do_lower_case": model.settings.transformer.lowercase,
    }
    if model.model_type and model.transformer_task != "feature-extraction":  # which older releases have no name for
        own["transformer_task"] = model.transformer_task
    transformer = model.settings.transformer
    own |= {f"{task}_length": length for task, length in transformer.lengths.items()}
    return own | ({} if transformer.query_expansion is None else {"query_expansion": transformer.query_expansion})


def save_tokenizer(model: TextModel, folder: Path) -> None:
    """tokenizer.json, and what transformers has beside it: there it looks for how texts are cut."""
    tokenizer = Tokenizer.from_str(model.tokenizer_of(None).to_str())
    cut: dict[str, Any] = {"model_max_length": model.max_seq_length}
    if tokenizer.truncation is not None:  # the caller may have turned it off, which says nothing of a side
        cut["truncation_side"] = tokenizer.truncation["direction"]
    tokenizer.no_truncation()
    tokenizer.save(str(folder / "tokenizer.json"))
    files = model.settings.tokenizer_files
    for name, entries in {**files, SETTINGS: files.get(SETTINGS, {}) | cut}.items():
        _write_json(folder / name, entries)


def _write_json(path: Path, entries: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(entries, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_modules(modules: list[SavedModule], root: Path) -> None:
    """modules.json, and the folders of what follows the Transformer."""
    from safetensors.torch import save_file

    entries: list[dict[str, Any]] = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
    ]
    for i, module in enumerate(modules, 1):
        folder = f"{i}_{module.class_name}"
        entries.append({"idx": i, "name": str(i), "path": folder, "type": f"sentence_transformers.{module.path}"})
        (root / folder).mkdir()
        if module.config:
            _write_json(root / folder / "config.json", module.config)
        if module.weights:
            weights = {key: t.detach().cpu().contiguous() for key, t in module.weights.items()}
            save_file(weights, root / folder / "model.safetensors")
    _write_json(root / "modules.json", entries)
