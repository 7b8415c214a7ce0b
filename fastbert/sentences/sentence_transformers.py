"""A SentenceTransformer over a SentenceEncoder's weights, for tools that take no other class (KeyBERT, BERTopic).

It is sentence-transformers' own class over their own modules, the first of which holds our model. What is changed on it
is theirs to honour. While nothing is, texts take the way of a SentenceEncoder, which gives the same and is quicker.
"""

from __future__ import annotations

import copy
import inspect
import json
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import nn

from fastbert.data.sentence_folder import Normalize, Residual
from fastbert.errors import ConfigError
from fastbert.layers.guard import ModuleGuard
from fastbert.models.quantized import is_quantized
from fastbert.sentences.saving import save_tokenizer
from fastbert.sentences.similarity import Similarity

if TYPE_CHECKING:
    from fastbert.sentences.encoder import SentenceEncoder

_NAME = "SentenceTransformer"  # as theirs: in the cards of saved folders
# Arguments of `encode` that a SentenceEncoder has, too, and means the same by.
_OF_INPUTS = ("inputs", "sentences", "prompt_name", "prompt", "task")
_OF_OUTPUT = ("output_value", "precision", "convert_to_numpy", "convert_to_tensor")
_OF_VECTORS = ("normalize_embeddings", "truncate_dim")
_OF_RUN = ("batch_size", "show_progress_bar", "device", "pool", "chunk_size")
_OPTIONS = frozenset((*_OF_INPUTS, *_OF_OUTPUT, *_OF_VECTORS, *_OF_RUN))


def as_sentence_transformer(encoder: SentenceEncoder) -> Any:
    """See SentenceEncoder.as_sentence_transformer."""
    if encoder.windows is not None:
        raise ConfigError(
            f"this encoder cuts longer texts into {encoder.windows}, and a SentenceTransformer has no windows: set its"
            " `windows` to None first"
        )
    return _class()(encoder)


def __getattr__(name: str) -> Any:
    """The class is made when it is first asked for, here by a pickle: of a model, or of a pool's worker."""
    if name == _NAME:
        return _class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _trains(module: nn.Module) -> bool:
    """Whether it, or a module in it, is in training mode. `eval` writes to each of a hundred modules: 0.3 ms a call."""
    return module.training or any([_trains(child) for child in module._modules.values() if child is not None])


class _AsMade:
    """What decides what a SentenceTransformer makes of a text, but for its prompts and where its texts are cut."""

    def __init__(self, model: Any):
        self._guard = guard = ModuleGuard(model)
        for module in model.modules():
            guard.watch(module)
            guard.watch_children(module)
        for module in model.children():
            names = [name for name in module.__dict__ if not name.startswith("_") and name != "training"]
            _hold(guard, module.__dict__, [*names, "preprocess", "_query_expansion", "_unpad_inputs"])
        guard.hold(model.__dict__, "preprocess", "_inference", "_distributed_inference")  # on the instance
        self._tokenizer = model[0].tokenizer
        self._state = self._state_now()
        model_itself, *behind = model.children()
        self._dtyped = [next(model_itself.parameters()), *(p for module in behind for p in module.parameters())]
        self._dtypes = [
            self._dtyped[0].dtype,
            *[torch.float32] * (len(self._dtyped) - 1),
        ]  # as a SentenceEncoder has them

    def _state_now(self) -> dict[str, Any]:
        """All that the tokenizer's calls go by, also what somebody has put in the place of one."""
        return {**vars(self._tokenizer), "model_max_length": None, "truncation_side": None}  # which are taken

    def holds(self) -> bool:
        dtypes = [parameter.dtype for parameter in self._dtyped]
        return self._guard.is_current() and self._state_now() == self._state and dtypes == self._dtypes


def _hold(guard: ModuleGuard, values: dict[str, Any], names: list[str]) -> None:
    guard.hold(values, *names)
    for name in names:
        if isinstance(inner := values.get(name), dict):
            _hold(guard, inner, list(inner))


def _why_slow(model: Any, inputs: Any, args: tuple, options: dict[str, Any]) -> str | None:
    """Why a call takes sentence-transformers' own way."""
    given = len(args) + len(options.keys() & {"inputs", "sentences"})
    if len(args) > 1 or given != 1 or not options.keys() <= _OPTIONS:
        return "an argument that is given without its name, or that SentenceEncoder.encode does not have"
    if options.get("task") not in (None, "query", "document"):
        return "another task than query and document"
    if not isinstance(inputs, str) and not (
        isinstance(inputs, (list, np.ndarray)) and len(inputs) and all([isinstance(one, str) for one in inputs])
    ):
        return "the inputs are not a string, or a list of strings"
    if isinstance(options.get("device"), list) or options.get("pool") is not None:
        return "several devices, or a pool"
    if options.get("output_value", "sentence_embedding") != "sentence_embedding":
        return "another output than vectors"
    if model._as_made is None or not model._as_made.holds():
        return "a module, its dtype, a setting, a hook or the tokenizer is not as a SentenceEncoder has it"
    return None


def _take_tokenizer(model: Any, task: str | None) -> None:
    """The encoder's tokenizer is the one inside of the first module's: what was changed there holds here."""
    module, encoder = model[0], model._encoder
    theirs = module.tokenizer
    tokenizer = encoder.tokenizer = theirs.backend_tokenizer
    length = task and module.__dict__[f"{task}_length"]
    # A length without end is larger than what `tokenizers` takes.
    length = min(length or theirs.model_max_length, sys.maxsize)
    wanted = {"direction": theirs.truncation_side, "max_length": length}
    if tokenizer.padding is not None:  # their own way sets this, and the next, with each call
        tokenizer.no_padding()
    if tokenizer.encode_special_tokens != theirs.split_special_tokens:
        tokenizer.encode_special_tokens = theirs.split_special_tokens
    if not wanted.items() <= (tokenizer.truncation or {}).items():
        tokenizer.enable_truncation(**wanted)
    encoder._max_seq_length = length


