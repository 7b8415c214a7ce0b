"""A batch that is packed and checked on the host before it goes to the device: no model waits for it there.

What makes batches (a collate function, a DataLoader's worker) calls `pack_inputs`, the loop that trains calls
`model(packed.to(device))`; docs/packing.md has an example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from fastbert.errors import InputError
from fastbert.packing import PADDED_LABELS, PackedBatch, key_behind_query

# What a model's forward takes of a PackedInputs, by its own argument names.
_IDS = ("input_ids", "token_type_ids", "position_ids", "task_type_ids")
_ENCODER_FIELDS = (*_IDS, "batch")
_SEQUENCE_LABELS = ("start_positions", "end_positions", "next_sentence_label", "sentence_order_label")
_FIELDS = (*_ENCODER_FIELDS, "num_choices", "labels", *_SEQUENCE_LABELS)
# In `PackedBatch.bounds`: the ids that a mask hides before a sequence's last token. Some families count them.
MASKED_IDS = "masked input_ids"
Size = tuple[int, int, int]  # of a batch, or of what holds it: tokens, sequences, max_seqlen


class PackedInputs(Mapping[str, Any]):
    """What `pack_inputs` makes: `model(packed)` and `model(**packed)` give what the batch itself would give.

    Its fields are arguments of a model's forward, those only that were given: `input_ids`, `token_type_ids`,
    `position_ids` and `task_type_ids`, int64 (total_tokens,); `batch`, the PackedBatch that says which tokens are
    whose; `labels`, in the layout that they were given in, and the labels of other names; `num_choices`.

    It never changes. One with other fields is made by `pack_inputs`, which looks at their values, too: models take its
    word for them.
    """

    __slots__ = ("_fields",)

    def __init__(self, fields: Mapping[str, Any]):
        """From the fields of another one, moved or copied: so DataLoader's pin_memory and trainers rebuild mappings."""
        unknown = [name for name in fields if name not in _FIELDS]
        if unknown or "input_ids" not in fields or not isinstance(fields.get("batch"), PackedBatch):
            raise InputError(
                f"no PackedInputs can be made of {', '.join(map(repr, fields)) or 'nothing'}: use fastbert.pack_inputs"
            )
        self._fields = dict(fields)

    def __getitem__(self, name: str) -> Any:
        return self._fields[name]

    def __contains__(self, name: object) -> bool:
        return name in self._fields  # Mapping's would raise and catch a KeyError

    def get(self, name: str, default: Any = None) -> Any:
        return self._fields.get(name, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __repr__(self) -> str:
        batch = self._fields["batch"]
        shape = f"{batch.batch_size} sequences, {batch.total_tokens} tokens, {batch.cu_seqlens.device}"
        return f"PackedInputs({shape}: {', '.join(self)})"

    def __reduce__(self) -> tuple:
        return PackedInputs, (self._fields,)

    def pop(self, name: str, *default: Any) -> Any:
        """Raises InputError. The Trainer's label smoothing and its compute_loss_func take labels out of a batch."""
        raise InputError(
            f"{name!r} cannot be taken out of a PackedInputs, which never changes: use padded batches with label"
            " smoothing, or with a loss of your own that takes the labels out of the batch"
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedInputs:
        """The same batch on another device."""
        return self._moved(lambda value: value.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PackedInputs:
        """The same batch in page-locked memory, from which `.to(device, non_blocking=True)` does not wait."""
        return self._moved(lambda value: value.pin_memory())

    def without_sequences(self) -> PackedInputs:
        """The same fields, of no sequence: for a process that has nothing of a step which it computes with others. The
        loss of a sum is 0 then, and so are its gradients.
        """
        old: PackedBatch = self._fields["batch"]
        labelled = None if old.labelled is None else old.labelled[:0]
        bounds = None if old.bounds is None else dict.fromkeys(old.bounds, (0, 0))
        fields: dict[str, Any] = {"batch": PackedBatch(None, old.cu_seqlens[:1], 0, 0, None, 0, labelled, bounds)}
        if labelled is not None:  # labels of tokens, which may be in rows
            fields["labels"] = self._fields["labels"].flatten()[:0]
        for name, value in self._fields.items():
            fields.setdefault(name, value if name in ("batch", "num_choices") else value[:0])
        return PackedInputs({name: fields[name] for name in self._fields})

    def with_capacity(self, total_tokens: int, batch_size: int, max_seqlen: int) -> PackedInputs:
        """The same batch in these sizes: behind the real tokens and sequences stand padding ones, without labels, which
        change no loss and no gradient (docs/packing.md). It works on the host.

        `batch_size` counts each choice. The tokens that have a label become a quarter of total_tokens, or two, three or
        four of these, so that they have few sizes, too. Raises InputError where the batch is larger, or has padded
        outputs.
        """
        fields, num_choices = self._fields, self._fields.get("num_choices", 1)
        if batch_size % num_choices:
            raise InputError(f"batch_size is {batch_size}; it must be a multiple of num_choices {num_choices}")
        changed = {"batch": fields["batch"].with_capacity(total_tokens, batch_size, max_seqlen)}
        for name, value in fields.items():
            if isinstance(value, torch.Tensor):
                is_per_token = name in _IDS or (name == "labels" and fields["batch"].labelled is not None)
                rows = total_tokens if is_per_token else batch_size // num_choices
                fill = 0 if name in _IDS or value.is_floating_point() else -100
                changed[name] = torch.cat([value, value.new_full((rows - len(value), *value.shape[1:]), fill)])
        return PackedInputs(fields | changed)

    def _moved(self, move: Callable[[Any], Any]) -> PackedInputs:
        return PackedInputs({name: v if isinstance(v, int) else move(v) for name, v in self._fields.items()})


class ModelInputs(NamedTuple):
    """The arguments of a model's forward that say what is to be encoded, as the caller gave them.

    input_ids, token_type_ids, position_ids, task_type_ids: (batch, seqlen), or (total_tokens,) if the input is packed.
    attention_mask: (batch, seqlen). inputs_embeds: (batch, seqlen, embedding_size) or (total_tokens, embedding_size).
    cu_seqlens and max_seqlen, or a batch: of a packed input. A PackedInputs as input_ids stands for all of them.
    """

    input_ids: Any = None
    attention_mask: torch.Tensor | None = None
    token_type_ids: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    inputs_embeds: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None
    max_seqlen: int | None = None
    batch: PackedBatch | None = None
    task_type_ids: torch.Tensor | None = None

    def tensors(self) -> dict[str, Any]:
        """All but `max_seqlen` and `batch`, by name."""
        return {name: value for name, value in self._asdict().items() if name not in ("max_seqlen", "batch")}

    def are_packed(self) -> bool:
        return self.cu_seqlens is not None or self.batch is not None or isinstance(self.input_ids, PackedInputs)

    def opened(self) -> ModelInputs:
        """What a PackedInputs stands for; InputError where more was given."""
        packed, *others = self
        if not isinstance(packed, PackedInputs):
            return self
        if any(value is not None for value in others):
            raise InputError("a PackedInputs is all of a batch: give the other arguments to fastbert.pack_inputs")
        return ModelInputs(**{name: packed[name] for name in _ENCODER_FIELDS if name in packed})


def labels_of(packed: PackedInputs, labels: dict[str, Any]) -> dict[str, Any]:
    """What a head takes beside its encoder's arguments; InputError where there are `labels` outside of it, too."""
    if labels:
        raise InputError(
            f"{', '.join(labels)} and a PackedInputs exclude each other: fastbert.pack_inputs takes labels"
        )
    return {name: value for name, value in packed.items() if name not in _ENCODER_FIELDS}


def pack_inputs(
    input_ids: Any,
    attention_mask: Any = None,
    token_type_ids: Any = None,
    position_ids: Any = None,
    *,
    task_type_ids: Any = None,
    query_only_mask: Any = None,
    labels: Any = None,
    start_positions: Any = None,
    end_positions: Any = None,
    next_sentence_label: Any = None,
    sentence_order_label: Any = None,
    pad_to: Sequence[Size] | None = None,
) -> PackedInputs:
    """Pack and check a batch on the host, labels included.

    Args:
        input_ids: a list of sequences, each a list (array, tensor) of ids; or a padded tensor (batch, seqlen). Multiple
            choice: a list of examples, each a list of as many sequences; or (batch, num_choices, seqlen).
        attention_mask, token_type_ids, position_ids, task_type_ids: in the same form. The mask of a padded tensor has
            padding on any side, and holes; in lists 0 may stand behind a sequence's last token only.
        query_only_mask: in the same form, 1 where a token attends and nothing attends to it, as the [MASK] tokens that
            ColBERT expands queries by (Khattab & Zaharia 2020, section 3.2), whatever attention_mask says of it. Such
            tokens are the last ones of their sequences.
        labels: integers for every token, in the form of input_ids, -100 where a token has none; or one for every
            sequence (example, for multiple choice), (batch,). Floats, (batch,) or (batch, num_labels), are always of
            sequences: values of a regression, or several labels at once.
        start_positions, end_positions, next_sentence_label, sentence_order_label: (batch,) integers; positions count as
            the model's forward says: columns of a padded tensor, places in the sequence of a list.
        pad_to: few sizes (tokens, sequences, max_seqlen) for batches from lists, where torch.compile or CUDA graphs
            are to meet the same sizes again and again. The batch gets the first of them that holds it, in their order
            from few tokens to many, by `PackedInputs.with_capacity`.

    Returns:
        A PackedInputs on the CPU. A model gives for it, bit for bit, what it gives for the batch that it was made from:
        from a padded tensor (batch, seqlen, ...) outputs with zeros at padding, from lists (total_tokens, ...) ones.

    Raises:
        InputError: a form, length, dtype or device that does not fit, or a batch that no size of pad_to holds. Ids and
            labels are compared with a model's tables when it is called: by the smallest and the largest, which are
            noted here, without a wait.
    """
    ids, num_choices = _without_choices(input_ids)
    given_ids = {"token_type_ids": token_type_ids, "position_ids": position_ids, "task_type_ids": task_type_ids}
    given_ids["query_only_mask"] = query_only_mask
    tokens = {
        name: _without_choices(values, num_choices, name)[0] for name, values in given_ids.items() if values is not None
    }
    mask = None if attention_mask is None else _without_choices(attention_mask, num_choices, "attention_mask")[0]
    per_token = None
    if labels is not None and (per_token := _token_labels(labels, num_choices)) is not None:
        tokens["labels"] = per_token
    pack = _pack_padded if _is_array(ids) else _pack_lists
    batch, fields, masked_ids = pack(ids, mask, tokens)

    packed_labels = None
    if per_token is not None:
        packed_labels = batch.pack(fields["labels"]) if batch.seqlen is not None else fields["labels"]
    others = (start_positions, end_positions, next_sentence_label, sentence_order_label)
    per_sequence = dict(zip(_SEQUENCE_LABELS, others, strict=True)) | ({"labels": labels} if per_token is None else {})
    num_examples = batch.batch_size // (num_choices or 1)
    for name, values in per_sequence.items():
        if values is not None:
            fields[name] = _sequence_labels(name, values, num_examples)
    # What models compare with their tables: real tokens' ids and labels, -100 being no label.
    seen = {name: packed_labels if name == "labels" and packed_labels is not None else t for name, t in fields.items()}
    bounds = {name: _ends(t if name in _IDS else t.where(t != -100, 0)) for name, t in seen.items() if _is_integer(t)}
    if masked_ids.numel():
        bounds[MASKED_IDS] = _ends(masked_ids)
    if packed_labels is not None and batch.indices is not None:
        bounds[PADDED_LABELS] = (0, int((fields["labels"] != -100).sum() - (packed_labels != -100).sum()))
    labelled = None if packed_labels is None else (packed_labels != -100).nonzero().flatten()
    fields["batch"] = replace(batch, bounds=bounds, labelled=labelled)
    if num_choices is not None:
        fields["num_choices"] = num_choices
    packed = PackedInputs({name: fields[name] for name in _FIELDS if name in fields})
    return packed if pad_to is None else packed.with_capacity(*_smallest(fields["batch"], checked_sizes(pad_to)))


def checked_sizes(pad_to: Sequence[Size]) -> list[Size]:
    """The sizes, the one of fewest tokens first; InputError where one is no triple of numbers."""
    sizes = [tuple(size) if isinstance(size, Sequence) else size for size in pad_to]
    for size in sizes:
        if not isinstance(size, tuple) or len(size) != 3 or not all(type(n) is int and n > 0 for n in size):
            raise InputError(f"pad_to holds {size!r}; its sizes are (tokens, sequences, max_seqlen), each above 0")
    return sorted(sizes)


def _smallest(batch: PackedBatch, sizes: list[Size]) -> Size:
    own = (batch.total_tokens, batch.batch_size, batch.max_seqlen)
    for size in sizes:
        if all(n <= room for n, room in zip(own, size, strict=True)):
            return size
    raise InputError(
        f"no size of pad_to holds a batch of {own[0]} tokens and {own[1]} sequences, the longest of {own[2]}; they are"
        f" {', '.join(map(str, sizes)) or 'none'}"
    )


# --------------------------------------------------------------------------------------------------------------------
# Forms: one tensor, or a list of sequences


def _is_array(values: Any) -> bool:
    """A tensor or a NumPy array, whose rows are of one length."""
    return hasattr(values, "shape") and hasattr(values, "dtype")


def _is_many(values: Any) -> bool:
    return len(values.shape) > 0 if _is_array(values) else isinstance(values, Sequence)


def _is_integer(t: torch.Tensor) -> bool:
    return not (t.is_floating_point() or t.is_complex() or t.dtype is torch.bool)


def _tensor(name: str, values: Any) -> torch.Tensor:
    try:
        t = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InputError(f"{name} makes no tensor: {error}") from None
    if not t.is_cpu:
        raise InputError(f"{name} is on {t.device}; pack_inputs works on the host: move what it returns")
    return t


def _integers(name: str, values: Any) -> torch.Tensor:
    t = _tensor(name, values)
    if t.numel() and not _is_integer(t):
        raise InputError(f"{name} is {t.dtype}; it must hold integers")
    return t.long()


def _rows(name: str, values: Any) -> Sequence[Any]:
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise InputError(f"{name} is a {type(values).__name__}; it must be a list of sequences, as input_ids is")
    return values


def _without_choices(values: Any, num_choices: int | None = None, name: str = "input_ids") -> tuple[Any, int | None]:
    """The choices of all examples one after the other, and how many an example has; None where there are none.

    `num_choices`: of the input_ids, where `values` are other fields of them.
    """
    if _is_array(values):
        t = _tensor(name, values)
        if t.dim() != 3:
            return t, None
        if num_choices not in (None, t.shape[1]):
            raise InputError(f"{name} has {t.shape[1]} choices an example; input_ids has {num_choices}")
        return t.flatten(0, 1), t.shape[1]
    rows = _rows(name, values)
    nested = [isinstance(row, Sequence) and len(row) > 0 and _is_many(row[0]) for row in rows]
    if not any(nested):
        return rows, None
    counts = {len(row) if inner else 0 for row, inner in zip(rows, nested, strict=True)}
    if len(counts | ({num_choices} - {None})) > 1:
        raise InputError(f"every example must have as many choices in every field; {name} has {sorted(counts)}")
    return [choice for row in rows for choice in row], len(rows[0])


_NUMBERS = (int, float, np.number, np.bool_)
_PLAIN_ROWS = (list, tuple, np.ndarray)


def _token_labels(labels: Any, num_choices: int | None) -> Any:
    """The labels if they are integers in two dimensions, of tokens; None if they are of sequences."""
    if num_choices is not None:
        return None
    dim = 2 if _is_array(labels) else 1
    rows = [labels] if _is_array(labels) else _rows("labels", labels)
    if not _is_array(labels) and all(isinstance(row, _NUMBERS) for row in rows):
        return None
    tensors = [_tensor("labels", row) for row in rows]
    return labels if any(row.dim() >= dim and (_is_integer(row) or not row.numel()) for row in tensors) else None


def _sequence_labels(name: str, values: Any, num_examples: int) -> torch.Tensor:
    t = _tensor(name, values)
    if t.dim() == 0 or t.shape[0] != num_examples:
        raise InputError(f"{name} has shape {tuple(t.shape)}; there are {num_examples} sequences")
    if t.is_floating_point() and name == "labels":
        return t
    return _integers(name, t)


# --------------------------------------------------------------------------------------------------------------------
# Packing: the batch, its fields, and the ids before a sequence's last token that a mask hides


def _pack_padded(ids: Any, mask: Any, tokens: dict[str, Any]) -> tuple[PackedBatch, dict, torch.Tensor]:
    ids = _integers("input_ids", ids)
    if ids.dim() != 2 or 0 in ids.shape:
        raise InputError(f"input_ids has shape {tuple(ids.shape)}; it must be (batch, seqlen), both at least 1")
    grid = {"input_ids": ids}
    for name, values in tokens.items():
        grid[name] = t = _integers(name, values)
        if name == "position_ids" and t.dim() == 2 and t.shape[0] == 1:
            grid[name] = t = t.expand(ids.shape)  # as transformers, one row for the whole batch
        if t.shape != ids.shape:
            raise InputError(f"{name} has shape {tuple(t.shape)}; input_ids has {tuple(ids.shape)}")
    mask = None if mask is None else _tensor("attention_mask", mask)
    alone = grid.pop("query_only_mask", None)
    alone = None if alone is None else alone != 0
    batch = PackedBatch.from_mask(mask, ids.shape[0], ids.shape[1], ids.device, query_only=alone)
    hidden = ids[:0].flatten()
    if batch.indices is not None:
        assert mask is not None
        real = mask != 0 if alone is None else (mask != 0) | alone
        hidden = ids[~real & real.flip(1).cummax(1).values.flip(1)]
    # Labels stay as they are: what is read of a model's outputs has their layout.
    return batch, {name: t if name == "labels" else batch.pack(t) for name, t in grid.items()}, hidden


def _pack_lists(ids: Any, mask: Any, tokens: dict[str, Any]) -> tuple[PackedBatch, dict, torch.Tensor]:
    flat, lengths = _joined("input_ids", ids)
    if not lengths:
        raise InputError("an empty batch: input_ids holds no sequence")
    fields = {"input_ids": flat}
    others = tokens if mask is None else {**tokens, "attention_mask": mask}
    for name, values in others.items():
        fields[name], counts = _joined(name, values)
        if len(counts) != len(lengths):
            raise InputError(f"{name} has {len(counts)} sequences; input_ids has {len(lengths)}")
        for i, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            if count != length:
                raise InputError(f"{name} has {count} values for sequence {i}, which has {length} tokens")
    masks, alone = fields.pop("attention_mask", None), fields.pop("query_only_mask", None)
    if alone is not None:
        masks = None if masks is None else masks.where(alone == 0, 1)
        fields["query_only_mask"] = alone
    if masks is not None and not (masks == 1).all():
        for i, row in enumerate(masks.split(lengths)):
            lengths[i] = int(row.sum())
            if not torch.equal(row, (torch.arange(row.numel()) < lengths[i]).long()):
                raise InputError(
                    f"attention_mask of sequence {i} is not ones and then zeros; give input_ids as a tensor for"
                    " padding elsewhere"
                )
        fields = {name: t[masks == 1] for name, t in fields.items()}
    alone, num_keys = fields.pop("query_only_mask", None), None
    if alone is not None and alone.any():
        keys = [_num_keys(i, row) for i, row in enumerate((alone == 0).split(lengths))]
        num_keys = torch.tensor(keys, dtype=torch.int32)
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    batch = PackedBatch(None, offsets, max(lengths), len(lengths), None, sum(lengths), num_keys=num_keys)
    return batch, fields, fields["input_ids"][:0]


def _num_keys(i: int, is_key: torch.Tensor) -> int:
    count = int(is_key.sum())
    if not bool(is_key[:count].all()):
        raise InputError(key_behind_query(i))
    return count


def _joined(name: str, values: Any) -> tuple[torch.Tensor, list[int]]:
    """Lists of integers one after the other, int64, and their lengths."""
    rows = _rows(name, values)
    lengths = list(map(len, rows)) if all(type(row) in _PLAIN_ROWS for row in rows) else []
    try:  # all at once: torch's calls for each of hundreds of rows take a millisecond
        joined = np.concatenate([row for row, n in zip(rows, lengths, strict=True) if n]) if any(lengths) else None
    except (ValueError, OverflowError):
        joined = None
    if joined is not None and joined.ndim == 1 and joined.dtype.kind in "iu" and len(joined) == sum(lengths):
        return torch.from_numpy(joined.astype(np.int64, copy=False)), lengths
    tensors = [_row(name, row) for row in rows]  # whatever else makes rows; or it is none, and this says why
    return torch.cat(tensors) if tensors else torch.empty(0, dtype=torch.int64), [len(row) for row in tensors]


def _row(name: str, values: Any) -> torch.Tensor:
    row = _integers(name, values)
    if row.dim() != 1:
        raise InputError(f"{name} holds a sequence of shape {tuple(row.shape)}; it must be a list of lists of integers")
    return row


def _ends(t: torch.Tensor) -> tuple[int, int]:
    """The smallest and the largest; 0, which every table has, where there is none."""
    if not t.numel():
        return 0, 0
    low, high = t.aminmax()
    return int(low), int(high)
