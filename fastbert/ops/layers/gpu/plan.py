"""What all layers as one op on a GPU go by that no batch changes: made once for a tree's numbers, and kept."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fastbert.ops.layers.gpu.merged_weights import PAD, Layout
from fastbert.ops.layers.layer_numbers import LayerNumbers


class Norm(NamedTuple):
    """weight, bias: where they begin among a call's vectors; bias is -1 where there is none."""

    weight: int
    bias: int
    eps: float


class AddNorm(NamedTuple):
    """What ends a sublayer: dropout(x + bias) + residual, normed as the next sublayer takes it.

    norm: None where the next sublayer takes the sum. some: any norm of the layer, whose kernel makes the sum. bias:
    where it begins among a call's vectors, or -1. seed: of the layer's, counted as LayerNumbers' dropouts. is_start:
    before the first layer, where there is nothing to add. key: which of Plan.add_norm_keys.
    """

    norm: Norm | None
    some: Norm
    bias: int
    dropout_p: float
    seed: int
    key: int
    is_start: bool = False


class Tensors(NamedTuple):
    """Tensors of one name: of which layers or add_norms (`indices`) there is one, and how wide each is.

    shape_name: "rows", (total_tokens, width) in the products' dtype; float32 "numbers", one a row, and "stats",
    softmax_stats of as many heads; "vector", (width,) in the parameters' dtype.
    """

    name: str
    shape_name: str
    indices: tuple[int, ...]
    widths: tuple[int, ...]
    are_alike: bool  # of one width

    @classmethod
    def of(cls, name: str, shape_name: str, indices: Sequence[int], widths: Sequence[int]) -> Tensors:
        return cls(name, shape_name, tuple(indices), tuple(widths), len(set(widths)) == 1)


