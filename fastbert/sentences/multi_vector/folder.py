"""Reads the folder of a multi-vector encoder: sentence-transformers', PyLate's, or Stanford's ColBERT.

Behind the Transformer come modules that work on each token's vector (Dense, Normalize), one MultiVectorMask, which says
whose vectors are scored, and at the end it may be a HierarchicalTokenPooling. PyLate's older folders and Stanford's say
in other files what stands for these.
"""

from __future__ import annotations

import reprlib
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from fastbert.checkpoint.unfilled import unfilled
from fastbert.checkpoint.weight_files import read_weights
from fastbert.data.sentence_folder import (
    FolderSettings,
    Normalize,
    is_colbert_ai,
    list_modules,
    optional_json,
    read_dense,
    refuse_others,
    whole_length,
)
from fastbert.errors import CheckpointError, ConfigError
from fastbert.files import read_json

TASKS = ("query", "document")
# What PyLate has in config_sentence_transformers.json; a file with any of these expands queries unless it says not to.
_PYLATE = (
    "query_length",
    "document_length",
    "query_expansion",
    "do_query_expansion",
    "attend_to_expansion_tokens",
    "attend_to_mask_tokens",
    "query_prefix",
    "document_prefix",
    "skiplist_words",
)
_DEFAULT_EXPANSION = 32  # tokens (Khattab & Zaharia 2020, section 3.2)


@dataclass(frozen=True)
class QueryExpansion:
    """How queries are filled up with [MASK] tokens (Khattab & Zaharia 2020, section 3.2, "query augmentation").

    strategy: "fixed", and a query has `length` tokens, longer ones being cut; "min", and it has at least so many.
    attend: whether other tokens attend to those that are added; these attend to the query's in any case. token: the
    text of what is added; None: the tokenizer's mask token.
    """

    strategy: Literal["fixed", "min"]
    length: int
    attend: bool = False
    token: str | None = None


def expansion_of(where: Any, entries: Any) -> QueryExpansion | None:
    """Of sentence-transformers' `query_expansion`, found in `where`. Raises ConfigError, naming the value."""
    if entries is None:
        return None
    known = ("strategy", "attend", "token", "length")
    if not isinstance(entries, Mapping) or set(entries) - set(known):
        raise ConfigError(f"{where}: query_expansion is {reprlib.repr(entries)}; it maps {', '.join(known)} to values")
    strategy, attend, token, length = (entries.get(name) for name in known)
    if strategy not in ("fixed", "min"):
        raise ConfigError(f"{where}: the strategy of query_expansion is {strategy!r}; there are fixed and min")
    if type(length) is not int or length < 1:
        raise ConfigError(f"{where}: the length of query_expansion is {length!r}; it must be a number of tokens")
    if attend not in (None, True, False) or not isinstance(token, str | None):
        raise ConfigError(f"{where}: query_expansion is {reprlib.repr(entries)}; attend is true or false, token a text")
    return QueryExpansion(strategy, length, bool(attend), token)


@dataclass(frozen=True)
class TokenPooling:
    """Ward's clusters of a text's tokens, by their cosine: about one in `factor` vectors is left, each the mean of a
    cluster's. The first `protected` vectors stay. normalizes: all are brought to length 1.
    """

    factor: float = 1.0
    protected: int = 1
    normalizes: bool = True
    tasks: tuple[str, ...] = ("document",)


@dataclass
class MultiVectorRecipe:
    """What follows the encoder. modules: (tokens, width) -> (tokens, other width), in the order of their run.

    scores_expansion: whether tokens that a query is expanded by are scored where the mask leaves them out, which a
    MultiVectorMask does. Tokens whose text is among skiplist_words are not scored in texts of the skiplist_tasks; of
    documents, if keep_only_token_ids is not None, only these are.
    """

    modules: list[nn.Module] = field(default_factory=list)
    scores_expansion: bool = True
    skiplist_words: tuple[str, ...] = ()
    skiplist_tasks: tuple[str, ...] = ("document",)
    keep_only_token_ids: tuple[int, ...] | None = None
    token_pooling: TokenPooling | None = None


