"""Heads that classify: sequences, choices, tokens and the ends of answers. A family's data say what is in them."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from fastbert import ops
from fastbert.config import ACTIVATIONS, EncoderConfig
from fastbert.errors import InputError
from fastbert.execution.request import first_tokens
from fastbert.families.schema import ClassifierHead, ReplacedTokens, value_of
from fastbert.layers.encoder import add_norm
from fastbert.layers.leaves import get_leaf, linear, parent_of, set_module, within
from fastbert.layers.norms import make_norm
from fastbert.models.heads import Encoded, HeadModel, class_labels, mean_loss, token_labels, whole_labels
from fastbert.models.inputs import check_tensors
from fastbert.models.parts import head_parts
from fastbert.packed_inputs import ModelInputs, PackedInputs
from fastbert.packing import PackedBatch


def last_tokens(packed: torch.Tensor, batch: PackedBatch, is_word: torch.Tensor | None = None) -> torch.Tensor:
    """(total_tokens, hidden_size) -> each sequence's last real token, (batch, hidden_size); zeros if it has none.

    is_word, (total_tokens,): which of them count; where none does, it is the first.
    """
    if not batch.total_tokens:
        return first_tokens(packed, batch)
    starts, ends = batch.cu_seqlens[:-1].long(), batch.cu_seqlens[1:].long()
    last = (ends - 1).clamp(min=0)
    if is_word is not None:
        places = torch.arange(len(is_word), device=is_word.device)
        last = torch.where(is_word, places, -1).cummax(0).values.index_select(0, last).maximum(starts)
        last = last.clamp(max=len(is_word) - 1)
    return packed.index_select(0, last).where((ends > starts)[:, None], 0.0)


class ClassifierModel(HeadModel):
    """A Linear, and what may stand before it, over one vector a sequence or each token: a schema.ClassifierHead."""

    head_spec: ClassVar[ClassifierHead]

    @property
    def pooling(self) -> str:
        return self.head_spec.pooling_of(self.config)

    @property
    def needs_pooler(self) -> bool:
        return self.pooling == "pooler"

    @property
    def label_leaf(self):
        return self.head_spec.out

    @property
    def num_labels(self) -> int:
        """The config's; assigned, as in transformers, it is the number that a loss goes by."""
        return self.config.num_labels

    @num_labels.setter
    def num_labels(self, value: int) -> None:
        self.config.num_labels = value

    def num_outputs(self, config: EncoderConfig) -> int:
        return config.num_labels

    def build_head(self, config):
        head, width = self.head_spec, config.hidden_size
        if head.dense is not None:
            set_module(self, head.dense, nn.Linear(width, width, bias=value_of(head.dense_bias, config)))
        if head.norm is not None:
            set_module(self, head.norm, make_norm(self.family.norm_spec(config), width))
        set_module(self, head.out, nn.Linear(width, self.num_outputs(config), bias=head.out_bias))

    def scores(self, encoded: Encoded) -> torch.Tensor:
        """What `out` makes: (batch, num_outputs), or (total_tokens, num_outputs) if the head runs over tokens."""
        scores = self.classified(self.vectors(encoded))
        return ops.pooling(scores, encoded.batch.cu_seqlens, mode="mean") if self.pooling == "late" else scores

    def vectors(self, encoded: Encoded) -> torch.Tensor:
        """What the head reads: a vector a sequence, (batch, hidden_size), or a token, (total_tokens, hidden_size)."""
        packed, batch, pooling = encoded.packed, encoded.batch, self.pooling
        if pooling == "pooler":
            return encoded.pooled()
        if pooling == "first":
            return first_tokens(packed, batch)
        if pooling == "last":
            ids, pad = encoded.input_ids, self.config.pad_token_id
            if not self.head_spec.last_by_id or ids is None or pad is None:
                return last_tokens(packed, batch)
            return last_tokens(packed, batch, ids.ne(pad))
        return ops.pooling(packed, batch.cu_seqlens, mode="mean") if pooling == "mean" else packed

    def packed_vectors(self, packed: PackedInputs) -> torch.Tensor:
        """`vectors` of a batch; `classified` makes logits of them."""
        arguments = ModelInputs(packed)
        encoded, _ = self.run_base(self.base_model.prepare(arguments), arguments)
        return self.vectors(encoded)

    def classified(self, x: torch.Tensor) -> torch.Tensor:
        """(n, hidden_size) -> (n, num_outputs), containers with hooks included."""
        return within(self, parent_of(self.head_spec.out), self.classified_inside, x)

    def classified_inside(self, x: torch.Tensor) -> torch.Tensor:
        """The same, inside of the container that holds `out`."""
        x = within(self, self.dense_container, self.before_out, x)
        return linear(get_leaf(self, self.head_spec.out), x)

    @property
    def dense_container(self) -> str | None:
        """What holds `dense` alone; None where there is none, or the container of `out` holds it, too."""
        head = self.head_spec
        return parent_of(head.dense) if head.dense is not None and parent_of(head.out) is None else None

    def before_out(self, x: torch.Tensor) -> torch.Tensor:
        """What `out` runs over: (n, hidden_size) -> (n, hidden_size)."""
        head, p = self.head_spec, value_of(self.head_spec.dropout, self.config)
        if head.drops_first:
            x = self.drop(x, p if head.first_dropout is None else value_of(head.first_dropout, self.config))
        if head.dense is not None:
            x = linear(get_leaf(self, head.dense), x)
            name = value_of(head.activation, self.config)
            x = ops.activation(x, ACTIVATIONS[name]) if name else x
        if head.norm is not None:
            x = add_norm(get_leaf(self, head.norm), x, None, None, 0.0)
        return self.drop(x, p)

    def callable_parts(self):
        head = self.head_spec
        pools = head.container_pools and self.pooling == "first"
        runs = {parent_of(head.out): self.classified_inside, self.dense_container: self.before_out}
        return head_parts(runs, pools)


PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")


def problem_type(config: EncoderConfig, labels: torch.Tensor) -> str:
    """What labels of sequences mean: as the config says, else as transformers infers it."""
    if config.problem_type is None:
        problems = PROBLEMS[:1] if config.num_labels == 1 else PROBLEMS[1:]
        return problems[-1] if labels.is_floating_point() else problems[0]
    if config.problem_type not in PROBLEMS:
        raise InputError(f"problem_type {config.problem_type!r} is none of {', '.join(PROBLEMS)}")
    return config.problem_type


def check_numbers(labels: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Labels of a regression, or of several at once: a number a logit."""
    if labels.numel() != math.prod(shape):
        raise InputError(f"labels has shape {tuple(labels.shape)}; the logits' is {shape}")
    return labels.reshape(shape)


def float_labels(labels: torch.Tensor, batch: PackedBatch, classes: int | None) -> torch.Tensor:
    """Such labels as floats, checked: -100 is a number like another here, and says nothing of a label that is not."""
    labels = labels if labels.is_floating_point() else labels.float()
    return labels if classes is None else check_numbers(labels, (batch.batch_size, classes))


class ForSequenceClassification(ClassifierModel):
    """Classes, several labels at once, or regression, of whole sequences (`problem_type`, or inferred)."""

    def has_soft_labels(self) -> bool:
        """Whether labels mean what `ClassifierHead.soft_labels` says."""
        return self.head_spec.soft_labels and self.config.problem_type is None

    def check_options(self, options, batch):
        if not options:
            return {}
        labels, classes = options["labels"], self.classes_at(self.label_leaf)
        if self.has_soft_labels() and self.config.num_labels > 1:
            return {"labels": self.check_soft(labels, batch, classes)}
        if problem_type(self.config, labels) == "single_label_classification":
            return {"labels": class_labels(labels, batch, classes)}
        return {"labels": float_labels(labels, batch, classes)}

    def check_soft(self, labels: torch.Tensor, batch: PackedBatch, classes: int | None) -> torch.Tensor:
        """Classes (batch,), of which those below 0 do not count and are -100 now; or shares (batch, classes)."""
        if labels.dim() == 1 or labels.shape[-1] == 1:
            return class_labels(torch.where(labels < 0, -100, labels), batch, classes)
        return float_labels(labels, batch, classes)

    def compute(self, encoded, options):
        logits = self.scores(encoded)
        if options and self.has_soft_labels() and self.config.num_labels == 1:  # with labels, as in transformers
            logits = logits.reshape(-1)
        return {"loss": self.loss(logits, options["labels"], encoded.batch) if options else None, "logits": logits}

    def loss(self, logits: torch.Tensor, labels: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        """Regression, single- or multi-label loss of (batch, num_labels) logits: a mean over sequences with tokens."""
        has_soft_labels = self.has_soft_labels() and self.config.num_labels > 1
        if has_soft_labels and labels.dim() > 1:
            shares = check_numbers(labels, tuple(logits.shape))
            return mean_loss(-(ops.at_least_fp32(logits).log_softmax(-1) * shares).sum(-1), batch)
        problem = PROBLEMS[1] if has_soft_labels else problem_type(self.config, labels)
        if problem == "single_label_classification":
            return self.class_loss(self.label_leaf, logits, labels, batch)
        logits = ops.at_least_fp32(logits)
        labels = check_numbers(labels, tuple(logits.shape)).to(logits.dtype)
        loss = F.mse_loss if problem == "regression" else F.binary_cross_entropy_with_logits
        return mean_loss(loss(logits, labels, reduction="none"), batch)


class ForMultipleChoice(ClassifierModel):
    """One score a choice. Inputs are (batch, num_choices, seqlen); or packed, num_choices sequences an example."""

    option_names = ("labels", "num_choices")

    @property
    def label_leaf(self):
        return None

    def num_outputs(self, config):
        return 1

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        token_type_ids=None,
        position_ids=None,
        inputs_embeds=None,
        labels=None,
        *args,
        num_choices: int | None = None,
        task_type_ids=None,
        **kwargs,
    ):
        """As other heads (the Trainer finds `labels` here); packed input needs `num_choices`, padded input shows it."""
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, task_type_ids)
        padded = kwargs.get("cu_seqlens") is None and kwargs.get("batch") is None
        if padded and not isinstance(input_ids, PackedInputs):
            check_tensors(ModelInputs(*inputs[:5], task_type_ids=task_type_ids).tensors())
            values, rank = (input_ids, 3) if input_ids is not None else (inputs_embeds, 4)
            if values is None or values.dim() != rank:
                shape = None if values is None else tuple(values.shape)
                raise InputError(f"multiple choice takes inputs of shape (batch, num_choices, seqlen), not {shape}")
            num_choices = values.shape[1]
            inputs = tuple(t if t is None or t.dim() < 3 else t.flatten(0, 1) for t in inputs)
        return super().forward(*inputs[:5], labels, *args, num_choices=num_choices, task_type_ids=inputs[5], **kwargs)

    def check_options(self, options, batch):
        num_choices = options.get("num_choices")
        if num_choices is None:
            raise InputError("packed input of a multiple-choice model needs num_choices")
        if batch.batch_size % num_choices:
            raise InputError(f"{batch.batch_size} sequences are no multiple of num_choices {num_choices}")
        if "labels" not in options:
            return options
        return options | {"labels": class_labels(options["labels"], batch, num_choices, num_choices=num_choices)}

    def compute(self, encoded, options):
        logits = self.scores(encoded).view(-1, options["num_choices"])
        return {
            "loss": ops.logits_cross_entropy(logits, options["labels"]) if "labels" in options else None,
            "logits": logits,
        }


class ForTokenClassification(ClassifierModel):
    """A class for every token; tokens labelled -100 do not count."""

    def check_options(self, options, batch):
        classes = self.classes_at(self.head_spec.out)
        return {name: token_labels(labels, batch, classes) for name, labels in options.items()}

    def compute(self, encoded, options):
        batch, logits = encoded.batch, self.scores(encoded)
        loss = self.class_loss(self.head_spec.out, logits, options["labels"], batch) if options else None
        return {"loss": loss, "logits": batch.unpack(logits)}


class ForQuestionAnswering(ClassifierModel):
    """The start and end of an answer: a softmax over each sequence's own tokens (Devlin et al. 2018, section 4.2).

    `start_positions`, `end_positions` (batch,) are columns of the padded input, or places in the sequence if packed.
    Padding takes no part in the softmax. Positions below 0 are 0, as in transformers; others outside the sequence do
    not count.
    """

    option_names = ("start_positions", "end_positions")

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        token_type_ids=None,
        position_ids=None,
        inputs_embeds=None,
        start_positions=None,
        end_positions=None,
        *args,
        **kwargs,
    ):
        """As other heads; the Trainer finds the names of its labels here."""
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, None)
        return super().forward(*inputs, *args, start_positions=start_positions, end_positions=end_positions, **kwargs)

    def check_options(self, options, batch):
        if len(options) < 2:
            return {}
        first = {name: whole_labels(positions, name).clamp(min=0) for name, positions in options.items()}
        return {name: class_labels(positions, batch, None, name) for name, positions in first.items()}

    def compute(self, encoded, options):
        batch, logits = encoded.batch, self.scores(encoded)
        if logits.shape[-1] != 2:
            raise InputError(f"question answering needs num_labels 2, not {logits.shape[-1]}")
        start, end = logits.unbind(-1)
        loss = None
        if options:
            losses = []
            for one, name in ((start, "start_positions"), (end, "end_positions")):
                losses.append(ops.sequence_cross_entropy(one, batch.cu_seqlens, batch.local_targets(options[name])))
            loss = (losses[0] + losses[1]) / 2
        return {"loss": loss, "start_logits": batch.unpack(start), "end_logits": batch.unpack(end)}


class ForReplacedTokens(HeadModel):
    """The discriminator: was each token replaced (1) or not (0)? The loss counts real tokens only (Clark et al. 2020,
    section 2). Tokens labelled -100 do not count either.
    """

    head_spec: ClassVar[ReplacedTokens]

    def build_head(self, config):
        set_module(self, self.head_spec.dense, nn.Linear(config.hidden_size, config.hidden_size))
        set_module(self, self.head_spec.out, nn.Linear(config.hidden_size, 1))

    def scored(self, x: torch.Tensor) -> torch.Tensor:
        """(total_tokens, hidden_size) -> (total_tokens,), inside of the head's container."""
        x = linear(get_leaf(self, self.head_spec.dense), x, self.config.activation)
        return linear(get_leaf(self, self.head_spec.out), x).squeeze(-1)

    def callable_parts(self):
        return head_parts({parent_of(self.head_spec.out): self.scored})

    def check_options(self, options, batch):
        return {name: token_labels(labels, batch, 2, counts_padding=False) for name, labels in options.items()}

    def compute(self, encoded, options):
        batch, loss = encoded.batch, None
        logits = within(self, parent_of(self.head_spec.out), self.scored, encoded.packed)
        if options:
            labels = options["labels"]
            scores = ops.at_least_fp32(logits)
            losses = F.binary_cross_entropy_with_logits(scores, labels.to(scores.dtype), reduction="none")
            loss = losses.where(labels != -100, 0.0).sum() / (labels != -100).sum().clamp(min=1)
        return {"loss": loss, "logits": batch.unpack(logits)}