class Plan:
    """kinds: of each layer, which are all post-norm or all pre-norm; which_kind: its place in distinct_kinds.

    entries: the add_norm before each layer and the one behind the last; middles: the one in each layer. kept: what
    forward keeps, in this order; bodies: what is kept of layers, or made again. vectors: gradients of biases and norms.
    A call's vectors are those that add_norms take, one behind the other (size_of_vectors elements): of the layers'
    biases those that add_norm_biases names, and then all norms; vector_offsets says where each begins.
    """

    def __init__(
        self,
        kinds: tuple[LayerNumbers, ...],
        activation: str,
        hidden_size: int,
        inner: tuple[int, ...],
        recomputes: bool,
    ):
        self.kinds, self.activation, self.hidden_size, self.intermediate_sizes = kinds, activation, hidden_size, inner
        self.recomputes, self.norm_first, self.rms = recomputes, kinds[0].norm_first, kinds[0].rms
        self.layout = Layout(kinds, hidden_size, inner)
        self.distinct_kinds = tuple(dict.fromkeys(kinds))
        self.which_kind = tuple([self.distinct_kinds.index(layer) for layer in kinds])
        self.heads = tuple([(k.num_heads, k.num_kv_heads, k.head_dim) for k in kinds])
        self.pre_widths = tuple([sum(part.rows) for _, _, part, _ in self.layout.products])
        self.has_dropout = any([any(layer.dropouts) for layer in kinds])
        self.has_inner_dropout = any([layer.inner_dropout > 0 for layer in kinds])
        self._place_vectors()
        self.add_norm_keys: list[tuple] = []  # of LayerKernels.norm_fwd
        self.entries, self.middles = self._add_norms()
        self.bodies = tuple(self._bodies())
        self.kept = (*self._entries_kept(), *(() if recomputes else self.bodies))
        self.vectors = tuple(self._vectors())

    def _place_vectors(self) -> None:
        self.add_norm_biases: list[int] = []
        biases, which = 0, list[list[int]]()  # of output and down of each layer, among those; -1: there is none
        for layer in self.kinds:
            there = [i for i in range(layer.num_linears) if layer.biases >> i & 1]
            which.append([])
            for linear in (_output(layer), layer.num_linears - 1):
                which[-1].append(len(self.add_norm_biases) if linear in there else -1)
                self.add_norm_biases += [biases + there.index(linear)] if linear in there else []
            biases += len(there)
        step = -(-self.hidden_size // PAD) * PAD
        self.biases = [tuple([at if at < 0 else at * step for at in mine]) for mine in which]
        self.norms: list[tuple[Norm | None, Norm | None]] = []
        at = len(self.add_norm_biases) * step
        for layer in self.kinds:
            pair: list[Norm | None] = []
            for i, eps in enumerate((layer.attention_norm_eps, layer.feed_forward_norm_eps)):
                bits = layer.norms >> 2 * i & 3
                pair.append(Norm(at, at + step if bits & 2 else -1, eps) if bits else None)
                at += bits.bit_count() * step
            self.norms.append((pair[0], pair[1]))
        self.size_of_vectors, self.vector_offsets = at, list(range(0, at, step))

    def _add_norms(self) -> tuple[list[AddNorm], list[AddNorm]]:
        """A post-norm layer's second norm stands in the add_norm behind it; a pre-norm layer's first one before it."""
        first_norm = self.norms[0][0] if self.norm_first else None
        entries = [self._add_norm(first_norm, _some(self.norms[0]), -1, 0.0, 0, True)]
        middles = []
        for i, (layer, mine, biases) in enumerate(zip(self.kinds, self.norms, self.biases, strict=True)):
            middle, behind = mine[self.norm_first], mine[1]
            if self.norm_first:
                behind = self.norms[i + 1][0] if i + 1 < len(self.norms) else None
            middles.append(self._add_norm(middle, _some(mine), biases[0], layer.attention_output_dropout, 1))
            entries.append(self._add_norm(behind, _some(mine), biases[1], layer.feed_forward_dropout, 3))
        return entries, middles

    def _add_norm(
        self, norm: Norm | None, some: Norm, bias: int, dropout_p: float, seed: int, is_start: bool = False
    ) -> AddNorm:
        eps, has_bias = (1.0, False) if norm is None else (norm.eps, norm.bias >= 0)
        key = (dropout_p, eps, bias >= 0, not is_start, has_bias, not is_start, norm is not None)
        if key not in self.add_norm_keys:
            self.add_norm_keys.append(key)
        return AddNorm(norm, some, bias, dropout_p, seed, self.add_norm_keys.index(key), is_start)

    def _entries_kept(self) -> Iterator[Tensors]:
        """x, which is the first add_norm's sum, is kept by the caller, and what comes out of the stack need not be."""
        last, rows = len(self.kinds), self.hidden_size
        normed = [j for j, entry in enumerate(self.entries) if entry.norm is not None]
        yield _alike("entry_sums", "rows", [j for j in range(1, last + 1) if j in normed or j < last], rows)
        yield _alike("entry_means", "numbers", () if self.rms else normed, 1)
        yield _alike("entry_rstds", "numbers", normed, 1)
        if not self.recomputes:
            yield self.entry_hs

    @property
    def entry_hs(self) -> Tensors:
        normed = [j for j, entry in enumerate(self.entries[:-1]) if entry.norm is not None]
        return _alike("entry_hs", "rows", normed, self.hidden_size)

    @property
    def inners(self) -> Tensors:
        """What the wide product's activation makes, which is not kept."""
        return Tensors.of("inners", "rows", range(len(self.kinds)), self.intermediate_sizes)

    def _bodies(self) -> Iterator[Tensors]:
        layers, rows = range(len(self.kinds)), self.hidden_size
        normed = [i for i, middle in enumerate(self.middles) if middle.norm is not None]
        yield Tensors.of("qkvs", "rows", layers, [(heads + 2 * kv) * size for heads, kv, size in self.heads])
        yield Tensors.of("contexts", "rows", layers, [heads * size for heads, _, size in self.heads])
        yield Tensors.of("stats", "stats", layers, [heads for heads, _, _ in self.heads])
        yield _alike("middle_sums", "rows", layers, rows)
        yield _alike("middle_means", "numbers", () if self.rms else normed, 1)
        yield _alike("middle_rstds", "numbers", normed, 1)
        yield _alike("middle_hs", "rows", normed, rows)
        yield Tensors.of("pres", "rows", layers, self.pre_widths)

    def _vectors(self) -> Iterator[Tensors]:
        rows = self.hidden_size
        for name, run in zip(("qkv_biases", "up_biases"), self.layout.bias_runs, strict=True):
            there = [(i, part.shape[0]) for i, part in enumerate(run.parts) if part is not None]
            yield Tensors.of(name, "vector", [i for i, _ in there], [size for _, size in there])
        for which, name in enumerate(("output_biases", "down_biases")):
            yield _alike(name, "vector", [i for i, mine in enumerate(self.biases) if mine[which] >= 0], rows)
        for which, name in enumerate(("attention_norm", "feed_forward_norm")):
            norms = [(i, mine[which]) for i, mine in enumerate(self.norms) if mine[which] is not None]
            yield _alike(f"{name}_weights", "vector", [i for i, _ in norms], rows)
            yield _alike(f"{name}_biases", "vector", [i for i, norm in norms if norm.bias >= 0], rows)  # type: ignore[union-attr]


def _output(layer: LayerNumbers) -> int:
    """Which of a layer's Linears is the attention's output."""
    return 1 if layer.merged_qkv else 3


def _alike(name: str, shape_name: str, indices: Sequence[int], width: int) -> Tensors:
    return Tensors.of(name, shape_name, indices, [width] * len(indices))


def _some(norms: tuple[Norm | None, Norm | None]) -> Norm:
    some = norms[1] or norms[0]
    assert some is not None  # see accepts in encoder_layers_training.py
    return some


@functools.lru_cache(maxsize=64)
def plan_of(
    kinds: tuple[LayerNumbers, ...],
    layers: tuple[int, ...],
    activation: str,
    hidden_size: int,
    inner: tuple[int, ...],
    recomputes: bool,
) -> Plan:
    """kinds, layers, activation: of LayerOperands."""
    return Plan(tuple([kinds[at] for at in layers]), activation, hidden_size, inner, recomputes)
