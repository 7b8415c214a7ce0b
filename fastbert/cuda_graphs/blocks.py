"""Where a bucket's batches lie: fields in one block of bytes, which graphs read and batches are copied to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from fastbert.cuda_graphs.buckets import Sizes
from fastbert.execution.request import EncoderInputs
from fastbert.layer_spec import Distances
from fastbert.layers.embeddings import EmbeddingIds
from fastbert.packed_inputs import PackedInputs
from fastbert.packing import PackedBatch

_ALIGNED = 16  # bytes: where a field begins
_OFFSETS, _LABELLED, _KEYS = "cu_seqlens", "labelled", "num_keys"


class Field(NamedTuple):
    """A tensor in a block: where it begins, in bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def of(self, block: torch.Tensor) -> torch.Tensor:
        return block[self.start : self.start + self.nbytes].view(self.dtype).view(self.shape)


class BlockLayout(NamedTuple):
    """How the batches of a bucket lie in a block of bytes. Two batches of one form can go through one graph."""

    bucket: Sizes
    num_choices: int | None
    fields: tuple[Field, ...]

    @classmethod
    def of(
        cls, bucket: Sizes, shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], num_choices: int | None = None
    ) -> BlockLayout:
        fields, start = [], 0
        for name, (dtype, shape) in shapes.items():
            fields.append(Field(name, dtype, shape, start))
            start += -(-fields[-1].nbytes // _ALIGNED) * _ALIGNED
        return cls(bucket, num_choices, tuple(fields))

    @property
    def nbytes(self) -> int:
        last = self.fields[-1]
        return -(-(last.start + last.nbytes) // _ALIGNED) * _ALIGNED

    def views(self, block: torch.Tensor) -> dict[str, torch.Tensor]:
        """What lies in a block, whose memory it shares."""
        return {field.name: field.of(block) for field in self.fields}

    def read(self, block: torch.Tensor, bounds: Mapping[str, tuple[int, int]] | None) -> PackedInputs:
        """A batch of training that lies in a block, whose memory it shares."""
        tensors: dict[str, Any] = self.views(block)
        cu_seqlens, labelled, num_keys = tensors.pop(_OFFSETS), tensors.pop(_LABELLED, None), tensors.pop(_KEYS, None)
        tokens, sequences, longest, _ = self.bucket
        batch = PackedBatch(None, cu_seqlens, longest, sequences, None, tokens, labelled, bounds, num_keys=num_keys)
        choices = {} if self.num_choices is None else {"num_choices": self.num_choices}
        return PackedInputs({**tensors, "batch": batch, **choices})


class Staged(NamedTuple):
    """A batch of training in a block, on its way to a graph."""

    layout: BlockLayout
    block: torch.Tensor
    bounds: Mapping[str, tuple[int, int]]


def stage(packed: PackedInputs, bucket: Sizes, pinned: bool = False) -> Staged:
    """A batch on the host, with its bucket's padding, in a block of its own; pinned: in page-locked memory, from which
    a GPU copies while the host goes on.
    """
    total_tokens, batch_size, max_seqlen, labelled = bucket
    padded = packed.with_capacity(total_tokens, batch_size, labelled or 0, max_seqlen)
    tensors = {name: value for name, value in padded.items() if isinstance(value, torch.Tensor)}
    batch: PackedBatch = padded["batch"]
    tensors[_OFFSETS] = batch.cu_seqlens
    if batch.labelled is not None:
        tensors[_LABELLED] = batch.labelled
    if batch.num_keys is not None:
        tensors[_KEYS] = batch.num_keys
    shapes = {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    layout = BlockLayout.of(bucket, shapes, padded.get("num_choices"))
    block = torch.empty(layout.nbytes, dtype=torch.uint8, pin_memory=pinned)
    for name, view in layout.views(block).items():
        view.copy_(tensors[name])
    return Staged(layout, block, batch.bounds or {})


class StaticBatch:
    """A bucket's buffers for inference: words and, as far as they are read, positions, token types, task types, and the
    columns by which windows measure distances; int64 (total_tokens,) each.

    goes_by: what the layers measure: where there is rotary embedding, positions are its own.
    """

    def __init__(
        self,
        bucket: Sizes,
        device: torch.device,
        goes_by: Distances | None,
        has_types: bool = False,
        has_tasks: bool = False,
    ):
        """One sequence as long as the bucket allows, of ids 0: what a capture runs on."""
        self.bucket, self.goes_by = bucket, goes_by
        names = ["words", "positions", *(["types"] if has_types else []), *(["tasks"] if has_tasks else [])]
        names += ["columns"] if goes_by is not None else []
        shapes = {name: (torch.int64, (bucket.total_tokens,)) for name in names}
        layout = BlockLayout.of(bucket, {**shapes, _OFFSETS: (torch.int32, (bucket.batch_size + 1,))})
        with torch.inference_mode(False):  # or the buffers could not be written outside of inference mode
            self.block = torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)
            self.ids = layout.views(self.block)
            self.cu_seqlens = self.ids.pop(_OFFSETS)
            self.cu_seqlens[1:].fill_(min(bucket.total_tokens, bucket.max_seqlen))
            if goes_by is not None:
                self.ids["columns"].copy_(torch.arange(bucket.total_tokens, device=device))

    def fill(self, inputs: EncoderInputs) -> None:
        """Copy a checked batch in. Padding rows keep an earlier batch's ids: they are valid, and never read."""
        batch, ids, tokens = inputs.batch, inputs.ids, inputs.batch.total_tokens
        values = {"words": ids.input_ids, "positions": ids.position_ids}
        values |= {"types": ids.token_type_ids, "tasks": ids.task_type_ids}
        if self.goes_by is not None:
            positions = batch.local_positions()
            values["columns"] = positions if inputs.window_positions is None else inputs.window_positions
            if self.goes_by.rotaries:
                values["positions"] = positions if inputs.rotary_positions is None else inputs.rotary_positions
        for name, row in self.ids.items():
            value = values[name]
            if value is not None:
                row[:tokens].copy_(value)
            elif name == "tasks":
                row[:tokens].zero_()
        self.cu_seqlens[: batch.batch_size + 1].copy_(batch.cu_seqlens)
        self.cu_seqlens[batch.batch_size + 1 :].fill_(tokens)

    def inputs(self) -> EncoderInputs:
        """The buffers as a batch, with a cache of its own: what is derived from cu_seqlens belongs into the graph."""
        tokens, sequences, longest, _ = self.bucket
        batch, rows = PackedBatch(None, self.cu_seqlens, longest, sequences, None, tokens), self.ids
        ids = EmbeddingIds(rows["words"], rows["positions"], rows.get("types"), rows.get("tasks"), None)
        if self.goes_by is None:
            return EncoderInputs(batch, ids)
        # Relative terms know how far apart two tokens can be: the places of a sequence, not columns with gaps.
        return EncoderInputs(batch, ids, rows["positions"], None if self.goes_by.relatives else rows["columns"])
