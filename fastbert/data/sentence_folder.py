"""Reads a sentence-transformers folder. Its modules.json names modules, each with a folder, in the order of their run.

The order is Transformer, Pooling, then any of Dense, Normalize and Dropout. The folder of a plain encoder has no
modules.json. It is read as a Transformer with mean pooling, as sentence-transformers does.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastbert import ops
from fastbert.checkpoint.tokenizer_files import gives_types
from fastbert.checkpoint.unfilled import unfilled
from fastbert.checkpoint.weight_files import read_weights
from fastbert.config import MAX_SIZE
from fastbert.errors import CheckpointError, ConfigError
from fastbert.files import read_json

POOLING_MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
# What the first module of a folder computes: who loads such a folder, and which result of the model goes where.
_TASKS = {
    "feature-extraction": ("SentenceEncoder", "last_hidden_state", "token_embeddings"),
    "sequence-classification": ("Reranker", "logits", "scores"),
    "fill-mask": ("SparseEncoder", "logits", "token_embeddings"),
}
# Where sentence-transformers looks for the settings of the first module, in this order.
_TRANSFORMER_SETTINGS = tuple(
    f"sentence_{family}_config.json"
    for family in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# What those settings hand on to transformers, under the names of today and of older releases.
_HANDED_ON = {
    "model_kwargs": "model_args",
    "processor_kwargs": "tokenizer_args",
    "config_kwargs": "config_args",
}
# The flags of older folders; with several set the vectors are concatenated in this order.
_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_DENSE_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "Tanh": nn.Tanh,
    "Identity": nn.Identity,
    "ReLU": nn.ReLU,
    "GELU": nn.GELU,
    "Sigmoid": nn.Sigmoid,
}


@dataclass
class Recipe:
    """What follows the encoder: pooling modes, concatenated, then modules, (batch, width) -> (batch, other width)."""

    pooling: tuple[str, ...] = ("mean",)
    modules: list[nn.Module] = field(default_factory=list)
    prompt_is_pooled: bool = True


@dataclass
class TransformerSettings:
    """What a folder says of its first module. None: nothing is said."""

    max_seq_length: int | None = None
    lowercase: bool = False
    gives_types: bool = True  # a model that has token types is told them
    lengths: dict[str, int] = field(default_factory=dict)  # of the texts of a task, "query" or "document"
    query_expansion: Any = None  # of queries, as sentence-transformers has it
    handed_on: dict[str, dict[str, Any]] = field(default_factory=dict)  # model_kwargs, processor_kwargs, config_kwargs


@dataclass
class FolderSettings:
    """What config_sentence_transformers.json says of the whole model.

    `prompts` are texts, by name, that may be put before every text. `activation_fn` is the path of a class of torch's.
    """

    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    activation_fn: str | None = None
    similarity_fn_name: str | None = None
    truncate_dim: int | None = None
    max_active_dims: int | None = None  # of sparse vectors
    transformer: TransformerSettings = field(default_factory=TransformerSettings)
    tokenizer_files: dict[str, Any] = field(default_factory=dict)  # what transformers has beside a tokenizer.json


@dataclass
class SpladePooling:
    """What makes one vector of the words' scores at each token."""

    strategy: str = "max"
    activation: str = "relu"


class Normalize(nn.Module):
    """x / ||x||, row by row, in fp32; a zero row stays zero."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.normalize(x)


def list_modules(root: Path) -> list[tuple[str, Path]]:
    """(class name, folder) of each module; empty for a folder without modules.json.

    Raises CheckpointError; ConfigError for a class that is not sentence-transformers' own.
    """
    path = root / "modules.json"
    if not path.is_file():
        return []
    modules: list[tuple[str, str]] = []
    for entry in read_json(path, CheckpointError, list):
        class_name, folder = (entry.get("type"), entry.get("path")) if isinstance(entry, dict) else (None, None)
        if not isinstance(class_name, str) or not isinstance(folder, str):
            raise CheckpointError(f"{path} is no list of modules with a type and a path, which are texts")
        if not class_name.startswith("sentence_transformers.") and class_name != "pylate.models.Dense.Dense":
            raise ConfigError(f"{path} names {class_name!r}: code that is not sentence-transformers' own never runs")
        modules.append((class_name.rpartition(".")[2], folder))
    for _, folder in modules:
        if Path(folder).is_absolute() or ".." in Path(folder).parts:
            raise CheckpointError(f"{path} names the folder {folder!r}, which is not inside its own")
    return [(name, root / folder) for name, folder in modules]


def transformer_folder(root: Path, kinds: tuple[str, ...] = ("Transformer",)) -> Path:
    """Where config.json, weights and tokenizer are. Raises ConfigError if the first module is none of `kinds`."""
    modules = list_modules(root)
    folder = modules[0][1] if modules else root
    if modules and modules[0][0] not in kinds:
        raise ConfigError(f"{root / 'modules.json'} starts with {modules[0][0]}; fastbert needs a {kinds[0]} there")
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(f"{folder} holds an adapter of PEFT: merge it into its model, and save that")
    return folder


def is_splade(root: Path) -> bool:
    """Whether a sparse encoder's pooling follows. Raises what `list_modules` raises."""
    return any(name == "SpladePooling" for name, _ in list_modules(root))


