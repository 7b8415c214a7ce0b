"""Heads with losses, on packed tokens: nothing is unpacked but the logits that go back to the caller."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from fastbert import ops
from fastbert.config import ACTIVATIONS, EncoderConfig
from fastbert.layers.encoder import add_norm
from fastbert.layers.leaves import get_leaf, is_linear, is_plain, linear, place, weights_of
from fastbert.models.base import EncoderModel, PreTrainedModel, first_tokens
from fastbert.models.family import SequenceHead
from fastbert.models.outputs import Deferred, ModelOutput
from fastbert.packing import InputError, PackedBatch, checks_values


class HeadModel(PreTrainedModel):
    """A base model with a head. Subclasses say what to make of packed hidden states in `compute`."""

    base_class: ClassVar[type[EncoderModel]]
    needs_pooler: bool = False
    option_names: ClassVar[tuple[str, ...]] = ("labels",)  # keyword arguments that `compute` receives

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "base_class" in cls.__dict__:
            cls.family = cls.base_class.family

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        self.add_module(self.family.prefix, self.base_class(self.config, add_pooling_layer=self.needs_pooler))
        self.build_head(self.config)
        self.init_weights()

    def build_head(self, config: EncoderConfig) -> None:
        raise NotImplementedError

    def compute(self, packed: torch.Tensor, batch: PackedBatch, given: dict) -> dict:
        """Fields of the output, loss first, from packed hidden states (total_tokens, hidden_size).

        `given` holds those of `option_names` that the caller passed.
        """
        raise NotImplementedError

    @property
    def base_model(self) -> EncoderModel:
        return self._modules[self.family.prefix]  # type: ignore[return-value]

    def drop(self, x: torch.Tensor, p: float) -> torch.Tensor:
        return ops.dropout(x, p) if self.training else x

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        *,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: int | None = None,
        **options,
    ) -> ModelOutput | tuple:
        """As the base model's forward; with labels the output starts with `loss`.

        Labels have the input's own layout: per token (batch, seqlen) or packed (total_tokens,), per sequence (batch,).
        """
        given = {"labels": labels, **options}
        given = {name: value for name, value in given.items() if value is not None}
        unknown = set(given) - set(self.option_names)
        if unknown:
            raise TypeError(
                f"{type(self).__name__} takes no {', '.join(sorted(unknown))}; it has {', '.join(self.option_names)}"
            )
        arguments = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, cu_seqlens, max_seqlen)
        packed, batch, extras = self.base_model.run(arguments, output_attentions, output_hidden_states)
        output = ModelOutput(**self.compute(packed, batch, given), **extras)
        return output.to_tuple() if return_dict is False else output

    def pack_labels(self, labels: torch.Tensor, batch: PackedBatch, limit: int, name: str = "labels") -> torch.Tensor:
        """Token labels in packed order, checked: -100 or within [0, limit)."""
        shape = (batch.total_tokens,) if batch.seqlen is None else (batch.batch_size, batch.seqlen)
        if labels.shape != shape:
            raise InputError(f"{name} has shape {tuple(labels.shape)}; it must be {shape}")
        labels = labels.long() if batch.seqlen is None else batch.pack(labels.long())
        return check_labels(labels, limit, name)


def check_labels(labels: torch.Tensor, limit: int, name: str) -> torch.Tensor:
    if labels.numel() and checks_values():
        low, high = torch.stack(torch.where(labels == -100, 0, labels).aminmax()).tolist()
        if low < 0 or high >= limit:
            raise InputError(f"{name} holds {low if low < 0 else high}; valid values are 0 to {limit - 1}, and -100")
    return labels


def sequence_loss(config: EncoderConfig, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Regression, single- or multi-label loss of (batch, num_labels) logits; kinds as transformers infers them."""
    kind = config.problem_type
    if kind is None:
        if config.num_labels == 1:
            kind = "regression"
        else:
            kind = "multi_label_classification" if labels.is_floating_point() else "single_label_classification"
    if kind == "single_label_classification":
        return class_loss(logits, labels)
    if labels.numel() != logits.numel():
        raise InputError(f"labels has shape {tuple(labels.shape)}; the logits' is {tuple(logits.shape)}")
    logits = ops.at_least_fp32(logits)
    labels = labels.reshape(logits.shape).to(logits.dtype)
    if kind == "regression":
        return F.mse_loss(logits, labels)
    if kind == "multi_label_classification":
        return F.binary_cross_entropy_with_logits(logits, labels)
    raise InputError(
        f"problem_type {kind!r} is none of regression, single_label_classification, multi_label_classification"
    )


