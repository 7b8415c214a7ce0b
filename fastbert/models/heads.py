"""Heads with losses, on packed tokens: nothing is unpacked but the logits that go back to the caller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from fastbert import ops
from fastbert.config import ACTIVATIONS, EncoderConfig
from fastbert.layers.leaves import get_leaf, linear, parent_of, place, within
from fastbert.models.base import EncoderModel, PreTrainedModel, first_tokens, must_be_called
from fastbert.models.family import SequenceHead
from fastbert.models.outputs import ModelOutput
from fastbert.packing import InputError, PackedBatch, checks_values


@dataclass(frozen=True)
class Encoded:
    """What a base model made of a batch: packed hidden states (total_tokens, hidden_size)."""

    base: EncoderModel
    packed: torch.Tensor
    batch: PackedBatch
    pooler_output: torch.Tensor | None = None  # where the base model was called: it has hooks, or a forward of its own

    def pooled(self) -> torch.Tensor:
        """(batch, hidden_size)."""
        return self.base.pool(self.packed, self.batch) if self.pooler_output is None else self.pooler_output


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

    def compute(self, encoded: Encoded, given: dict) -> dict:
        """Fields of the output, loss first.

        `given` holds those of `option_names` that the caller passed.
        """
        raise NotImplementedError

    @property
    def base_model(self) -> EncoderModel:
        return self._modules[self.family.prefix]  # type: ignore[return-value]

    @property
    def label_leaf(self) -> str | None:
        """The path of the Linear that has a row a label; None where the number of labels makes no shape."""
        return None

    @property
    def live_config(self) -> EncoderConfig:
        config, path = super().live_config, self.label_leaf
        leaf = None if path is None else get_leaf(self, path)
        weight = leaf._parameters.get("weight") if isinstance(leaf, nn.Linear) else None
        return config if weight is None else config.replace(num_labels=weight.shape[0])

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
        encoded, extras = self.run_base(arguments, output_attentions, output_hidden_states)
        output = ModelOutput(**self.compute(encoded, given), **extras)
        return output.to_tuple() if return_dict is False else output

    def run_base(
        self, arguments: tuple, output_attentions: bool | None = None, output_hidden_states: bool | None = None
    ) -> tuple[Encoded, dict]:
        """Run the base model on the arguments of its `prepare`; also the extras that were asked for, unpacked."""
        base = self.base_model
        if not must_be_called(base):
            packed, batch, extras = base.run(arguments, output_attentions, output_hidden_states)
            return Encoded(base, packed, batch), extras
        *inputs, cu_seqlens, max_seqlen = arguments
        output = base(*inputs, output_attentions, output_hidden_states, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
        batch, hidden = base.prepare(*arguments).batch, output.last_hidden_state
        packed = hidden if batch.seqlen is None else batch.pack(hidden)
        extras = {name: output[name] for name in ("hidden_states", "attentions") if name in output}
        return Encoded(base, packed, batch, output.pooler_output if base.has_pooler else None), extras

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


def class_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of (batch, num_classes) logits, a label a sequence."""
    labels = labels.reshape(-1)
    if labels.shape[0] != logits.shape[0]:
        raise InputError(f"labels has {labels.shape[0]} entries for {logits.shape[0]} sequences")
    labels = check_labels(labels.long(), logits.shape[-1], "labels")
    return ops.logits_cross_entropy(logits, labels)


class SequenceHeadModel(HeadModel):
    """One vector a sequence, then a classifier; the family's SequenceHead says how."""

    def sequence_head(self) -> SequenceHead:
        raise NotImplementedError

    def build_sequence_head(self, config: EncoderConfig, num_outputs: int) -> None:
        head = self.sequence_head()
        if head.dense is not None:
            place(self, head.dense, nn.Linear(config.hidden_size, config.hidden_size))
        place(self, head.out, nn.Linear(config.hidden_size, num_outputs))

    def sequence_logits(self, encoded: Encoded) -> torch.Tensor:
        head, p = self.sequence_head(), self.sequence_head().dropout(self.config)
        around = parent_of(head.out)  # holds dense, too, where there is one

        def dense(x):
            if head.dropout_first:
                x = self.drop(x, p)
            if head.dense is not None:
                x = linear(get_leaf(self, head.dense), x)
                name = head.activation(self.config)
                x = ops.activation(x, ACTIVATIONS[name]) if name else x
            return self.drop(x, p)

        def out(x):
            x = within(self, parent_of(head.dense), dense, x) if around is None and head.dense else dense(x)
            return linear(get_leaf(self, head.out), x)

        x = encoded.pooled() if head.pooled else first_tokens(encoded.packed, encoded.batch)
        return within(self, around, out, x)


class ForSequenceClassification(SequenceHeadModel):
    """Classes, several labels at once, or regression, of whole sequences (`problem_type`, or inferred)."""

    def sequence_head(self):
        return self.family.sequence

    @property
    def needs_pooler(self):  # type: ignore[override]
        return self.family.sequence.pooled

    @property
    def label_leaf(self):
        return self.family.sequence.out

    def build_head(self, config):
        self.build_sequence_head(config, config.num_labels)

    def compute(self, encoded, given):
        logits = self.sequence_logits(encoded)
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

    def compute(self, encoded, given):
        num_choices, sequences = given["num_choices"], encoded.batch.batch_size
        if sequences % num_choices:
            raise InputError(f"{sequences} sequences are no multiple of num_choices {num_choices}")
        logits = self.sequence_logits(encoded).view(-1, num_choices)
        return {"loss": class_loss(logits, given["labels"]) if "labels" in given else None, "logits": logits}


class ForTokenClassification(HeadModel):
    """A class for every token; tokens labelled -100 do not count."""

    label_leaf = "classifier"  # type: ignore[assignment]

    def build_head(self, config):
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

    def compute(self, encoded, given):
        packed, batch = encoded.packed, encoded.batch
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
    label_leaf = "qa_outputs"  # type: ignore[assignment]

    def build_head(self, config):
        self.qa_outputs = nn.Linear(config.hidden_size, config.num_labels)

    def compute(self, encoded, given):
        packed, batch = encoded.packed, encoded.batch
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
