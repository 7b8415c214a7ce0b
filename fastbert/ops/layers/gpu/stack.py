"""All layers of a training step on a GPU: launches and products, and nothing between them. Here is forward;
stack_bwd.py has backward.

A layer is two sublayers, each of which ends with an add_norm (plan.py). Both directions are loops over layers, around
which everything is made that layers share: memory, kernels bound to the batch, weights as products take them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fastbert.ops.attention.rotary import Rotary
from fastbert.ops.layers.gpu.kernels import LayerKernels, project
from fastbert.ops.layers.gpu.memory import Memory
from fastbert.ops.layers.gpu.merged_weights import is_copied
from fastbert.ops.layers.gpu.plan import AddNorm, Plan
from fastbert.ops.layers.layer_numbers import LayerNumbers

# What an add_norm makes: the sum, the next sublayer's operand, and what its norm makes of each row.
ENTRIES = ("entry_sums", "entry_hs", "entry_means", "entry_rstds")
MIDDLES = ("middle_sums", "middle_hs", "middle_means", "middle_rstds")


class MergedWeights(NamedTuple):
    """The weights of all layers. flat: what products take of them, in x's dtype, as the plan's Layout has it. kept:
    those that products take as they are. vectors: biases and norms, as the Plan has them, in the weights' dtype.
    """

    flat: torch.Tensor
    kept: Sequence[torch.Tensor]
    vectors: torch.Tensor


class Batch(NamedTuple):
    """What a call brings beside x and weights. tiles, tile_sizes: of each kind of layer. philox: (layers, 3 or 4, 2).
    rotary, window_positions: as attention takes them.
    """

    tiles: Sequence[torch.Tensor]
    tile_sizes: Sequence[int]
    philox: torch.Tensor | None
    rotary: Sequence[Rotary]
    window_positions: torch.Tensor | None


class Stack:
    """A plan's layers on one batch: what both directions share."""

    def __init__(self, plan: Plan, merged: MergedWeights, batch: Batch, x: torch.Tensor):
        self.plan, self.merged, self.batch, self.x = plan, merged, batch, x
        self.kernels = LayerKernels(x, plan.rms)
        self.num_layers = len(plan.kinds)
        self.head_widths = [(queries * size, keys * size, keys * size) for queries, keys, size in plan.heads]
        self.kinds = [
            (layer, tiles, size, batch.window_positions if max(layer.window_left, layer.window_right) >= 0 else None)
            for layer, tiles, size in zip(plan.distinct_kinds, batch.tiles, batch.tile_sizes, strict=True)
        ]
        self.tiles = self.of_layers([tiles for _, tiles, _, _ in self.kinds])
        self.positions = self.of_layers([positions for *_, positions in self.kinds])
        # By the order of LayerNumbers' dropouts; without an inner one nobody looks at its.
        self.seeds: list[Sequence[Any]] = [[None] * self.num_layers] * 4
        if batch.philox is not None:
            each = [t.unbind() for t in batch.philox.unbind(1)]
            self.seeds = [each[0], each[1], each[-2], each[-1]]

    def vector(self, offset: int) -> torch.Tensor:
        """One of those that add_norms take."""
        return self.merged.vectors[offset : offset + self.plan.hidden_size]

    def of_layers(self, of_kinds: Sequence[Any]) -> list[Any]:
        return [of_kinds[number] for number in self.plan.which_kind]

    def weights(self, transposed: bool) -> list[Sequence[torch.Tensor]]:
        """qkv, output, up and down of each layer, as products forward take them if transposed."""
        flat, weight_dtype, kept = self.merged.flat, self.merged.vectors.dtype, iter(self.merged.kept)
        runs = self.plan.layout.runs
        if weight_dtype is not flat.dtype:
            return [run.within(flat, transposed) for run in runs]  # type: ignore[misc]
        each = [
            [part.within(flat) if is_copied(part, weight_dtype, flat.dtype) else next(kept) for part in products]
            for products in self.plan.layout.products
        ]
        return [[t.t() if transposed else t for t in product] for product in zip(*each, strict=True)]

    def bind_attention(self, bind: Callable[..., Any]) -> list[Any]:
        """bind(layer, tiles, tile, positions) for each kind: of each layer."""
        return self.of_layers([bind(*each) for each in self.kinds])

    def bind_rotations(self, inverse: bool) -> list[Any]:
        """What rotates q and k of each layer in place, or None."""
        return self.of_layers(
            [self._rotation(*each[:3], inverse) if each[0].rotary >= 0 else None for each in self.kinds]
        )

    def _rotation(self, layer: LayerNumbers, tiles: torch.Tensor, tile: int, inverse: bool) -> Callable[..., None]:
        table = self.batch.rotary[layer.rotary]
        launch = self.kernels.rotate(layer, tiles, tile, table, inverse)
        return lambda q, k: launch(q, k, q, k, table[0], table[1], tiles)

    def bind_feed_forward(self, bind: Callable[..., Any], *others: Sequence[Any]) -> list[Any]:
        """bind(activation, layer, intermediate_size, *others) for each that differs: of each layer."""
        bound: dict[tuple, Any] = {}
        launches = []
        for key in zip(self.plan.which_kind, self.plan.intermediate_sizes, *others, strict=True):
            if key not in bound:
                number, *rest = key
                bound[key] = bind(self.plan.activation, self.plan.distinct_kinds[number], *rest)
            launches.append(bound[key])
        return launches

    def memory(self) -> Memory:
        """Without anything in it but x, which is the first add_norm's sum."""
        memory = Memory(self.x, self.merged.vectors.dtype, self.num_layers + 1)
        memory["entry_sums"][0] = self.x
        return memory

    def complete(self, memory: Memory) -> None:
        """Beside what is kept: memory for what is made again, and names of what has two."""
        plan = self.plan
        if plan.recomputes:
            for tensors in (plan.entry_hs, *plan.bodies):
                memory.make_in_turn(tensors)
        memory.split_columns("qkvs", ("q", "k", "v"), self.head_widths)
        memory.split_rows("stats", ("row_max", "row_sum"))
        for add_norms, (sums, hs, means, rstds) in ((plan.entries, ENTRIES), (plan.middles, MIDDLES)):
            for at, add_norm in enumerate(add_norms):
                if add_norm.norm is None and memory[sums][at] is not None:
                    memory[hs][at] = memory[sums][at]
            if plan.rms:  # whose kernels do not look at it
                memory.share(means, rstds)

    def forward(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """x (total_tokens, hidden_size) -> the same shape, and what backward wants."""
        memory = self.memory()
        for tensors in self.plan.kept:
            memory.make(tensors)
        out = torch.empty_like(self.x)
        memory["entry_hs" if self.plan.entries[-1].norm is not None else "entry_sums"][self.num_layers] = out
        self.complete(memory)
        forward = Forward(self, memory)
        forward.start()
        for i in range(self.num_layers):
            forward.attention(i)
            forward.feed_forward(i)
        return memory["entry_hs"][self.num_layers], memory.held(self.plan.kept)


class Names:
    """What an add_norm makes, in memory; hs: the operands of the next products."""

    def __init__(self, memory: Memory, names: Sequence[str]):
        self.sums, self.hs, self.means, self.rstds = (memory[name] for name in names)


class Forward:
    """Forward, layer by layer: what is in `memory` becomes what its names say."""

    def __init__(self, stack: Stack, memory: Memory):
        self.stack, plan, x, kernels = stack, stack.plan, stack.x, stack.kernels
        self.qkv_weights, self.output_weights, self.up_weights, self.down_weights = stack.weights(transposed=True)
        self.qkv_biases, self.up_biases = (run.within(stack.merged.flat) for run in plan.layout.bias_runs)
        self.attend = stack.bind_attention(kernels.attention_fwd)
        self.rotate = stack.bind_rotations(inverse=False)
        self.run_feed_forward = stack.bind_feed_forward(kernels.feed_forward)
        memory.make_in_turn(plan.inners)
        self.product = torch.empty_like(x)  # what comes out of a sublayer, for the next add_norm alone
        self.nothing, self.nothing_of_norm = x.new_empty(0), x.new_empty(0, dtype=torch.float32)
        self.qkvs, self.contexts, self.pres, self.inners = (memory[t] for t in ("qkvs", "contexts", "pres", "inners"))
        self.q, self.k, self.v, self.row_max, self.row_sum = (
            memory[name] for name in ("q", "k", "v", "row_max", "row_sum")
        )
        self.entries, self.middles = Names(memory, ENTRIES), Names(memory, MIDDLES)
        launches = [kernels.norm_fwd(*key) for key in plan.add_norm_keys]
        self.join_entries = [self._bound(launches, add_norm, max(0, i - 1)) for i, add_norm in enumerate(plan.entries)]
        self.join_middles = [self._bound(launches, add_norm, i) for i, add_norm in enumerate(plan.middles)]

    def _bound(self, launches: Sequence[Any], add_norm: AddNorm, layer: int) -> tuple:
        """What launches it; its bias, its norm's weight and bias, its seed; and whether it has a norm."""
        stack, norm = self.stack, add_norm.norm
        bias = stack.vector(add_norm.bias) if add_norm.bias >= 0 else None
        norm_bias = stack.vector(norm.bias) if norm is not None and norm.bias >= 0 else None
        seed = None if add_norm.is_start else stack.seeds[add_norm.seed][layer]
        weight = stack.vector((norm or add_norm.some).weight)
        return launches[add_norm.key], bias, weight, norm_bias, seed, norm is not None

    def _join(self, bound: tuple, x: Any, residual: Any, names: Names, at: int) -> None:
        launch, bias, weight, norm_bias, seed, has_norm = bound
        if has_norm:
            outputs = (names.hs[at], names.sums[at], names.means[at], names.rstds[at])
            launch(x, bias, residual, weight, norm_bias, seed, *outputs)
        else:  # what some norm makes of the sum is left
            outputs = (torch.empty_like(self.stack.x), names.sums[at], self.nothing_of_norm, self.nothing_of_norm)
            launch(x, bias, residual, weight, None, seed, *outputs)

    def start(self) -> None:
        launch, _, weight, norm_bias, _, has_norm = self.join_entries[0]
        if has_norm:
            names = self.entries
            outputs = (names.hs[0], self.nothing, names.means[0], names.rstds[0])
            launch(names.sums[0], None, None, weight, norm_bias, None, *outputs)

    def attention(self, i: int) -> None:
        """Up to the operand of the wide product."""
        stack, q, k, entries = self.stack, self.q[i], self.k[i], self.entries
        project(entries.hs[i], self.qkv_weights[i], self.qkv_biases[i], self.qkvs[i])
        if self.rotate[i] is not None:
            self.rotate[i](q, k)
        outputs = (self.contexts[i], self.row_max[i], self.row_sum[i])
        self.attend[i](q, k, self.v[i], *outputs, stack.tiles[i], stack.seeds[0][i], stack.positions[i])
        torch.mm(self.contexts[i], self.output_weights[i], out=self.product)
        residual = entries.sums[i] if stack.plan.norm_first else entries.hs[i]
        self._join(self.join_middles[i], self.product, residual, self.middles, i)

    def feed_forward(self, i: int) -> None:
        stack, middles = self.stack, self.middles
        weights = (self.up_weights[i], self.up_biases[i], self.down_weights[i])
        outputs = (self.pres[i], self.inners[i], self.product)
        self.run_feed_forward[i](middles.hs[i], *weights, *outputs, stack.seeds[2][i])
        residual = middles.sums[i] if stack.plan.norm_first else middles.hs[i]
        self._join(self.join_entries[i + 1], self.product, residual, self.entries, i + 1)

    def again(self, i: int) -> None:
        """What a layer would have kept."""
        names, norm = self.entries, self.stack.plan.entries[i].norm
        if norm is not None:
            _, _, weight, norm_bias, *_ = self.join_entries[i]
            launch = self.stack.kernels.norm_fwd(0.0, norm.eps, False, False, norm_bias is not None, False, False)
            outputs = (names.hs[i], self.nothing, self.nothing_of_norm, self.nothing_of_norm)
            launch(names.sums[i], None, None, weight, norm_bias, None, *outputs)
        self.attention(i)
        project(self.middles.hs[i], self.up_weights[i], self.up_biases[i], self.pres[i])