class MaskedLMHeadModel(HeadModel):
    """The masked-LM head: dense, activation, norm and a decoder whose weight is the word embedding."""

    def build_masked_lm(self, config: EncoderConfig) -> None:
        names = self.family.masked_lm
        width = config.embedding_width
        leaves = {"dense": nn.Linear(config.hidden_size, width), "norm": nn.LayerNorm(width, eps=config.layer_norm_eps)}
        for role in names.order:
            place(self, getattr(names, role), leaves[role])
        if names.bias is not None:
            parent, _, leaf = names.bias.rpartition(".")
            get_leaf(self, parent).register_parameter(leaf, nn.Parameter(torch.zeros(config.vocab_size)))
        place(self, names.decoder, nn.Linear(width, config.vocab_size))

    def tied_keys(self) -> dict[str, str]:
        """Second names of shared tensors -> the name that a file holds."""
        names = self.family.masked_lm
        if not self.config.tie_word_embeddings:
            return {}
        word = f"{self.family.prefix}.{self.family.embeddings.word}.weight"
        tied = {f"{names.decoder}.weight": word}
        if names.bias is not None:
            tied[f"{names.decoder}.bias"] = names.bias
        return tied

    def tie_weights(self) -> None:
        for copy, original in self.tied_keys().items():
            (copy_root, copy_leaf), (root, leaf) = (key.rsplit(".", 1) for key in (copy, original))
            get_leaf(self, copy_root)._parameters[copy_leaf] = get_leaf(self, root)._parameters[leaf]

    def get_output_embeddings(self) -> nn.Module:
        return get_leaf(self, self.family.masked_lm.decoder)

    def num_words(self) -> int:
        """The classes of the decoder that is there; a leaf that is not plain checks labels by itself."""
        decoder = self.get_output_embeddings()
        return weights_of(decoder).weight.shape[0] if is_linear(decoder) else self.config.vocab_size

    def decoder_loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of decoder(hidden) (tokens, vocab_size), every token labelled."""
        decoder = self.get_output_embeddings()
        if is_plain(decoder, nn.Linear):
            return ops.cross_entropy(hidden, decoder.weight, decoder.bias, labels)
        logits = decoder(hidden)  # hooked, or LoRA's: called, as every leaf is
        return ops.logits_cross_entropy(logits, labels)

    def masked_lm_hidden(self, packed: torch.Tensor) -> torch.Tensor:
        """The head before its decoder: (tokens, hidden_size) -> (tokens, embedding_size)."""
        names = self.family.masked_lm
        name = names.activation or self.config.activation
        x = linear(get_leaf(self, names.dense), packed, name)
        return add_norm(get_leaf(self, names.norm), x, None, None, 0.0)

    def masked_lm_logits(self, packed: torch.Tensor, batch: PackedBatch):
        decoder = self.get_output_embeddings()
        return batch.unpack(linear(decoder, self.masked_lm_hidden(packed)))

    def masked_lm_loss(self, packed: torch.Tensor, batch: PackedBatch, labels: torch.Tensor) -> torch.Tensor:
        """The whole head runs for labelled tokens only."""
        labels = self.pack_labels(labels, batch, self.num_words())
        kept = (labels != -100).nonzero().flatten()
        hidden = self.masked_lm_hidden(packed.index_select(0, kept))
        return self.decoder_loss(hidden, labels.index_select(0, kept))


class ForMaskedLM(MaskedLMHeadModel):
    """Masked language modelling (Devlin et al. 2018, section 3.1).

    With labels, the decoder runs for labelled tokens only; `logits` of all tokens are computed if they are read.
    """

    def build_head(self, config):
        self.build_masked_lm(config)

    def compute(self, packed, batch, given):
        if not given:
            return {"logits": self.masked_lm_logits(packed, batch)}
        logits = Deferred(lambda: self.masked_lm_logits(packed, batch), packed.device.type)
        return {"loss": self.masked_lm_loss(packed, batch, given["labels"]), "logits": logits}


class ForNextSentencePrediction(HeadModel):
    """Is sentence B what follows A (0) or a random one (1)?"""

    needs_pooler = True

    def build_head(self, config):
        place(self, self.family.pair, nn.Linear(config.hidden_size, 2))

    def compute(self, packed, batch, given):
        logits = linear(get_leaf(self, self.family.pair), self.base_model.pool(packed, batch))
        loss = class_loss(logits, given["labels"]) if given else None
        return {"loss": loss, "logits": logits}


def class_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of (batch, num_classes) logits, a label a sequence."""
    labels = labels.reshape(-1)
    if labels.shape[0] != logits.shape[0]:
        raise InputError(f"labels has {labels.shape[0]} entries for {logits.shape[0]} sequences")
    labels = check_labels(labels.long(), logits.shape[-1], "labels")
    return ops.logits_cross_entropy(logits, labels)