def is_multi_vector(root: Path) -> bool:
    """Whether a folder gives a vector for each token: sentence-transformers', PyLate's or Stanford's."""
    path = root / "config_sentence_transformers.json"
    kind = optional_json(path).get("model_type")
    if kind in ("MultiVectorEncoder", "ColBERT") or any(name == "MultiVectorMask" for name, _ in list_modules(root)):
        return True
    return is_colbert_ai(root)


def is_colbert_ai(root: Path) -> bool:
    """Whether Stanford's package has written a folder: the projection's linear.weight is beside the encoder's."""
    return optional_json(root / "config.json").get("architectures") == ["HF_ColBERT"]


def check_alone(root: Path) -> None:
    """Raise ConfigError if anything follows the Transformer: a Reranker runs nothing more."""
    if others := [name for name, _ in list_modules(root)[1:]]:
        raise _is_encoder(root, others)


def _is_encoder(root: Path, others: list[str]) -> ConfigError:
    """What a class says of the folder of another one, by the modules behind the Transformer."""
    loads_it = "SparseEncoder" if "SpladePooling" in others else "SentenceEncoder"
    loads_it = "MultiVectorEncoder" if "MultiVectorMask" in others else loads_it
    return ConfigError(
        f"{root} is an encoder of texts, without a head that scores or classifies: {root / 'modules.json'} has"
        f" {', '.join(others)} behind the Transformer. Load it as a {loads_it}"
    )


def transformer_settings(
    folder: Path, task: str = "feature-extraction", expands_queries: bool = False
) -> TransformerSettings:
    """sentence_bert_config.json, or what older releases called it. expands_queries: whether query_expansion is read.

    Raises ConfigError where the folder's model is for another task, or for something that fastbert does not have.
    """
    path = _transformer_settings_file(folder)
    entries = dict(optional_json(path))
    settings = TransformerSettings(whole_length(folder / "tokenizer_config.json", "model_max_length"))
    length = whole_length(path, "max_seq_length")
    settings.max_seq_length = settings.max_seq_length if length is None else length
    settings.lowercase = _flag(path, entries, "do_lower_case", False)
    settings.gives_types = gives_types(folder)
    for name in ("query", "document"):
        length = whole_length(path, f"{name}_length")
        settings.lengths |= {} if length is None else {name: length}
    own_task = entries.get("transformer_task", task)
    if own_task != task:
        needs = _TASKS[own_task][0] if isinstance(own_task, str) and own_task in _TASKS else None
        needs = "MultiVectorEncoder" if entries.get("query_expansion") else needs
        hint = f"fastbert.{needs} loads it" if needs else f"fastbert has: {', '.join(_TASKS)}"
        raise ConfigError(f"{path} has transformer_task {reprlib.repr(own_task)}, not {task!r}: {hint}")
    for name, old_name in _HANDED_ON.items():
        kwargs = entries.pop(name, None) or entries.pop(old_name, None) or {}
        if not isinstance(kwargs, dict):
            raise CheckpointError(f"{path}: {name} is {reprlib.repr(kwargs)}; it must map names to values")
        settings.handed_on[name] = {key: value for key, value in kwargs.items() if key != "trust_remote_code"}
    if (expansion := entries.get("query_expansion")) is not None and not expands_queries:
        raise ConfigError(f"{path}: query_expansion is {expansion}: fastbert.MultiVectorEncoder loads this folder")
    settings.query_expansion = expansion
    _, result, goes_to = _TASKS[task]
    plain = {
        "modality_config": {"text": {"method": "forward", "method_output_name": result}},
        "module_output_name": goes_to,
        "processing_kwargs": {},
        "tokenizer_name_or_path": None,
    }
    for name, only in plain.items():
        if entries.get(name) not in (only, None):
            raise ConfigError(f"{path}: {name} is {reprlib.repr(entries[name])}; fastbert takes {only!r} here")
    read = ("max_seq_length", "do_lower_case", "query_length", "document_length", "transformer_task", "query_expansion")
    refuse_others(path, entries, (*read, *_HANDED_ON, *_HANDED_ON.values(), *plain, "unpad_inputs"))
    return settings


