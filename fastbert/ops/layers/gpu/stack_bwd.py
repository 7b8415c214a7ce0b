"""Backward of all layers on a GPU: see stack.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fastbert.ops.layers.gpu.kernels import project_back
from fastbert.ops.layers.gpu.memory import Memory
from fastbert.ops.layers.gpu.plan import AddNorm
from fastbert.ops.layers.gpu.stack import ENTRIES, MIDDLES, Forward, Names, Stack


def backward(
    stack: Stack, dout: torch.Tensor, kept: Sequence[torch.Tensor], dweights: torch.Tensor, needs_dx: bool
) -> tuple[torch.Tensor, Memory]:
    """dx, and the gradients of biases and norms, by the names of plan.vectors. dweights: memory for the gradients of
    all weights, as Layout has them.
    """
    plan, memory, held = stack.plan, stack.memory(), iter(kept)
    for tensors in plan.kept:
        memory.take(tensors, held)
    stack.complete(memory)
    layers = _Backward(stack, memory, dweights, dout)
    forward = Forward(stack, memory) if plan.recomputes else None
    for i in reversed(range(stack.num_layers)):
        if forward is not None:
            forward.again(i)
        layers.feed_forward(i)
        layers.attention(i, needs_dx)
    return layers.start(), layers.vectors


class _Rows:
    """Where the gradients of an add_norm's norm and of its bias go, by layer."""

    def __init__(self, vectors: Memory, norm: str, biases: str):
        self.weights, self.norm_biases, self.biases = (
            vectors[name] for name in (f"{norm}_weights", f"{norm}_biases", biases)
        )