class ForPreTraining(MaskedLMHeadModel):
    """Masked LM and a sentence-pair head together: next sentence (BERT) or sentence order (ALBERT)."""

    needs_pooler = True
    pair_label: ClassVar[str] = "next_sentence_label"
    pair_logits: ClassVar[str] = "seq_relationship_logits"
    option_names = ("labels", "next_sentence_label")

    def build_head(self, config):
        self.build_masked_lm(config)
        place(self, self.family.pair, nn.Linear(config.hidden_size, self.pair_size(config)))

    def pair_size(self, config: EncoderConfig) -> int:
        return 2

    def compute(self, packed, batch, given):
        pair = linear(get_leaf(self, self.family.pair), self.pair_input(self.base_model.pool(packed, batch)))
        if len(given) < 2:  # as transformers: the loss needs both kinds of labels
            return {"prediction_logits": self.masked_lm_logits(packed, batch), self.pair_logits: pair}
        logits = Deferred(lambda: self.masked_lm_logits(packed, batch), packed.device.type)
        loss = self.masked_lm_loss(packed, batch, given["labels"]) + class_loss(pair, given[self.pair_label])
        return {"loss": loss, "prediction_logits": logits, self.pair_logits: pair}

    def pair_input(self, pooled: torch.Tensor) -> torch.Tensor:
        return pooled


