"""What a call asks of an encoder, and what it gets: a batch, what is wanted of it, and the outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from fastbert import ops
from fastbert.config import EncoderConfig
from fastbert.families.schema import Family
from fastbert.layers.embeddings import EmbeddingIds
from fastbert.layers.leaves import get_leaf, linear
from fastbert.packed_inputs import ModelInputs, PackedInputs
from fastbert.packing import PackedBatch, is_all_ones


@dataclass(frozen=True)
class EncoderInputs:
    """What an encoder runs on: a checked batch.

    rotary_positions, window_positions: int64 (total_tokens,), by which rotary embedding and windows measure distances;
    None: by a token's place in its sequence. As in transformers, these are columns of the padded grid, so that a hole
    in a mask keeps its width, and rotary embedding goes by the caller's position_ids where there are some. Values that
    are rotated, too, keep what their positions are, and not only what lies between them.
    """

    batch: PackedBatch
    ids: EmbeddingIds
    rotary_positions: torch.Tensor | None = None
    window_positions: torch.Tensor | None = None


class Wanted(NamedTuple):
    """What a forward pass leaves beside the last hidden state, by the numbers of layers.

    hidden_states: what goes into each of these layers; the number of all layers: what comes out of the last one.
    probs: the attention probabilities of these. stops: no layer behind the last of these runs, nor of that one what
    lies behind its probabilities, if these are all; the last hidden state is then what the last layer that ran gave.
    is_causal: no token sees those behind it. pooler: what the pooler makes, too, where one op does all of it. unpacked:
    hidden states and probabilities are in the layout of the caller's input. What comes next is then made of them where
    gradients are recorded, so that they have gradients. shows_states: hidden states were asked for, if only by numbers
    that no layer has: the output has a place for each of them.
    """

    hidden_states: frozenset[int] = frozenset()
    probs: frozenset[int] = frozenset()
    stops: bool = False
    is_causal: bool = False
    pooler: bool = False
    unpacked: bool = False
    shows_states: bool = False

    @classmethod
    def of_all(cls, num_layers: int, hidden_states: bool | int | Sequence[int], probs: bool, pooler: bool) -> Wanted:
        """As output_hidden_states, which may name some of them, also from the end, and output_attentions have it."""
        count = num_layers + 1
        asked = [hidden_states] if isinstance(hidden_states, int) else hidden_states
        asked = range(count) if hidden_states is True else asked if hidden_states else ()
        states = frozenset(i % count for i in asked if -count <= i < count)  # others select nothing in transformers
        shows = bool(hidden_states)
        every = frozenset(range(num_layers if probs else 0))
        return cls(states, every, pooler=pooler, unpacked=shows or bool(probs), shows_states=shows)

    @property
    def is_of_layers(self) -> bool:
        """Whether more is wanted than what stands behind the last layer of all."""
        return bool(self.hidden_states or self.probs or self.stops or self.is_causal or self.unpacked)

    def layers_to_run(self, num_layers: int) -> int:
        return max(0, *self.hidden_states, *(i + 1 for i in self.probs)) if self.stops else num_layers

    def ends_with_probs(self, i: int, num_layers: int) -> bool:
        """Whether of layer i the probabilities are all that somebody reads."""
        is_last = self.stops and i + 1 == self.layers_to_run(num_layers)
        return is_last and i in self.probs and i + 1 not in self.hidden_states


NOTHING_ELSE = Wanted()


class EncoderOutput(NamedTuple):
    """The packed last hidden state (total_tokens, hidden_size); where they were asked for, packed hidden states and
    probabilities (batch, heads, max_seqlen, max_seqlen), in the order of the layers, or unpacked ones, and None for
    hidden states that were not among those. pooled: what the pooler made, (batch, hidden_size), and last, the unpacked
    last hidden state, where they are there already.
    """

    packed: torch.Tensor
    hidden_states: tuple[Any, ...] | None = None
    probs: tuple[torch.Tensor, ...] | None = None
    pooled: torch.Tensor | None = None
    last: torch.Tensor | None = None

    def last_state(self, batch: PackedBatch) -> torch.Tensor:
        """The last hidden state in the layout of the caller's input."""
        return batch.unpack(self.packed) if self.last is None else self.last

    def extras(self) -> dict[str, tuple[torch.Tensor, ...]]:
        """`hidden_states` and `attentions`, as far as it has them."""
        fields = {"hidden_states": self.hidden_states, "attentions": self.probs}
        return {name: tensors for name, tensors in fields.items() if tensors is not None}


