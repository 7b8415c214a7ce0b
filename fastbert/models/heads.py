"""Heads with losses, on packed tokens: nothing is unpacked but the logits that go back to the caller."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from fastbert import ops
from fastbert.config import ACTIVATIONS, EncoderConfig
from fastbert.layers.leaves import get_leaf, is_linear, linear, parent_of, place, weights_of, within
from fastbert.models.base import EncoderModel, PreTrainedModel, first_tokens, must_be_called
from fastbert.models.family import SequenceHead
from fastbert.models.inputs import EncoderInputs
from fastbert.models.outputs import ModelOutput
from fastbert.packed_inputs import PackedInputs, labels_of
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
    """A base model with a head. Subclasses say what labels they take in `check_given`, what to make of packed hidden
    states in `compute`.
    """

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

    def check_given(self, given: dict, batch: PackedBatch) -> dict:
        """What `compute` takes of the `option_names` that the caller passed: checked, labels of tokens packed, too.

        Raises InputError; nothing has been launched yet.
        """
        raise NotImplementedError

    def compute(self, encoded: Encoded, given: dict) -> dict:
        """Fields of the output, loss first."""
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
        input_ids: torch.Tensor | PackedInputs | None = None,
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
        batch: PackedBatch | None = None,
        **options,
    ) -> ModelOutput | tuple:
        """As the base model's forward; with labels the output starts with `loss`.

        Labels have the input's own layout: per token (batch, seqlen) or packed (total_tokens,), per sequence (batch,).
        Those of a PackedInputs are in it, and no device is waited for because of them.
        """
        given = {"labels": labels, **options}
        given = {name: value for name, value in given.items() if value is not None}
        if isinstance(input_ids, PackedInputs):
            given = labels_of(input_ids, given)
        unknown = set(given) - set(self.option_names)
        if unknown:
            raise TypeError(
                f"{type(self).__name__} takes no {', '.join(sorted(unknown))}; it has {', '.join(self.option_names)}"
            )
        arguments = (
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            inputs_embeds,
            cu_seqlens,
            max_seqlen,
            batch,
        )
        inputs = self.base_model.prepare(*arguments)
        given = self.check_given(given, inputs.batch)
        encoded, extras = self.run_base(inputs, arguments, output_attentions, output_hidden_states)
        output = ModelOutput(**self.compute(encoded, given), **extras)
        return output.to_tuple() if return_dict is False else output

    def run_base(
        self,
        inputs: EncoderInputs,
        arguments: tuple,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> tuple[Encoded, dict]:
        """Run the base model on what its `prepare` made of `arguments`; also the extras asked for, unpacked."""
        base = self.base_model
        if not must_be_called(base):
            packed, batch, extras = base.run(inputs, output_attentions, output_hidden_states)
            return Encoded(base, packed, batch), extras
        *others, cu_seqlens, max_seqlen, given_batch = arguments
        layout = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen, "batch": given_batch}
        layout = {name: value for name, value in layout.items() if value is not None}  # a forward may take fewer
        output = base(*others, output_attentions, output_hidden_states, **layout)
        batch, hidden = inputs.batch, output.last_hidden_state
        packed = hidden if batch.seqlen is None else batch.pack(hidden)
        extras = {name: output[name] for name in ("hidden_states", "attentions") if name in output}
        return Encoded(base, packed, batch, output.pooler_output if base.has_pooler else None), extras

    def classes_at(self, path: str) -> int | None:
        """How many classes the Linear at `path` has; None where something else is there, whose result shows it."""
        leaf = get_leaf(self, path)
        return weights_of(leaf).weight.shape[0] if is_linear(leaf) else None

    def class_loss(
        self, path: str, logits: torch.Tensor, labels: torch.Tensor, batch: PackedBatch, name: str = "labels"
    ) -> torch.Tensor:
        """Mean cross-entropy of what the leaf at `path` made, (n, num_classes), with labels (n,) of `check_given`."""
        if self.classes_at(path) is None:
            check_labels(labels, logits.shape[-1], name, batch)
        return ops.logits_cross_entropy(logits, labels)


def token_labels(labels: torch.Tensor, batch: PackedBatch, limit: int | None) -> torch.Tensor:
    """Labels of tokens in packed order, checked: -100 or within [0, limit); None: the classes are not known yet."""
    shape = (batch.total_tokens,) if batch.seqlen is None else (batch.batch_size, batch.seqlen)
    if labels.shape != shape:
        raise InputError(f"labels has shape {tuple(labels.shape)}; it must be {shape}")
    labels = labels.long() if batch.seqlen is None else batch.pack(labels.long())
    return labels if limit is None else check_labels(labels, limit, "labels", batch)


def class_labels(
    labels: torch.Tensor, num_sequences: int, batch: PackedBatch, limit: int | None, name: str = "labels"
) -> torch.Tensor:
    """A label a sequence, int64 (num_sequences,), checked as those of tokens."""
    labels = labels.reshape(-1)
    if labels.shape[0] != num_sequences:
        raise InputError(f"{name} has {labels.shape[0]} entries for {num_sequences} sequences")
    return labels.long() if limit is None else check_labels(labels.long(), limit, name, batch)


def check_labels(labels: torch.Tensor, limit: int, name: str, batch: PackedBatch) -> torch.Tensor:
    """`labels` if all are -100 or within [0, limit): by the bounds that the host has of them, or by a look."""
    if labels.numel() and checks_values():
        seen = (batch.bounds or {}).get(name)
        low, high = torch.stack(torch.where(labels == -100, 0, labels).aminmax()).tolist() if seen is None else seen
        if low < 0 or high >= limit:
            raise InputError(f"{name} holds {low if low < 0 else high}; valid values are 0 to {limit - 1}, and -100")
    return labels


_PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")


def problem_type(config: EncoderConfig, labels: torch.Tensor) -> str:
    """What labels of sequences mean: as the config says, else as transformers infers it."""
    if config.problem_type is None:
        kinds = _PROBLEMS[:1] if config.num_labels == 1 else _PROBLEMS[1:]
        return kinds[-1] if labels.is_floating_point() else kinds[0]
    if config.problem_type not in _PROBLEMS:
        raise InputError(f"problem_type {config.problem_type!r} is none of {', '.join(_PROBLEMS)}")
    return config.problem_type


def check_numbers(labels: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Labels of a regression, or of several at once: a number a logit."""
    if labels.numel() != math.prod(shape):
        raise InputError(f"labels has shape {tuple(labels.shape)}; the logits' is {shape}")
    return labels.reshape(shape)


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

    def check_given(self, given, batch):
        if not given:
            return {}
        labels, classes = given["labels"], self.classes_at(self.label_leaf)
        if problem_type(self.config, labels) == "single_label_classification":
            return {"labels": class_labels(labels, batch.batch_size, batch, classes)}
        return {"labels": labels if classes is None else check_numbers(labels, (batch.batch_size, classes))}

    def compute(self, encoded, given):
        logits = self.sequence_logits(encoded)
        return {"loss": self.loss(logits, given["labels"], encoded.batch) if given else None, "logits": logits}

    def loss(self, logits: torch.Tensor, labels: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        """Regression, single- or multi-label loss of (batch, num_labels) logits."""
        kind = problem_type(self.config, labels)
        if kind == "single_label_classification":
            return self.class_loss(self.label_leaf, logits, labels, batch)
        logits = ops.at_least_fp32(logits)
        labels = check_numbers(labels, tuple(logits.shape)).to(logits.dtype)
        return (
            F.mse_loss(logits, labels) if kind == "regression" else F.binary_cross_entropy_with_logits(logits, labels)
        )


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
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        padded = kwargs.get("cu_seqlens") is None and kwargs.get("batch") is None
        if padded and not isinstance(input_ids, PackedInputs):
            given, rank = (input_ids, 3) if input_ids is not None else (inputs_embeds, 4)
            if given is None or given.dim() != rank:
                shape = None if given is None else tuple(given.shape)
                raise InputError(f"multiple choice takes inputs of shape (batch, num_choices, seqlen), not {shape}")
            num_choices = given.shape[1]
            inputs = tuple(t if t is None or t.dim() < 3 else t.flatten(0, 1) for t in inputs)
        return super().forward(*inputs, *args, num_choices=num_choices, **kwargs)

    def check_given(self, given, batch):
        num_choices = given.get("num_choices")
        if num_choices is None:
            raise InputError("packed input of a multiple-choice model needs num_choices")
        if batch.batch_size % num_choices:
            raise InputError(f"{batch.batch_size} sequences are no multiple of num_choices {num_choices}")
        if "labels" not in given:
            return given
        examples = batch.batch_size // num_choices
        return given | {"labels": class_labels(given["labels"], examples, batch, num_choices)}

    def compute(self, encoded, given):
        logits = self.sequence_logits(encoded).view(-1, given["num_choices"])
        return {
            "loss": ops.logits_cross_entropy(logits, given["labels"]) if "labels" in given else None,
            "logits": logits,
        }


class ForTokenClassification(HeadModel):
    """A class for every token; tokens labelled -100 do not count."""

    label_leaf = "classifier"  # type: ignore[assignment]

    def build_head(self, config):
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

    def check_given(self, given, batch):
        return {name: token_labels(labels, batch, self.classes_at("classifier")) for name, labels in given.items()}

    def compute(self, encoded, given):
        packed, batch = encoded.packed, encoded.batch
        x = self.drop(packed, self.family.token_dropout(self.config))
        logits = linear(self.classifier, x)
        loss = self.class_loss("classifier", logits, given["labels"], batch) if given else None
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

    def check_given(self, given, batch):
        if len(given) < 2:
            return {}
        return {name: class_labels(positions, batch.batch_size, batch, None, name) for name, positions in given.items()}

    def compute(self, encoded, given):
        packed, batch = encoded.packed, encoded.batch
        logits = linear(self.qa_outputs, self.drop(packed, self.config.qa_dropout))
        if logits.shape[-1] != 2:
            raise InputError(f"question answering needs num_labels 2, not {logits.shape[-1]}")
        start, end = logits.unbind(-1)
        loss = None
        if given:
            losses = []
            for one, name in ((start, "start_positions"), (end, "end_positions")):
                losses.append(ops.sequence_cross_entropy(one, batch.cu_seqlens, batch.local_targets(given[name])))
            loss = (losses[0] + losses[1]) / 2
        return {"loss": loss, "start_logits": batch.unpack(start), "end_logits": batch.unpack(end)}