class SequenceHeadModel(HeadModel):
    """One vector a sequence, then a classifier; the family's SequenceHead says how."""

    def sequence_head(self) -> SequenceHead:
        raise NotImplementedError

    def build_sequence_head(self, config: EncoderConfig, num_outputs: int) -> None:
        head = self.sequence_head()
        if head.dense is not None:
            place(self, head.dense, nn.Linear(config.hidden_size, config.hidden_size))
        place(self, head.out, nn.Linear(config.hidden_size, num_outputs))

    def sequence_logits(self, packed: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        head, p = self.sequence_head(), self.sequence_head().dropout(self.config)
        if head.pooled:
            x = self.base_model.pool(packed, batch)
        else:
            x = first_tokens(packed, batch)
        if head.dropout_first:
            x = self.drop(x, p)
        if head.dense is not None:
            x = linear(get_leaf(self, head.dense), x)
            name = head.activation(self.config)
            x = ops.activation(x, ACTIVATIONS[name]) if name else x  # transformers takes "" for none, too
        return linear(get_leaf(self, head.out), self.drop(x, p))


class ForSequenceClassification(SequenceHeadModel):
    """Classes, several labels at once, or regression, of whole sequences (`problem_type`, or inferred)."""

    def sequence_head(self):
        return self.family.sequence

    @property
    def needs_pooler(self):  # type: ignore[override]
        return self.family.sequence.pooled

    def build_head(self, config):
        self.build_sequence_head(config, config.num_labels)

    def compute(self, packed, batch, given):
        logits = self.sequence_logits(packed, batch)
        loss = sequence_loss(self.config, logits, given["labels"]) if given else None
        return {"loss": loss, "logits": logits}


class ForMultipleChoice(SequenceHeadModel):
    """One score a choice. Inputs are (batch, num_choices, seqlen); or packed, num_choices sequences an example."""

    option_names = ("labels", "num_choices")

    def sequence_head(self):
        return self.family.multiple_choice

    @property
    def needs_pooler(self):  # type: ignore[override]
        return self.family.multiple_choice.pooled

    def build_head(self, config):
        self.build_sequence_head(config, 1)

    def forward(self, input_ids=None, attention_mask=None, token_type_ids=None, position_ids=None, inputs_embeds=None,
                *args, num_choices: int | None = None, **kwargs):  # fmt: skip
        """As other heads; packed input needs `num_choices`, padded input has it in its shape."""
        if kwargs.get("cu_seqlens") is None:
            given, rank = (input_ids, 3) if input_ids is not None else (inputs_embeds, 4)
            if given is None or given.dim() != rank:
                shape = None if given is None else tuple(given.shape)
                raise InputError(f"multiple choice takes inputs of shape (batch, num_choices, seqlen), not {shape}")
            num_choices = given.shape[1]
            inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
            flat = (t if t is None or t.dim() < 3 else t.flatten(0, 1) for t in inputs)
            return super().forward(*flat, *args, num_choices=num_choices, **kwargs)
        if num_choices is None:
            raise InputError("packed input of a multiple-choice model needs num_choices")
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        return super().forward(*inputs, *args, num_choices=num_choices, **kwargs)

    def compute(self, packed, batch, given):
        num_choices = given["num_choices"]
        if batch.batch_size % num_choices:
            raise InputError(f"{batch.batch_size} sequences are no multiple of num_choices {num_choices}")
        logits = self.sequence_logits(packed, batch).view(-1, num_choices)
        return {"loss": class_loss(logits, given["labels"]) if "labels" in given else None, "logits": logits}


class ForTokenClassification(HeadModel):
    """A class for every token; tokens labelled -100 do not count."""

    def build_head(self, config):
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

    def compute(self, packed, batch, given):
        x = self.drop(packed, self.family.token_dropout(self.config))
        logits = linear(self.classifier, x)
        loss = None
        if given:
            packed_labels = self.pack_labels(given["labels"], batch, logits.shape[-1])
            loss = ops.logits_cross_entropy(logits, packed_labels)
        return {"loss": loss, "logits": batch.unpack(logits)}


class ForQuestionAnswering(HeadModel):
    """The start and end of an answer: a softmax over each sequence's own tokens (Devlin et al. 2018, section 4.2).

    `start_positions`, `end_positions` (batch,) are columns of the padded input, or places in the sequence if packed.
    Padding takes no part in the softmax; positions outside the sequence do not count.
    """

    option_names = ("start_positions", "end_positions")

    def build_head(self, config):
        self.qa_outputs = nn.Linear(config.hidden_size, config.num_labels)

    def compute(self, packed, batch, given):
        logits = linear(self.qa_outputs, self.drop(packed, self.config.qa_dropout))
        if logits.shape[-1] != 2:
            raise InputError(f"question answering needs num_labels 2, not {logits.shape[-1]}")
        start, end = logits.unbind(-1)
        loss = None
        if len(given) == 2:
            losses = []
            for one, name in ((start, "start_positions"), (end, "end_positions")):
                targets = given[name].long().reshape(-1)
                if targets.shape[0] != batch.batch_size:
                    raise InputError(f"{name} has {targets.shape[0]} entries for {batch.batch_size} sequences")
                losses.append(ops.sequence_cross_entropy(one, batch.cu_seqlens, batch.local_targets(targets)))
            loss = (losses[0] + losses[1]) / 2
        return {"loss": loss, "start_logits": batch.unpack(start), "end_logits": batch.unpack(end)}
