"""The attention of chosen layers and heads, of packed batches: other layers run as they do without it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from fastbert.errors import InputError
from fastbert.models.base import EncoderModel, PreTrainedModel
from fastbert.models.encode import Wanted
from fastbert.packed_inputs import ModelInputs, PackedInputs


@dataclass(frozen=True)
class AttentionMaps:
    """Attention probabilities of a batch, before dropout.

    layers, heads: which these are. probs: of each text (layers, heads, its tokens, its tokens), float32; a row holds
    what one token looks at, and adds up to 1.
    """

    layers: tuple[int, ...]
    heads: tuple[int, ...]
    probs: tuple[torch.Tensor, ...]

    def __len__(self) -> int:
        return len(self.probs)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.probs)

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.probs[i]


@torch.no_grad()
def attention(
    model: PreTrainedModel,
    batch: PackedInputs,
    layers: Iterable[int] | None = None,
    heads: Iterable[int] | None = None,
) -> AttentionMaps:
    """What the tokens of a batch look at.

    Layers around those that are asked for run as one op, and those behind the last of them do not run.

    Args:
        model: one of fastbert's, with or without a head; in eval mode, since dropout would be part of what is seen.
        batch: packed texts (`fastbert.pack_inputs`).
        layers, heads: which, counted from 0, below 0 from the end; None: all.

    Raises:
        InputError: the model has no such layer or head; it is in training mode.
    """
    base: EncoderModel = model.base_model
    if base.training:
        raise InputError("the model is in training mode: call model.eval()")
    config = base.running_config
    chosen = _chosen("layer", layers, len(config.layer_paths))
    chosen_heads = _chosen("head", heads, config.num_attention_heads)
    inputs = base.prepare(ModelInputs(batch))
    probs = base.encode(inputs, Wanted(probs=frozenset(chosen), stops=True)).probs or ()
    ends = inputs.batch.cu_seqlens
    lengths = (ends[1:] - ends[:-1]).tolist()
    index = torch.tensor(chosen_heads, device=base.device)
    found = [
        torch.stack([of_layer[i, :, :length, :length].index_select(0, index).float() for of_layer in probs])
        for i, length in enumerate(lengths)
    ]
    return AttentionMaps(chosen, chosen_heads, tuple(found))


def _chosen(what: str, asked: Iterable[int] | None, count: int) -> tuple[int, ...]:
    """Numbers in ascending order, each once. Raises InputError for one that is not there."""
    if asked is None:
        return tuple(range(count))
    listed: Sequence[int] = list(asked)
    for i in listed:
        if not -count <= i < count:
            raise InputError(f"there is no {what} {i}: the model has {count}, 0 to {count - 1}")
    return tuple(sorted({i % count for i in listed}))