class _Backward:
    """Backward, layer by layer. dh, dsum: gradients of what leaves the add_norm that comes next, of the next sublayer's
    operand, and, where that is another tensor, of the sum.
    """

    dsum: torch.Tensor | None = None

    def __init__(self, stack: Stack, memory: Memory, dweights: torch.Tensor, dout: torch.Tensor):
        self.stack, self.dh = stack, dout.contiguous()
        plan, kernels, x, of_parameters = stack.plan, stack.kernels, stack.x, stack.merged.vectors.dtype
        self.qkv_weights, self.output_weights, self.up_weights, self.down_weights = stack.weights(transposed=False)
        self.dqkv_weights, self.doutput_weights, self.dup_weights, self.ddown_weights = (
            run.within(dweights) for run in plan.layout.runs
        )
        self.vectors = Memory(x, of_parameters, stack.num_layers)
        for tensors in plan.vectors:
            self.vectors.make(tensors)
        self.dqkv_biases, self.dup_biases = self.vectors["qkv_biases"], self.vectors["up_biases"]
        scratch = Memory(x, of_parameters, stack.num_layers)
        for tensors in (plan.inners, *[each for each in plan.bodies if each.name in ("qkvs", "contexts", "pres")]):
            scratch.make_in_turn(tensors)
        scratch.split_columns("qkvs", ("q", "k", "v"), stack.head_widths)
        self.dqkvs, self.dcontexts, self.narrow, self.wide, self.dq, self.dk, self.dv = (
            scratch[name] for name in ("qkvs", "contexts", "inners", "pres", "q", "k", "v")
        )
        self.contexts, self.pres, self.q, self.k, self.v, self.row_max, self.row_sum = (
            memory[name] for name in ("contexts", "pres", "q", "k", "v", "row_max", "row_sum")
        )
        self.entries, self.middles = Names(memory, ENTRIES), Names(memory, MIDDLES)
        self.product, self.pool = torch.empty_like(x), list[torch.Tensor]()
        self.nowhere = x.new_empty(x.shape[1], dtype=of_parameters)
        self.attend = stack.bind_attention(kernels.attention_bwd)
        self.rotate = stack.bind_rotations(inverse=True)
        has_bias = [bias is not None for bias in self.dup_biases]
        self.run_feed_forward = stack.bind_feed_forward(kernels.feed_forward_bwd, has_bias)
        norms = ("attention_norm", "feed_forward_norm") if plan.norm_first else ("feed_forward_norm", "attention_norm")
        self.entry_rows, self.middle_rows = (
            _Rows(self.vectors, norm, biases)
            for norm, biases in zip(norms, ("down_biases", "output_biases"), strict=True)
        )

    def _spare(self, first: torch.Tensor, second: torch.Tensor | None) -> torch.Tensor:
        """Memory that holds neither."""
        for spare in self.pool:
            if spare is not first and spare is not second:
                return spare
        self.pool.append(torch.empty_like(self.stack.x))
        return self.pool[-1]

    def _join(self, add_norm: AddNorm, names: Names, at: int, rows: _Rows, layer: int, of_norm: int) -> torch.Tensor:
        """The gradient of what came out of the product; that of the residual becomes dsum. rows: where the gradients of
        the norm of layer `of_norm`, and of the bias of `layer`, go.
        """
        stack, dh, dsum, p, norm = self.stack, self.dh, self.dsum, add_norm.dropout_p, add_norm.norm
        has_bias, nowhere = add_norm.bias >= 0, self.nowhere
        if norm is None:
            dx, self.dsum = dh, dh
            if p > 0:
                dx = self.product
                stack.kernels.dropout(self.stack.x.shape[1], p)(dh, stack.seeds[add_norm.seed][layer], dx)
            if has_bias:
                torch.sum(dx, 0, dtype=rows.biases[layer].dtype, out=rows.biases[layer])
            return dx
        dx, dsummed = self.product, self._spare(dh, dsum)
        normed = (names.sums[at], names.means[at], names.rstds[at], stack.vector(norm.weight))
        seed = None if add_norm.is_start else stack.seeds[add_norm.seed][layer]
        dbias = rows.biases[layer] if has_bias else nowhere
        dnorm = (rows.weights[of_norm], rows.norm_biases[of_norm] if norm.bias >= 0 else nowhere)
        stack.kernels.norm_bwd(p, dsum is not None, has_bias)(dh, dsum, *normed, seed, dx, dsummed, dbias, *dnorm)
        self.dsum = dsummed
        return dx if p > 0 else dsummed

    def _next(self, has_norm: bool, dx: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Where the next add_norm's dh goes to, and whether it is added there: one tensor goes on from that add_norm,
        as the operand and as the residual.
        """
        if self.stack.plan.norm_first and has_norm:
            return self._spare(dx, self.dsum), False
        assert self.dsum is not None
        return self.dsum, True

    def feed_forward(self, i: int) -> None:
        plan = self.stack.plan
        of_norm = i + 1 if plan.norm_first else i
        dx = self._join(plan.entries[i + 1], self.entries, i + 1, self.entry_rows, i, of_norm)
        dh, is_added = self._next(plan.middles[i].norm is not None, dx)
        kept = (self.middles.hs[i], self.pres[i], self.up_weights[i], self.down_weights[i])
        gradients = (self.dup_weights[i], self.ddown_weights[i], self.dup_biases[i], dh)
        run = self.run_feed_forward[i]
        run(dx, *kept, self.narrow[i], self.wide[i], *gradients, is_added, self.stack.seeds[2][i])
        self.dh = dh
        if is_added:
            self.dsum = None

    def attention(self, i: int, needs_dx: bool) -> None:
        stack, plan = self.stack, self.stack.plan
        dx = self._join(plan.middles[i], self.middles, i, self.middle_rows, i, i)
        dqkv, dq, dk = self.dqkvs[i], self.dq[i], self.dk[i]
        torch.mm(dx.t(), self.contexts[i], out=self.doutput_weights[i])
        torch.mm(dx, self.output_weights[i], out=self.dcontexts[i])
        kept = (self.q[i], self.k[i], self.v[i], self.contexts[i], self.row_max[i], self.row_sum[i])
        batch = (stack.tiles[i], stack.seeds[0][i], stack.positions[i])
        self.attend[i](self.dcontexts[i], *kept, dq, dk, self.dv[i], *batch)
        if self.rotate[i] is not None:
            self.rotate[i](dq, dk)
        torch.mm(dqkv.t(), self.entries.hs[i], out=self.dqkv_weights[i])
        dbias = self.dqkv_biases[i]
        if dbias is not None:
            torch.sum(dqkv, 0, dtype=dbias.dtype, out=dbias)
        has_norm = plan.entries[i].norm is not None
        self.dh, is_added = self._next(has_norm, dx)
        if is_added:
            self.dsum = None
        if needs_dx or i > 0 or has_norm:
            project_back(dqkv, self.qkv_weights[i], self.dh, is_added)

    def start(self) -> torch.Tensor:
        """dx."""
        first = self.stack.plan.entries[0]
        if first.norm is None:
            return self.dh
        return self._join(first, self.entries, 0, self.entry_rows, 0, 0)