@dataclass
class OlderSettings:
    """What PyLate's and Stanford's folders say beside their modules. prefixes: tokens that stand before a text of a
    task, which their tokenizers may not read as one.
    """

    prefixes: dict[str, str] = field(default_factory=dict)
    skiplist_words: tuple[str, ...] | None = None
    lengths: dict[str, int] = field(default_factory=dict)
    expansion: QueryExpansion | None = None
    has_mask: bool = False  # which no module stands for


def read_multi_vector(
    root: Path, folder: Path, hidden_size: int, settings: FolderSettings
) -> tuple[MultiVectorRecipe, OlderSettings]:
    """What follows the encoder in `root`, whose transformer is in `folder`; and into `settings` what older folders say.

    Raises ConfigError, naming the file and the value, for a module or an order that is not understood, and for a folder
    of another kind of model.
    """
    modules = list_modules(root)
    if not modules:
        if not is_colbert_ai(folder):
            raise ConfigError(
                f"{root} has no modules.json, and {folder / 'config.json'} no architecture 'HF_ColBERT': it is no"
                " multi-vector encoder, whose projection would be random. fastbert.SentenceEncoder loads an encoder"
            )
        return _stanford(root, folder, hidden_size, settings)
    older = _pylate(root, settings)
    return _modules(root, modules, hidden_size, older), older


def _modules(root: Path, modules: list[tuple[str, Path]], hidden_size: int, older: OlderSettings) -> MultiVectorRecipe:
    recipe, width, has_mask = MultiVectorRecipe(scores_expansion=False), hidden_size, False
    names = [name for name, _ in modules]
    listed = f"{root / 'modules.json'} has {', '.join(names)}"
    for name, folder in modules[1:]:
        if recipe.token_pooling is not None:
            raise ConfigError(f"{listed}; nothing may come behind HierarchicalTokenPooling")
        if name == "Dense":
            added, width = read_dense(folder, width, "token_embeddings")
            recipe.modules += added
        elif name == "Normalize":
            path, token = folder / "config.json", "token_embeddings"
            entries = optional_json(path)
            refuse_others(path, entries, ("module_input_name", "module_output_name"))
            if entries.get("module_input_name") != token or entries.get("module_output_name") not in (None, token):
                raise ConfigError(f"{path}: Normalize works on {entries}; a multi-vector encoder's on {token!r}")
            recipe.modules.append(Normalize())
        elif name == "MultiVectorMask" and not has_mask:
            has_mask = True
            _read_mask(folder / "config.json", recipe)
        elif name == "HierarchicalTokenPooling" and has_mask:
            recipe.token_pooling = _read_token_pooling(folder / "config.json")
        else:
            raise ConfigError(
                f"{listed}; a multi-vector encoder has Transformer, then any of Dense and Normalize with one"
                " MultiVectorMask among them, then it may be HierarchicalTokenPooling"
            )
    if not has_mask and older.has_mask:  # PyLate up to 3 masked and normalized without modules
        recipe.scores_expansion = True
        words = tuple(string.punctuation) if older.skiplist_words is None else older.skiplist_words
        recipe.skiplist_words = words
        recipe.modules.append(Normalize())
    return recipe


def _read_mask(path: Path, recipe: MultiVectorRecipe) -> None:
    entries = optional_json(path)
    refuse_others(path, entries, ("skiplist_words", "skiplist_tasks", "keep_only_token_ids"))
    recipe.scores_expansion = True
    recipe.skiplist_words = _strings(path, entries, "skiplist_words") or ()
    tasks = entries.get("skiplist_tasks", ["document"])
    recipe.skiplist_tasks = _tasks(path, "skiplist_tasks", tasks)
    kept = entries.get("keep_only_token_ids")
    if kept is not None and not (isinstance(kept, list) and all(type(i) is int and i >= 0 for i in kept)):
        raise CheckpointError(f"{path}: keep_only_token_ids is {reprlib.repr(kept)}; it must be a list of ids")
    recipe.keep_only_token_ids = tuple(kept) if kept else None


def _read_token_pooling(path: Path) -> TokenPooling:
    entries = read_json(path, CheckpointError)
    known = {"pool_factor": 1.0, "num_protected_tokens": 1, "normalize_embeddings": False, "tasks": ["document"]}
    refuse_others(path, entries, known)
    factor, protected, normalizes, tasks = (entries.get(name, default) for name, default in known.items())
    if type(factor) not in (int, float) or factor < 1:
        raise ConfigError(f"{path}: pool_factor is {reprlib.repr(factor)}; it must be at least 1")
    if type(protected) is not int or protected < 0:
        raise ConfigError(f"{path}: num_protected_tokens is {reprlib.repr(protected)}; it must be at least 0")
    if type(normalizes) is not bool:
        raise CheckpointError(f"{path}: normalize_embeddings is {reprlib.repr(normalizes)}; it must be true or false")
    return TokenPooling(float(factor), protected, normalizes, _tasks(path, "tasks", tasks))