@cache
def _class() -> type:
    try:
        import sentence_transformers as library
    except ImportError:
        raise ConfigError(
            "as_sentence_transformer needs sentence-transformers: pip install sentence-transformers"
        ) from None

    class SentenceTransformer(library.SentenceTransformer):
        def __init__(self, encoder: SentenceEncoder):
            super().__init__(
                modules=_modules(encoder),
                device=str(encoder.device),
                prompts=dict(encoder.prompts),
                default_prompt_name=encoder.default_prompt_name,
                similarity_fn_name=cast(Similarity, encoder.similarity_fn_name),
                truncate_dim=encoder.truncate_dim,
            )
            self._model_card_text = _card_of(encoder)  # type: ignore[assignment]  # theirs says None
            self._encoder = copy.copy(encoder)
            self._encoder.default_prompt_name = self._encoder.truncate_dim = self._encoder.windows = None
            self._encoder._tokenizers = {}
            self._as_made: _AsMade | None = _AsMade(self)

        def encode(self, *args: Any, **options: Any) -> Any:
            calls = self._encoder.model.calls
            inputs: Any = args[0] if args else options.get("inputs", options.get("sentences"))
            if (reason := _why_slow(self, inputs, args, options)) is not None:
                output = super().encode(*args, **options)
                calls.took_texts(reason)
                return output
            calls.took_texts()
            if _trains(self):
                self.eval()
            gone = ("inputs", "sentences", "chunk_size")  # the last is a pool's, and there is none
            options = {name: value for name, value in options.items() if name not in gone}
            if options.get("batch_size") == 32:  # the default of theirs; ours goes by tokens
                del options["batch_size"]
            if options.get("truncate_dim") is None:
                options["truncate_dim"] = self.truncate_dim
            prompt = self._resolve_prompt(options.pop("prompt", None), options.pop("prompt_name", None))
            _take_tokenizer(self, options.get("task"))
            return self._encoder.encode(inputs, prompt=prompt, **options)

        def __getstate__(self) -> dict[str, Any]:
            """A copy of one that was changed has been changed, too."""
            is_as_made = self._as_made is not None and self._as_made.holds()
            return {**self.__dict__, "prompts": dict(self.prompts), "_as_made": is_as_made}

        def __setstate__(self, state: dict[str, Any]) -> None:
            super().__setstate__(state)
            self._as_made = _AsMade(self) if state["_as_made"] else None

    SentenceTransformer.__qualname__ = _NAME
    return SentenceTransformer


def _card_of(encoder: SentenceEncoder) -> str | None:
    """The model card beside its weights, which a model saved without training keeps."""
    folder = getattr(encoder, "folder", None)  # an encoder of parts has none
    card = None if folder is None else folder / "README.md"
    return card.read_text(encoding="utf-8") if card is not None and card.is_file() else None


def _modules(encoder: SentenceEncoder) -> list[nn.Module]:
    """Theirs, with our weights, which become trainable; those of int8 layers do not."""
    from sentence_transformers.sentence_transformer import modules as theirs

    recipe, trains = encoder.recipe, not is_quantized(encoder.model)
    if encoder.dtype is not torch.float32:  # their constructor gives all modules this dtype: not the encoder's own
        recipe = copy.deepcopy(recipe)
    encoder.model.requires_grad_(trains)
    width = encoder.model.config.hidden_size
    pooling = theirs.Pooling(width, list(recipe.pooling), include_prompt=recipe.prompt_is_pooled)
    modules: list[nn.Module] = [_transformer(encoder), pooling]
    rest = iter(recipe.modules)
    for module in rest:
        if isinstance(module, Normalize):
            modules.append(theirs.Normalize())
            continue
        is_residual = isinstance(module, Residual)
        linear: Any = module.linear if is_residual else module
        activation: Any = module.activation if is_residual else next(rest)
        has_bias = linear.bias is not None
        dense = theirs.Dense(linear.in_features, linear.out_features, has_bias, activation, use_residual=is_residual)
        dense.linear = linear.requires_grad_(trains)
        if isinstance(module, Residual) and module.residual is not None:
            dense.residual = module.residual.requires_grad_(trains)
        modules.append(dense)
    return modules


def _transformer(encoder: SentenceEncoder) -> nn.Module:
    """Their first module, with our model where theirs would load its own."""
    from sentence_transformers.sentence_transformer.modules import Transformer

    class Loaded(Transformer):
        def _load_model(self, *args: Any, **options: Any) -> Any:
            return encoder.model

    settings = encoder.settings.transformer
    options: dict[str, Any] = {f"{task}_length": length for task, length in settings.lengths.items()}
    # Texts alone: a tokenizer with a template for chats would make them messages.
    options["modality_config"] = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(encoder, Path(folder))
        Path(folder, "config.json").write_text(json.dumps(encoder.model.live_config.to_dict()))
        module: Any = Loaded(folder, do_lower_case=settings.lowercase, module_output_name="token_embeddings", **options)
    if not encoder.model.table_sizes().has_types:  # which its tokenizer may give
        module.model_forward_params = set(inspect.signature(encoder.model.forward).parameters) - {"token_type_ids"}
    module.__class__ = Transformer  # whose name its folder has
    return cast(nn.Module, module)