class PackedIds:
    """A batch as the op for a whole encoder takes it: int64 ids (total_tokens,), which may be unchecked."""

    __slots__ = ("batch", "input_ids", "position_ids", "token_type_ids")

    def __init__(
        self,
        batch: PackedBatch,
        input_ids: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ):
        self.batch, self.input_ids = batch, input_ids
        self.token_type_ids, self.position_ids = token_type_ids, position_ids

    @classmethod
    def of_inputs(cls, inputs: EncoderInputs) -> PackedIds | None:
        """Those of checked inputs; None of embeddings, of no tokens, and where some of these attend alone."""
        ids, batch = inputs.ids, inputs.batch
        if ids.input_ids is None or not batch.total_tokens or batch.num_keys is not None:
            return None
        return cls(batch, ids.input_ids, ids.token_type_ids, ids.position_ids)

    @classmethod
    def of_packed(cls, packed: PackedInputs, config: EncoderConfig) -> PackedIds | None:
        """Those of a PackedInputs; None where it has more, or padded outputs."""
        batch, types = packed["batch"], packed.get("token_type_ids")
        has_more = "position_ids" in packed or "task_type_ids" in packed or batch.seqlen is not None
        has_more = has_more or batch.num_keys is not None
        if has_more or not batch.total_tokens or (types is not None and config.embeddings.token_type is None):
            return None
        return cls(batch, packed["input_ids"], types)

    @classmethod
    def of_grid(cls, inputs: ModelInputs, has_types: bool, has_padding: bool | None) -> PackedIds | None:
        """Those of padded ids without padding, as one text has none; None where there is more, or something to check.

        has_padding: of the mask, as `padding_in` has it.
        """
        ids, types = inputs.input_ids, inputs.token_type_ids
        others = (inputs.position_ids, inputs.inputs_embeds, inputs.cu_seqlens, inputs.batch, inputs.task_type_ids)
        if has_padding is not False or any([t is not None for t in others]) or not _is_grid(ids) or not ids.numel():
            return None
        if types is not None:
            if not _is_grid(types) or types.shape != ids.shape or not has_types:
                return None
            types = types.flatten()
        batch = PackedBatch.from_mask(None, ids.shape[0], ids.shape[1], ids.device)
        return cls(batch, ids.flatten(), types)


def padding_in(mask: torch.Tensor | None, ids: Any) -> bool | None:
    """Whether the mask of padded ids leaves some of them out; None where that was not looked at: it is on a GPU, or of
    a kind or a shape that has to be checked.
    """
    if mask is None:
        return False
    if ops.transform_unsupported() is not None or not (_is_grid(mask) and _is_grid(ids) and mask.shape == ids.shape):
        return None  # under a transform a mask may have no values to look at
    return None if torch.compiler.is_compiling() else not is_all_ones(mask)


def _is_grid(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and t.is_cpu and t.dtype is torch.int64 and t.dim() == 2


def run_pooler(root: nn.Module, family: Family, first: torch.Tensor) -> torch.Tensor:
    """tanh(dense(first token)) (Devlin et al. 2018, appendix A.2): (batch, hidden_size)."""
    assert family.pooler is not None
    return linear(get_leaf(root, family.pooler), first, "tanh")


def first_tokens(packed: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """(total_tokens, hidden_size) -> each sequence's first real token, (batch, hidden_size); zeros if it has none."""
    if batch.indices is None and batch.seqlen is not None:  # no padding: nothing to look for
        return packed.view(batch.batch_size, batch.seqlen, -1)[:, 0]
    return ops.pooling(packed, batch.cu_seqlens, mode="cls")
