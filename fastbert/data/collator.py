"""PackingCollator: from the examples of a data set to a PackedInputs, in a DataLoader's worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fastbert.data.masking import Masking
from fastbert.errors import InputError
from fastbert.packed_inputs import PackedInputs, Size, checked_sizes, pack_inputs

KEY = "example_key"  # of an example, where its masks come from: fastbert.data.masking.example_keys
_TOKENS = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "task_type_ids")
_LABELS = ("labels", "start_positions", "end_positions", "next_sentence_label", "sentence_order_label")
_OTHER_NAMES = {"label": "labels", "label_ids": "labels"}  # that data sets have, and transformers' collators take
_LEFT_OUT = ("length", "special_tokens_mask")  # that tokenizers make, and models do not take


class PackingCollator:
    """Packs examples without padding: `DataLoader(..., collate_fn=PackingCollator())`, or a Trainer's `data_collator`.

    An example is a mapping as tokenizers make it: `input_ids`, a list of ids, and what goes with it under the names of
    a model's forward. Labels are one number an example, a list for its tokens, or a list of numbers for several labels
    at once (floats). What comes out goes to a model of fastbert's own classes as `model(**packed)`.

    Args:
        masking: chooses what a masked language model has to guess, and makes the labels. What is masked follows from
            the example's `example_key`, if it has one, and else from torch's random numbers in this process.
        padded_outputs: what a model gives for tokens, and their labels, are (batch, seqlen, ...), with zeros and -100
            at padding, as the Trainer's evaluation and metrics over sequences need them. False: one row of all tokens,
            for loops that know of it. What runs is packed in both cases.
        pad_to: few sizes (tokens, sequences, max_seqlen) that batches get, as `pack_inputs` says.

    Raises InputError: examples that differ in their fields, a field that no model takes, or what `pack_inputs` refuses.
    """

    def __init__(
        self, masking: Masking | None = None, *, padded_outputs: bool = True, pad_to: Sequence[Size] | None = None
    ):
        if pad_to is not None and padded_outputs:
            raise InputError("pad_to is for batches without padded outputs: give padded_outputs=False, too")
        self.masking, self.padded_outputs = masking, padded_outputs
        self.pad_to = None if pad_to is None else checked_sizes(pad_to)

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> PackedInputs:
        fields = _columns(examples)
        keys = fields.pop(KEY, None)
        if self.masking is None:
            return self._pack(fields)
        if "labels" in fields:
            raise InputError("the examples have labels, and masking makes them: leave one out")
        if (masks := fields.pop("attention_mask", None)) is not None:
            fields |= {name: _real(fields[name], masks) for name in _TOKENS if name in fields}
        sequences = [np.asarray(sequence, np.int64) for sequence in fields.pop("input_ids")]
        lengths = np.array([len(sequence) for sequence in sequences])
        if keys is None:
            keys = torch.randint(2**63 - 1, (len(sequences),)).tolist()
        shown, labels = self.masking(np.concatenate(sequences), lengths, np.array(keys, np.uint64))
        ends = np.cumsum(lengths)[:-1]
        return self._pack({"input_ids": np.split(shown, ends), "labels": np.split(labels, ends), **fields})

    def _pack(self, fields: dict[str, Any]) -> PackedInputs:
        return pack_inputs(**(_padded(fields) if self.padded_outputs else fields), pad_to=self.pad_to)


def _columns(examples: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    if not examples:
        raise InputError("an empty batch: there are no examples")
    first = set(examples[0])
    for i, example in enumerate(examples):
        if differing := sorted(first.symmetric_difference(example)):
            raise InputError(f"examples 0 and {i} differ: one of them alone has {', '.join(differing)}")
    columns: dict[str, list[Any]] = {}
    for name in examples[0]:
        known = _OTHER_NAMES.get(name, name)
        if known in _LEFT_OUT:
            continue
        if known not in (*_TOKENS, *_LABELS, KEY):
            allowed = ", ".join((*_TOKENS, *_LABELS))
            raise InputError(f"no model takes {name!r}: remove it from the examples, which may have {allowed}")
        if known in columns:
            raise InputError(f"the examples have labels under two names: {name} and another")
        columns[known] = [example[name] for example in examples]
    if "input_ids" not in columns:
        raise InputError(f"the examples have no input_ids; they have {', '.join(sorted(first))}")
    return columns


def _padded(fields: dict[str, list[Any]]) -> dict[str, Any]:
    """The fields of tokens as tensors (batch, longest sequence)."""
    lengths = np.array([len(ids) for ids in fields["input_ids"]])
    is_real = np.arange(lengths.max()) < lengths[:, None]
    of_tokens = {name: fields[name] for name in _TOKENS if name in fields}
    labels = [np.asarray(label) for label in fields.get("labels", ())]
    if all(one.ndim == 1 and one.dtype.kind in "iu" for one in labels) and labels:
        of_tokens["labels"] = fields["labels"]
    grids: dict[str, Any] = {"attention_mask": torch.from_numpy(is_real.astype(np.int64))}
    for name, rows in of_tokens.items():
        for i, row in enumerate(rows):
            if len(row) != lengths[i]:
                raise InputError(f"{name} has {len(row)} values for sequence {i}, which has {lengths[i]} tokens")
        grid = np.full(is_real.shape, -100 if name == "labels" else 0, np.int64)
        grid[is_real] = np.concatenate(rows)
        grids[name] = torch.from_numpy(grid)
    return fields | grids


def _real(sequences: list[Any], masks: list[Any]) -> list[np.ndarray]:
    """The sequences without their padding."""
    return [np.asarray(row)[np.asarray(mask, bool)] for row, mask in zip(sequences, masks, strict=True)]