def _tasks(path: Path, name: str, tasks: Any) -> tuple[str, ...]:
    listed = [tasks] if isinstance(tasks, str) else tasks
    if not isinstance(listed, list) or any(task not in TASKS for task in listed):
        raise ConfigError(f"{path}: {name} is {reprlib.repr(tasks)}; fastbert has {', '.join(TASKS)}")
    return tuple(listed)


def _strings(path: Path, entries: dict[str, Any], name: str) -> tuple[str, ...] | None:
    value = entries.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise CheckpointError(f"{path}: {name} is {reprlib.repr(value)}; it must be a list of texts")
    return tuple(value)


def _pylate(root: Path, settings: FolderSettings) -> OlderSettings:
    """Of config_sentence_transformers.json; prefixes go in front of the prompts of their tasks."""
    path = root / "config_sentence_transformers.json"
    entries = optional_json(path)
    older = OlderSettings(skiplist_words=_strings(path, entries, "skiplist_words"))
    older.has_mask = entries.get("model_type") == "ColBERT"
    if not any(name in entries for name in _PYLATE):
        return older
    older.has_mask = True
    for task in TASKS:
        prefix = entries.get(f"{task}_prefix")
        if f"{task}_prefix" in entries:
            if not isinstance(prefix, str | None):
                raise CheckpointError(f"{path}: {task}_prefix is {reprlib.repr(prefix)}; it must be a text or null")
            prefix = prefix or ""
            older.prefixes[task] = prefix
            settings.prompts[task] = prefix + settings.prompts.get(task, "").removeprefix(prefix)
        if (length := whole_length(path, f"{task}_length")) is not None:
            older.lengths[task] = length
    if "query_expansion" in entries:
        older.expansion = expansion_of(path, entries["query_expansion"])
    elif entries.get("do_query_expansion") is not False:
        attend = entries.get("attend_to_expansion_tokens", entries.get("attend_to_mask_tokens"))
        length = older.lengths.pop("query", None) or _DEFAULT_EXPANSION
        older.expansion = QueryExpansion("fixed", length, bool(attend))
    return older


def _stanford(
    root: Path, folder: Path, hidden_size: int, settings: FolderSettings
) -> tuple[MultiVectorRecipe, OlderSettings]:
    """artifact.metadata, and the projection beside the encoder's own weights (colbert-ai)."""
    path = folder / "artifact.metadata"
    entries = optional_json(path)
    markers = {"query": ("query_token_id", "[unused0]"), "document": ("doc_token_id", "[unused1]")}
    older = OlderSettings(has_mask=True)
    for task, (name, default) in markers.items():
        marker = entries.get(name) or default
        if not isinstance(marker, str):
            raise CheckpointError(f"{path}: {name} is {reprlib.repr(marker)}; it must be a text")
        older.prefixes[task] = settings.prompts[task] = f"{marker} "
    length = whole_length(path, "doc_maxlen")
    older.lengths = {} if length is None else {"document": length}
    width = whole_length(path, "query_maxlen") or _DEFAULT_EXPANSION
    older.expansion = QueryExpansion("fixed", width, bool(entries.get("attend_to_mask_tokens")))
    words = tuple(string.punctuation) if entries.get("mask_punctuation", True) else ()
    weight = read_weights(folder).get("linear.weight")
    if weight is None or weight.dim() != 2 or weight.shape[1] != hidden_size:
        found = "no linear.weight" if weight is None else f"a linear.weight of shape {tuple(weight.shape)}"
        raise CheckpointError(f"{folder} has {found}; ColBERT's projection has the shape (dim, {hidden_size})")
    with unfilled():
        linear = nn.Linear(hidden_size, weight.shape[0], bias=False)
    linear.load_state_dict({"weight": weight.to(torch.float32, copy=True)}, assign=True)
    return MultiVectorRecipe([linear, nn.Identity(), Normalize()], skiplist_words=words), older
