"""Heads with losses, on packed tokens: nothing is unpacked but the logits that go back to the caller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from fastbert import ops
from fastbert.checkpoint.unfilled import may_be_unfilled
from fastbert.config import EncoderConfig
from fastbert.errors import InputError
from fastbert.execution.request import EncoderInputs
from fastbert.layers.leaves import get_leaf, in_use, is_linear, weights_of
from fastbert.models.base import EncoderModel, PreTrainedModel, must_be_called
from fastbert.models.hf.recording import record, records_hf
from fastbert.models.inputs import check_tensors, taken
from fastbert.models.outputs import ModelOutput
from fastbert.models.parts import Run, place_parts
from fastbert.packed_inputs import ModelInputs, PackedInputs, labels_of
from fastbert.packing import PADDED_LABELS, PackedBatch, checks_values


class Encoded(NamedTuple):
    """What a base model made of a batch: packed hidden states (total_tokens, hidden_size). input_ids: int64
    (total_tokens,), where it was made from them.
    """

    base: EncoderModel
    packed: torch.Tensor
    batch: PackedBatch
    pooler_output: torch.Tensor | None = None  # where it is there already
    input_ids: torch.Tensor | None = None

    def pooled(self) -> torch.Tensor:
        """(batch, hidden_size)."""
        return self.base.pool(self.packed, self.batch) if self.pooler_output is None else self.pooler_output


Items = torch.Tensor | float | Mapping[str, torch.Tensor | float] | None  # num_items_in_batch


class HeadModel(PreTrainedModel):
    """A base model with a head. Subclasses say what labels they take in `check_options`, what to make of packed hidden
    states in `compute`.
    """

    base_class: ClassVar[type[EncoderModel]]
    head_spec: ClassVar[Any]  # what the family's data say of the head
    option_names: ClassVar[tuple[str, ...]] = ("labels",)  # keyword arguments that `compute` receives
    accepts_loss_kwargs: ClassVar[bool] = True  # transformers' name for: forward takes num_items_in_batch

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "base_class" in cls.__dict__:
            cls.family = cls.base_class.family
            cls.base_model_prefix = cls.family.prefix

    @property
    def needs_pooler(self) -> bool:
        return False

    @may_be_unfilled
    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        self.add_module(self.family.prefix, self.base_class(self.config, add_pooling_layer=self.needs_pooler))
        self.build_head(self.config)
        place_parts(self, self.callable_parts())
        self.draw_weights()
        if self.family.heads_first:  # an optimizer's saved state goes by the order of parameters
            self._modules[self.family.prefix] = self._modules.pop(self.family.prefix)

    def build_head(self, config: EncoderConfig) -> None:
        raise NotImplementedError

    def callable_parts(self) -> dict[str, Run]:
        """Its `head_parts`."""
        raise NotImplementedError

    def check_options(self, options: dict, batch: PackedBatch) -> dict:
        """What `compute` takes of the `option_names` that the caller passed: checked, labels of tokens packed, too.

        Raises InputError; nothing has been launched yet.
        """
        raise NotImplementedError

    def compute(self, encoded: Encoded, options: dict) -> dict:
        """Fields of the output, loss first: a mean, or several by the names of their labels, which are added up."""
        raise NotImplementedError

    @property
    def base_model(self) -> EncoderModel:
        return in_use(self._modules[self.family.prefix])  # type: ignore[return-value, arg-type]

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
        output_hidden_states: bool | int | Sequence[int] | None = None,
        return_dict: bool | None = None,
        *,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: int | None = None,
        batch: PackedBatch | None = None,
        task_type_ids: torch.Tensor | None = None,
        num_items_in_batch: Items = None,
        **options,
    ) -> ModelOutput | tuple:
        """As the base model's forward; with labels the output starts with `loss`.

        Labels have the input's own layout: per token (batch, seqlen) or packed (total_tokens,), per sequence (batch,).
        Those of a PackedInputs are in it, and no device is waited for because of them.

        With `num_items_in_batch`, which the Trainer gives, the loss is the sum over this call's labels divided by that
        number: the losses of the calls before one step of the optimizer then add up to the mean over all of them. A
        mapping has a number for each kind of labels, where the loss has several terms.
        """
        labelled = {name: value for name, value in {"labels": labels, **options}.items() if value is not None}
        if isinstance(input_ids, PackedInputs):
            labelled = labels_of(input_ids, labelled)
        labelled = taken(labelled, self.option_names, self)
        check_tensors({name: value for name, value in labelled.items() if name != "num_choices"})
        arguments = ModelInputs(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            inputs_embeds,
            cu_seqlens,
            max_seqlen,
            batch,
            task_type_ids,
        )
        if records_hf() and not arguments.are_packed():
            asked = {"output_attentions": output_attentions, "output_hidden_states": output_hidden_states}
            recorded = ModelOutput(record(self, arguments, asked | labelled))
            return recorded if self.config.option("return_dict", return_dict) else recorded.to_tuple()
        inputs = self.base_model.prepare(arguments)
        labelled = self.check_options(labelled, inputs.batch)
        encoded, extras = self.run_base(inputs, arguments, output_attentions, output_hidden_states)
        fields = self.compute(encoded, labelled)
        if fields.get("loss") is not None:
            fields["loss"] = joined_loss(fields["loss"], labelled, num_items_in_batch, inputs.batch)
        output = ModelOutput(**fields, **extras)
        return output if self.config.option("return_dict", return_dict) else output.to_tuple()

    def run_base(
        self,
        inputs: EncoderInputs,
        arguments: ModelInputs,
        output_attentions: bool | None = None,
        output_hidden_states: bool | int | Sequence[int] | None = None,
    ) -> tuple[Encoded, dict]:
        """Run the base model on what its `prepare` made of `arguments`; also the extras asked for, unpacked."""
        base = self.base_model
        if not must_be_called(base):
            encoded = base.encode(inputs, base.wanted(output_attentions, output_hidden_states))
            base.calls.ran_packed()
            found = Encoded(base, encoded.packed, inputs.batch, encoded.pooled, inputs.ids.input_ids)
            return found, encoded.extras()
        padded, layout = arguments[:5], zip(arguments._fields[5:], arguments[5:], strict=True)
        named = {name: value for name, value in layout if value is not None}  # a forward may take fewer
        output = base(*padded, output_attentions, output_hidden_states, **named)
        batch, hidden = inputs.batch, output.last_hidden_state
        packed = batch.pack(hidden)
        extras = {name: output[name] for name in ("hidden_states", "attentions") if name in output}
        pooled = output.pooler_output if base.has_pooler else None
        return Encoded(base, packed, batch, pooled, inputs.ids.input_ids), extras

    def classes_at(self, path: str) -> int | None:
        """How many classes the Linear at `path` has; None where something else is there, whose result shows it."""
        leaf = get_leaf(self, path)
        return weights_of(leaf).weight.shape[0] if is_linear(leaf) else None

    def class_loss(
        self, path: str, logits: torch.Tensor, labels: torch.Tensor, batch: PackedBatch, name: str = "labels"
    ) -> torch.Tensor:
        """Mean cross-entropy of what the leaf at `path` made, (n, num_classes), with labels (n,) of `check_options`."""
        if self.classes_at(path) is None:
            check_labels(labels, logits.shape[-1], name, batch)
        return ops.logits_cross_entropy(logits, labels)


def joined_loss(
    loss: torch.Tensor | dict[str, torch.Tensor], labels: Mapping[str, Any], items: Items, batch: PackedBatch
) -> torch.Tensor:
    """The sum of a loss's terms. With `items` each is a share of a larger mean: see `num_items_in_batch` of `forward`.

    A number stands for the `labels` of that name, and for all terms alike.
    """
    terms = loss if isinstance(loss, dict) else {"labels": loss}
    if isinstance(items, Mapping):
        if missing := [name for name in terms if name not in items]:
            raise InputError(f"num_items_in_batch has no {missing[0]}; it must have {', '.join(terms)}")
        shares = {name: share_of(labels[name], items[name], batch) for name in terms if name in labels}
    elif items is not None and "labels" in labels:
        shares = dict.fromkeys(terms, share_of(labels["labels"], items, batch))
    else:
        shares = {}
    scaled = [term * shares[name] if name in shares else term for name, term in terms.items()]
    return sum(scaled[1:], scaled[0])


def share_of(labels: torch.Tensor, items: torch.Tensor | float, batch: PackedBatch) -> torch.Tensor:
    """How much of `items` labels these are; 0 where there are none, even of none.

    Integers count but for -100. Floats, which are of sequences, may be any number, and count where there are tokens.
    """
    if labels.is_floating_point():
        count = batch.has_tokens().sum() * (labels.numel() // max(1, batch.batch_size))
    else:
        count = (labels != -100).sum()
    if not isinstance(items, torch.Tensor) and items > 0:
        return count / items
    return torch.where(count > 0, count / items, 0.0)


def mean_loss(losses: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """The mean of (batch, ...), a row a sequence, over those that have tokens; 0 where none has."""
    is_real = batch.has_tokens()
    kept = losses.where(is_real.view(-1, *[1] * (losses.dim() - 1)), 0.0)
    return kept.sum() / (is_real.sum() * losses.shape[1:].numel()).clamp(min=1)


def token_labels(
    labels: torch.Tensor, batch: PackedBatch, limit: int | None, counts_padding: bool = True
) -> torch.Tensor:
    """Labels of tokens in packed order, checked: -100 or within [0, limit); None: the classes are not known yet.

    `counts_padding`: transformers' loss counts labels at padding, too, where there is no hidden state: they must be
    -100.
    """
    shape = (batch.total_tokens,) if batch.seqlen is None else (batch.batch_size, batch.seqlen)
    if labels.shape != shape:
        raise InputError(f"labels has shape {tuple(labels.shape)}; it must be {shape}")
    labels = whole_labels(labels, "labels")
    packed = labels if batch.seqlen is None else batch.pack(labels)
    stray: torch.Tensor | int | None = None
    if counts_padding and batch.indices is not None and checks_values():
        stray = (labels != -100).sum() - (packed != -100).sum()
        if batch.bounds is not None and PADDED_LABELS in batch.bounds:
            stray = batch.bounds[PADDED_LABELS][1]
    return packed if limit is None else check_labels(packed, limit, "labels", batch, stray)


def class_labels(
    labels: torch.Tensor, batch: PackedBatch, limit: int | None, name: str = "labels", num_choices: int = 1
) -> torch.Tensor:
    """A label a sequence, or an example of `num_choices`, int64, checked as those of tokens; -100 where no token is."""
    labels, count = whole_labels(labels, name).reshape(-1), batch.batch_size // num_choices
    if labels.shape[0] != count:
        raise InputError(f"{name} has {labels.shape[0]} entries for {count} sequences")
    if limit is not None:
        check_labels(labels, limit, name, batch)
    return labels.where(batch.has_tokens(num_choices), -100)


def whole_labels(labels: torch.Tensor, name: str) -> torch.Tensor:
    """Classes as int64. Those that a caller has in floating point must be whole numbers. Raises InputError."""
    if labels.is_floating_point() and labels.numel() and checks_values():
        wrong = ((labels != labels.trunc()) | labels.isinf()).nonzero()  # NaN is not equal to itself
        if len(wrong):
            at = tuple(wrong[0].tolist())
            where = f"{name}[{', '.join(map(str, at))}]"
            raise InputError(f"{where} is {labels[at].item():g}; classes are whole numbers, and -100 is none")
    return labels.long()


def check_labels(
    labels: torch.Tensor, limit: int, name: str, batch: PackedBatch, stray: torch.Tensor | int | None = None
) -> torch.Tensor:
    """`labels` if all are -100 or within [0, limit): by the bounds that the host has of them, or by a look.

    `stray`: how many labels of padding are not -100.
    """
    if labels.numel() and checks_values():
        seen = (batch.bounds or {}).get(name)
        if seen is None:
            ends = torch.where(labels == -100, 0, labels).aminmax()
            low, high, *rest = torch.stack([*ends, stray] if isinstance(stray, torch.Tensor) else [*ends]).tolist()
            stray = rest[0] if rest else stray
        else:
            low, high = seen
        if low < 0 or high >= limit:
            raise InputError(f"{name} holds {low if low < 0 else high}; valid values are 0 to {limit - 1}, and -100")
        if stray:
            raise InputError(f"{name} holds {int(stray)} values at padding; only -100 may stand there")
    return labels