def _transformer_settings_file(folder: Path) -> Path:
    paths = (folder / name for name in _TRANSFORMER_SETTINGS)
    return next((path for path in paths if path.is_file()), folder / _TRANSFORMER_SETTINGS[0])


def refuse_others(path: Path, entries: dict[str, Any], known: Iterable[str]) -> None:
    for name in entries:
        if name not in known:
            raise ConfigError(f"{path}: unknown entry {name!r}; fastbert has: {', '.join(known)}")


def whole_length(path: Path, name: str) -> int | None:
    """A number of tokens; transformers writes 1e30 where there is no limit. Raises CheckpointError."""
    length = optional_json(path).get(name)
    if length is None:
        return None
    whole = type(length) is int or (isinstance(length, float) and length.is_integer())
    if not whole or length < 1:
        raise CheckpointError(f"{path}: {name} is {reprlib.repr(length)}; it must be a whole number of at least 1")
    return int(length)


def _flag(path: Path, entries: dict[str, Any], name: str, default: bool) -> bool:
    value = entries.get(name, default)
    if type(value) is not bool:
        raise CheckpointError(f"{path}: {name} is {reprlib.repr(value)}; it must be true or false")
    return value


def optional_json(path: Path) -> dict[str, Any]:
    return read_json(path, CheckpointError) if path.is_file() else {}


def read_recipe(root: Path, hidden_size: int) -> Recipe:
    """What follows the Transformer. Raises ConfigError, naming the folder, for a module that fastbert does not have."""
    recipe, modules = Recipe(), list_modules(root)
    if modules:
        names = [name for name, _ in modules]
        if "MultiVectorMask" in names:
            found = f"{root / 'modules.json'} has {', '.join(names)}"
            raise ConfigError(f"{found}, which give a vector for each token: fastbert.MultiVectorEncoder loads it")
        if names[1:2] != ["Pooling"]:
            raise ConfigError(f"{root / 'modules.json'} has {', '.join(names)}; fastbert needs Pooling in second place")
        path = modules[1][1] / "config.json"
        entries = read_json(path, CheckpointError)
        recipe.pooling = _pooling_modes(path, entries)
        recipe.prompt_is_pooled = _flag(path, entries, "include_prompt", True)
        widths = ("embedding_dimension", "word_embedding_dimension")
        refuse_others(path, entries, (*widths, "pooling_mode", "include_prompt", *_POOLING_FLAGS))
        for name in widths:
            if entries.get(name) not in (None, hidden_size):
                raise ConfigError(f"{path}: {name} is {reprlib.repr(entries[name])}; the model's is {hidden_size}")
    width = hidden_size * len(recipe.pooling)
    for name, folder in modules[2:]:
        if name == "Normalize":
            recipe.modules.append(Normalize())
        elif name == "Dense":
            added, width = read_dense(folder, width, "sentence_embedding")
            recipe.modules += added
        elif name != "Dropout":  # nothing at inference
            raise ConfigError(f"{folder} is a {name}; fastbert has Transformer, Pooling, Dense, Normalize and Dropout")
    return recipe


def read_splade(root: Path) -> SpladePooling:
    """What follows the masked LM; the default where there is no modules.json. Raises ConfigError."""
    modules = list_modules(root)
    if not modules:
        return SpladePooling()
    names = [name for name, _ in modules]
    if "Pooling" in names:
        raise _is_encoder(root, names[1:])
    if names[1:] != ["SpladePooling"]:
        raise ConfigError(f"{root / 'modules.json'} has {', '.join(names)}; a SparseEncoder has SpladePooling second")
    path = modules[1][1] / "config.json"
    entries = optional_json(path)
    known = {"pooling_strategy": ("max", "sum"), "activation_function": ("relu", "log1p_relu")}
    # Of the two others neither changes the vectors.
    refuse_others(path, entries, (*known, "embedding_dimension", "word_embedding_dimension", "chunk_size"))
    chosen = {name: entries.get(name, values[0]) for name, values in known.items()}
    for name, values in known.items():
        if chosen[name] not in values:
            raise ConfigError(f"{path}: {name} is {reprlib.repr(chosen[name])}; fastbert has {', '.join(values)}")
    return SpladePooling(chosen["pooling_strategy"], chosen["activation_function"])


