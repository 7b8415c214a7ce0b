"""The attention of chosen layers and heads, of packed batches: other layers run as they do without it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from fastbert.errors import InputError
from fastbert.execution.request import EncoderInputs, EncoderOutput, Wanted
from fastbert.inspect.live import as_ours
from fastbert.layer_spec import LayerSpec
from fastbert.layers.context import LayerContext, make_context
from fastbert.layers.encoder import attention_input, queries_keys_values
from fastbert.layers.leaves import get_leaf, projection
from fastbert.models.base import EncoderModel
from fastbert.packed_inputs import ModelInputs, PackedInputs


@dataclass(frozen=True)
class AttentionMaps:
    """What the tokens of the texts of a batch get of each other.

    layers, heads: which these are. weights: of each text (layers, heads, its tokens, its tokens), float32; a row is
    what one token gets.
    """

    layers: tuple[int, ...]
    heads: tuple[int, ...]
    weights: tuple[torch.Tensor, ...]

    def __len__(self) -> int:
        return len(self.weights)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.weights)

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.weights[i]


@torch.no_grad()
def attention(
    model: nn.Module,
    batch: PackedInputs,
    layers: Iterable[int] | None = None,
    heads: Iterable[int] | None = None,
    *,
    causal: bool = False,
) -> AttentionMaps:
    """What the tokens of a batch look at: attention probabilities, before dropout. Each row adds up to 1.

    Layers around those that are asked for run as one op, and those behind the last of them do not run.

    Args:
        model: one of fastbert's, or transformers', with or without a head; in eval mode, since dropout would be part of
            what is seen.
        batch: packed texts (`fastbert.pack_inputs`).
        layers, heads: which, counted from 0, below 0 from the end; None: all.
        causal: no token sees those behind it, as in a language model that writes from left to right.

    Raises:
        InputError: the model has no such layer or head; it is in training mode.
    """
    asked = _Asked.of(model, layers, heads)
    return asked.maps(*asked.run(batch, with_states=False, causal=causal))


@torch.no_grad()
def weighted_attention(
    model: nn.Module,
    batch: PackedInputs,
    layers: Iterable[int] | None = None,
    heads: Iterable[int] | None = None,
) -> AttentionMaps:
    """How much the tokens of a batch get of each other: the lengths of what each head adds to a token's vector for each
    token that it looks at (Kobayashi et al. 2020, "Attention is not only a weight", section 3).

    A head that looks at a token whose value is short gets little of it: [SEP] most of all.

    Arguments and errors as of `attention`. A weight is the Euclidean norm of probability * (value W), where W is the
    head's part of attention's output projection.
    """
    asked = _Asked.of(model, layers, heads)
    inputs, output = asked.run(batch, with_states=True)
    base, config = asked.base, asked.base.running_config
    context = make_context(base, config.distances, inputs.batch, inputs.rotary_positions, inputs.window_positions)
    lengths = [
        _lengths_of_values(base, config.layer_paths[i], config.layer_specs[i], x, context)
        for i, x in zip(asked.layers, output.hidden_states or (), strict=True)
    ]
    return asked.maps(inputs, output, lengths)


def _lengths_of_values(
    base: EncoderModel, path: str, spec: LayerSpec, x: torch.Tensor, context: LayerContext
) -> torch.Tensor:
    """The norm of what each head would add to a token that looks at one alone: (total_tokens, heads), float32."""
    layer, attn = get_leaf(base, path), spec.attention
    x = attention_input(layer, spec, x)
    v = queries_keys_values(layer, spec, x, context)[2].repeat_interleave(attn.num_heads // attn.num_kv_heads, 1)
    leaf, norms = get_leaf(layer, spec.names.attention_output), []
    for head in range(attn.num_heads):
        alone = torch.zeros_like(v)
        alone[:, head] = v[:, head]
        output, bias = projection(leaf, alone.flatten(1))
        if bias is None:  # a leaf that was called has added its own
            output = output - projection(leaf, torch.zeros_like(alone.flatten(1)))[0]
        norms.append(torch.linalg.vector_norm(output.float(), dim=-1))
    return torch.stack(norms, -1)


@dataclass(frozen=True)
class _Asked:
    """A model, and the layers and heads of it that somebody asked for, in ascending order."""

    base: EncoderModel
    layers: tuple[int, ...]
    heads: tuple[int, ...]

    @classmethod
    def of(cls, model: nn.Module, layers: Iterable[int] | None, heads: Iterable[int] | None) -> _Asked:
        base: EncoderModel = as_ours(model).base_model
        if base.training:
            raise InputError("the model is in training mode: call model.eval()")
        config = base.running_config
        return cls(
            base,
            numbers_of("layer", layers, len(config.layer_paths)),
            numbers_of("head", heads, config.num_attention_heads),
        )

    def run(self, batch: PackedInputs, with_states: bool, causal: bool = False) -> tuple[EncoderInputs, EncoderOutput]:
        """Up to the last of the layers; with what goes into each of them, if so."""
        inputs, layers = self.base.prepare(ModelInputs(batch)), frozenset(self.layers)
        wanted = Wanted(layers if with_states else frozenset(), layers, True, causal)
        return inputs, self.base.encode(inputs, wanted)

    def maps(
        self, inputs: EncoderInputs, output: EncoderOutput, lengths: Sequence[torch.Tensor] | None = None
    ) -> AttentionMaps:
        """By text; each column times `lengths`, of each layer (total_tokens, heads), where these are given."""
        ends, heads = inputs.batch.cu_seqlens.tolist(), torch.tensor(self.heads, device=self.base.device)
        has_all = self.heads == tuple(range(self.base.running_config.num_attention_heads))
        weights = []
        for i, (start, end) in enumerate(pairwise(ends)):
            of_layers = [probs[i, :, : end - start, : end - start].float() for probs in output.probs or ()]
            if lengths is not None:
                of_layers = [a * n[start:end].t()[:, None] for a, n in zip(of_layers, lengths, strict=True)]
            of_heads = of_layers if has_all else [a.index_select(0, heads) for a in of_layers]
            # Of one text and one layer these are what the layer has made: 16 MB for BERT-large and 512 tokens.
            weights.append(of_heads[0][None] if len(of_heads) == len(ends) - 1 == 1 else torch.stack(of_heads))
        return AttentionMaps(self.layers, self.heads, tuple(weights))


def numbers_of(what: str, asked: Iterable[int] | None, count: int) -> tuple[int, ...]:
    """Numbers of layers or heads in ascending order, each once; None: all. Raises InputError for one that is not."""
    if asked is None:
        return tuple(range(count))
    listed: Sequence[int] = list(asked)
    for i in listed:
        if not -count <= i < count:
            raise InputError(f"there is no {what} {i}: the model has {count}, 0 to {count - 1}")
    return tuple(sorted({i % count for i in listed}))
