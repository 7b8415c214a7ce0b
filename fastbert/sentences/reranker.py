"""Reranker scores pairs of a query and a text, as sentence-transformers' CrossEncoder does (Nogueira & Cho 2019)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import nn

from fastbert.data.sentence_folder import FolderSettings
from fastbert.errors import ConfigError, InputError
from fastbert.models.base import PreTrainedModel
from fastbert.sentences.batches import check_listed, scores_pairs
from fastbert.sentences.loading import LoadArguments
from fastbert.sentences.pool import ProcessPool
from fastbert.sentences.scorer import SequenceScorer, check_pairs
from fastbert.sentences.text_model import Aggregate, Devices, InferenceOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fastbert.data.chunks import Windows

ORGANISATION = "cross-encoder"  # of names on the hub that have none
Activation = Callable[[torch.Tensor], torch.Tensor]
# Of torch.nn, which a folder may name; sentence-transformers imports any class of torch's.
_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "Sigmoid": nn.Sigmoid,
    "Identity": nn.Identity,
    "Tanh": nn.Tanh,
    "ReLU": nn.ReLU,
    "Softplus": nn.Softplus,
}


class Reranker(SequenceScorer):
    """Gives each pair of texts a score, or `num_labels` of them."""

    what = "reranker"
    is_pair = True
    default_pool = "max"
    default_aggregate = "logits"

    def __init__(
        self,
        model_name_or_path: str | os.PathLike[str],
        *,
        num_labels: int | None = None,
        max_length: int | None = None,
        activation_fn: Activation | None = None,
        **options: Unpack[LoadArguments],
    ):
        """A reranker from the folder of a model for sequence classification, sentence-transformers' or a plain one.

        Args:
            model_name_or_path: a folder or a hub id.
            num_labels: raises unless the model has so many labels.
            max_length: what CrossEncoder calls `max_seq_length`.
            activation_fn: what makes scores of logits. Default: the folder's; else a sigmoid if there is one label, and
                nothing if there are several.
            options: see fastbert.sentences.loading.LoadArguments; the most used are `dtype` ("bfloat16", "int8", ...),
                `device` and `max_seq_length`.

        Raises:
            CheckpointError: a file is absent or damaged, or the checkpoint has no classifier.
            ConfigError: fastbert does not have something that the folder asks for, the device is not there, or a value
            is out of range.
        """
        if max_length is not None:
            if options.get("max_seq_length") not in (None, max_length):
                raise ConfigError(f"max_length={max_length} and max_seq_length={options['max_seq_length']} contradict")
            options["max_seq_length"] = max_length
        self._given_activation = activation_fn
        self._load(model_name_or_path, ORGANISATION, options)
        if num_labels is not None and num_labels != self.num_labels:
            raise ConfigError(f"num_labels={num_labels}: the checkpoint of {model_name_or_path} has {self.num_labels}")

    def _assemble(
        self, model: PreTrainedModel, tokenizer: Tokenizer, max_seq_length: int, settings: FolderSettings | None = None
    ) -> None:
        super()._assemble(model, tokenizer, max_seq_length, settings)
        given = self._given_activation  # nn.Sequential() is one, and false
        self.activation_fn = _activation(model, settings, self.num_labels) if given is None else given

    _given_activation: Activation | None = None

    def saved_settings(self) -> dict[str, Any]:
        fn: Any = self.activation_fn
        activation: Any = _ACTIVATIONS.get(type(fn).__name__)
        if type(fn) is not activation or repr(fn) != repr(activation()):  # then its parameters are not the default ones
            raise ConfigError(
                f"activation_fn is {fn!r}, which a folder cannot name; it can name {', '.join(_ACTIVATIONS)} of"
                " torch.nn. Nothing was saved"
            )
        return {"activation_fn": f"{activation.__module__}.{activation.__qualname__}"}

    @property
    def max_length(self) -> int:
        """What CrossEncoder calls `max_seq_length`."""
        return self.max_seq_length

    @max_length.setter
    def max_length(self, length: int) -> None:
        self.max_seq_length = length

    @scores_pairs
    def predict(
        self,
        inputs: Iterable[Sequence[str]] | Sequence[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        activation_fn: Activation | None = None,
        apply_softmax: bool = False,
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        device: Devices | None = None,
        pool: ProcessPool | None = None,
        chunk_size: int | None = None,
        *,
        batch_tokens: int | None = None,
        windows: Windows | None = None,
        aggregate: Aggregate | None = None,
    ) -> Any:
        """The scores of pairs, in their order. The arguments mean what they mean for a CrossEncoder.

        Args:
            inputs: pairs of texts, or one pair.
            prompt_name, prompt: what is put before the first text of every pair: a prompt of the model's, or a text.
            batch_size: how many pairs the model gets at a time, at most. None: as many as `batch_tokens` allows.
            show_progress_bar: None shows a bar on a terminal if the work takes longer than 2 s.
            activation_fn: instead of the model's own.
            apply_softmax: of several labels, afterwards.
            convert_to_numpy, convert_to_tensor: an array; or a tensor on the model's device; or, with neither, a list
                of tensors.
            device: moves the model there first. A list of devices: a pool of processes, for this call.
            pool, chunk_size: what start_multi_process_pool gave, and how many pairs one of its processes gets at once.
            batch_tokens: how many tokens the model gets at a time; a longer pair is a batch of its own. The default is
                the number with which the device is fastest.
            windows: how second texts are cut that are too long beside the first, which is whole in each chunk. None:
                the longer text of a pair loses its end. Without a `pool` of its own a text is as good as its best
                passage (Dai & Callan 2019, "MaxP"); "top3" is the mean of the best three.
            aggregate: what of the chunks is combined: "logits", the default, which tell the best apart where
                probabilities are all close to 1; "probabilities"; or "vectors", the mean of what goes into the head.

        Returns:
            (number of pairs,), or (number of pairs, num_labels) if there are several; without the first dimension for
            one pair.

        Raises:
            TypeError: an input is no pair of texts; the message has its index. InputError: a text is not valid Unicode,
            or an option is out of bounds.
        """
        pairs, one = check_pairs(inputs)
        on_host = convert_to_numpy and not convert_to_tensor
        options = InferenceOptions(
            self.prompt(prompt_name, prompt),
            batch_tokens,
            batch_size,
            on_host=on_host,
            windows=self.windows if windows is None else windows,
            aggregate=aggregate,
        )
        bar_options = {"unit": " pairs", "desc": "scoring"}
        logits = self.shared_rows(pairs, options, show_progress_bar, device, pool, chunk_size, **bar_options)
        scores = self.scores(logits, activation_fn, apply_softmax)
        scores = scores[0] if one else scores
        if convert_to_tensor:
            return scores.to(self.device)
        if convert_to_numpy:
            return scores.cpu().numpy()[()]  # of one score a NumPy scalar, and no array without dimensions
        return scores if one else list(scores)

    encode = predict

    @torch.inference_mode()
    def scores(
        self, logits: torch.Tensor, activation_fn: Activation | None = None, apply_softmax: bool = False
    ) -> torch.Tensor:
        """What `predict` makes of logits (pairs, num_labels)."""
        scores = (self.activation_fn if activation_fn is None else activation_fn)(logits)
        if self.num_labels == 1:
            return scores.squeeze(-1) if scores.dim() > 1 else scores  # an activation may have done it
        return F.softmax(scores, dim=-1) if apply_softmax else scores

    def rank(
        self,
        query: str,
        documents: Sequence[str],
        top_k: int | None = None,
        return_documents: bool = False,
        **options: Any,
    ) -> list[dict[str, Any]]:
        """The documents by their score beside the query, the best first: `corpus_id`, `score` and, if asked, `text`.

        `options` are those of `predict`. Raises InputError for a model with several labels, and as `predict`.
        """
        if self.num_labels != 1:
            raise InputError(f"rank needs a model with one label, and this one has {self.num_labels}: use predict")
        if top_k is not None and top_k < 1:
            raise InputError(f"top_k is {top_k}; it must be at least 1")
        check_listed("documents", documents, "a list of texts")
        documents = list(documents)
        scores = self.predict([(query, text) for text in documents], **options).tolist()
        ranked = sorted(range(len(scores)), key=lambda i: -scores[i])[:top_k]  # stable: equal ones keep their order
        return [
            {"corpus_id": i, "score": scores[i], **({"text": documents[i]} if return_documents else {})} for i in ranked
        ]


def _activation(model: PreTrainedModel, settings: FolderSettings | None, num_labels: int) -> Activation:
    """What the folder names, in today's place or those of older releases; else sentence-transformers' default."""
    extra = model.config.extra
    older = extra.get("sentence_transformers")
    name = settings.activation_fn if settings is not None else None
    name = name or (older.get("activation_fn") if isinstance(older, dict) else None)
    name = name or extra.get("sbert_ce_default_activation_function")
    if name is None:
        return nn.Sigmoid() if num_labels == 1 else nn.Identity()
    class_name = str(name).rpartition(".")[2]
    if not str(name).startswith("torch.nn.") or class_name not in _ACTIVATIONS:
        raise ConfigError(
            f"the folder names the activation {name!r}; fastbert has {', '.join(_ACTIVATIONS)} of torch.nn: give"
            " activation_fn"
        )
    return _ACTIVATIONS[class_name]()