def read_settings(root: Path, folder: Path, transformer: TransformerSettings) -> FolderSettings:
    """Of a model in `root` whose tokenizer is in `folder`. Raises CheckpointError for what is of another type."""
    path = root / "config_sentence_transformers.json"
    entries = optional_json(path)
    prompts = entries.get("prompts")
    if not isinstance(prompts, dict | None) or not all(isinstance(t, str | None) for t in (prompts or {}).values()):
        raise CheckpointError(f"{path}: prompts is {reprlib.repr(prompts)}; it must map names to texts")
    settings = FolderSettings({name: text or "" for name, text in (prompts or {}).items()}, transformer=transformer)
    settings.truncate_dim = whole_length(path, "truncate_dim")
    settings.max_active_dims = whole_length(path, "max_active_dims")
    for name in ("default_prompt_name", "activation_fn", "similarity_fn_name"):
        value = entries.get(name)
        if not isinstance(value, str | None):
            raise CheckpointError(f"{path}: {name} is {reprlib.repr(value)}; it must be a text or null")
        setattr(settings, name, value)
    if entries.get("keep_in_fp32_modules"):
        raise ConfigError(f"{path}: keep_in_fp32_modules is not supported; take it out, and load with dtype='float32'")
    names = ("tokenizer_config.json", "special_tokens_map.json")
    settings.tokenizer_files = {name: optional_json(folder / name) for name in names if (folder / name).is_file()}
    return settings


def _pooling_modes(path: Path, entries: dict[str, Any]) -> tuple[str, ...]:
    """From today's `pooling_mode`, a name or a list of them, or from the flags of older folders."""
    named = entries.get("pooling_mode")
    if named is None:
        named = [mode for flag, mode in _POOLING_FLAGS.items() if _flag(path, entries, flag, False)] or "mean"
    modes = named if isinstance(named, list) else [named]
    for mode in modes:
        if mode not in POOLING_MODES:
            raise ConfigError(f"{path}: pooling mode {reprlib.repr(mode)}; fastbert has: {', '.join(POOLING_MODES)}")
    if not modes:
        raise ConfigError(f"{path}: pooling_mode is empty; fastbert has: {', '.join(POOLING_MODES)}")
    return tuple(modes)


class Residual(nn.Module):
    """x -> activation(linear(x)) + residual(x), which is x itself where no width changes."""

    def __init__(self, linear: nn.Linear, activation: nn.Module, residual: nn.Linear | None):
        super().__init__()
        self.linear, self.activation, self.residual = linear, activation, residual

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.linear(x)) + (x if self.residual is None else self.residual(x))


def read_dense(folder: Path, width: int, name_of_input: str) -> tuple[list[nn.Module], int]:
    """x -> activation(weight x + bias), and it may be a residual, as modules; and how many numbers it gives.

    name_of_input: among sentence-transformers' features. Raises ConfigError, naming the module's folder, for anything
    more.
    """
    entries = read_json(folder / "config.json", CheckpointError)
    activation = str(entries.get("activation_function", "torch.nn.modules.activation.Tanh"))
    class_name = activation.rpartition(".")[2]
    if not activation.startswith("torch.nn.") or class_name not in _DENSE_ACTIVATIONS:
        raise ConfigError(f"{folder} has activation {activation!r}; fastbert has: {', '.join(_DENSE_ACTIVATIONS)}")
    plain = {"module_input_name": name_of_input, "module_output_name": name_of_input, "in_features": width}
    read = ("out_features", "bias", "activation_function", "use_residual")
    refuse_others(folder / "config.json", entries, (*plain, *read))
    for name, only in plain.items():
        if entries.get(name) not in (only, None):
            raise ConfigError(f"{folder} is a Dense with {name} {entries[name]!r}; fastbert takes {only!r} here")
    out, bias = entries.get("out_features"), _flag(folder / "config.json", entries, "bias", True)
    if type(out) is not int or not 1 <= out <= MAX_SIZE:
        raise ConfigError(f"{folder} has out_features {reprlib.repr(out)}; it must be an integer from 1 to {MAX_SIZE}")
    has_residual = _flag(folder / "config.json", entries, "use_residual", False)
    with unfilled():
        linear, residual = nn.Linear(width, out, bias=bias), None
        if has_residual and width != out:
            residual = nn.Linear(width, out, bias=False)
    whole = nn.ModuleDict({"linear": linear} | ({} if residual is None else {"residual": residual}))
    weights = read_weights(folder)
    weights = {key if "." in key else f"linear.{key}": tensor for key, tensor in weights.items()}
    for key, tensor in weights.items():
        if not tensor.is_floating_point() or not torch.isfinite(tensor).all():
            raise CheckpointError(f"{folder}: tensor {key} holds integers, or values that are not finite")
    try:
        # A map of the file, which must not change when the file does: its own memory, and float32.
        whole.load_state_dict({key: t.to(torch.float32, copy=True) for key, t in weights.items()}, assign=True)
    except RuntimeError as error:
        raise CheckpointError(f"{folder}: the config contradicts the weights: {' '.join(str(error).split())}") from None
    activation_module = _DENSE_ACTIVATIONS[class_name]()
    return ([Residual(linear, activation_module, residual)] if has_residual else [linear, activation_module]), out
