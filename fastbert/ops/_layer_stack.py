"""A stack of layers on a GPU, forward and backward, out of kernels and products (encoder_layers_training_gpu.py).

Between any two halves of layers there is a junction: what the first half's last product gave, with its bias, dropout
and the residual, is summed, and the sum is normed. Post-norm layers (Vaswani et al. 2017, section 3.1) go on with the
normed rows, as the product's operand and as the residual; pre-norm layers (Xiong et al. 2020, figure 1) with the normed
rows and the sum. So a stack is one chain of halves and junctions in either case, and a junction is one launch. What
went on from a junction in two ways comes back as two gradients: of the same rows where these were one tensor, and then
one is added inside of the product that makes the other.

Without `recomputes` a layer keeps what its backward reads. With it only the sum before a layer is kept, and two numbers
a row: the norm behind it, and all of the layer up to its wide matrix, are made again. The last product of a layer never
is, since what comes out of it is in the next sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from fastbert.ops._layer_kernels import LayerKernels, project, project_back
from fastbert.ops._merged_weights import Layout, is_copied
from fastbert.ops.layer_numbers import LayerNumbers

Tensors = dict[str, torch.Tensor]


class Norm(NamedTuple):
    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float


class Seeds(NamedTuple):
    """Philox seed and offset of each dropout of a layer; not read where nothing drops."""

    attention: torch.Tensor | None = None
    attention_output: torch.Tensor | None = None
    inner: torch.Tensor | None = None
    feed_forward: torch.Tensor | None = None


class Layer(NamedTuple):
    """One layer's numbers and tensors. norms: the attention's and the feed-forward's. tiles: of the batch, of `tile`
    tokens each. rotary: cos, sin, interleaved, by_token.
    """

    numbers: LayerNumbers
    qkv: torch.Tensor
    output: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    qkv_bias: torch.Tensor | None
    up_bias: torch.Tensor | None
    output_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    norms: tuple[Norm | None, Norm | None]
    seeds: Seeds
    tiles: torch.Tensor
    tile: int
    rotary: tuple[torch.Tensor, torch.Tensor, bool, bool] | None


class Gradients(NamedTuple):
    """Of the biases and norms of a layer, in `vectors`' dtype, by the names of Layer; norms as weight, bias, ..."""

    biases: dict[str, torch.Tensor | None]
    norms: list[torch.Tensor]


def bias_tensors(numbers: LayerNumbers, given: Iterator[torch.Tensor]) -> list[torch.Tensor | None]:
    """A layer's biases, by its Linears."""
    return [next(given) if numbers.biases >> i & 1 else None for i in range(numbers.num_linears)]


def norms_of(numbers: LayerNumbers, given: Iterator[torch.Tensor]) -> tuple[Norm | None, Norm | None]:
    found: list[Norm | None] = []
    for i, eps in enumerate((numbers.attention_norm_eps, numbers.feed_forward_norm_eps)):
        bits = numbers.norms >> 2 * i & 3
        found.append(Norm(next(given), next(given) if bits & 2 else None, eps) if bits else None)
    return found[0], found[1]


def weights_of(
    layout: Layout, flat: torch.Tensor, kept: Sequence[torch.Tensor], given: torch.dtype
) -> Iterator[list[torch.Tensor]]:
    """The products' weights of each layer, out of what `merged` gave. given: the weights' dtype."""
    rest = iter(kept)
    for products in layout.products:
        yield [part.within(flat) if is_copied(part, given, flat.dtype) else next(rest) for part in products]


class Stack:
    """layers: one at least, all post-norm or all pre-norm. vectors: the dtype of biases and norms."""

    def __init__(
        self,
        kernels: LayerKernels,
        layers: list[Layer],
        activation: str,
        window_positions: torch.Tensor | None,
        vectors: torch.dtype,
        recomputes: bool,
    ):
        self.kernels, self.layers, self.activation = kernels, layers, activation
        self.window_positions, self.vectors, self.recomputes = window_positions, vectors, recomputes
        self.norm_first = layers[0].numbers.norm_first

    # ----------------------------------------------------------------------------------------------------------------
    # Forward

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """x (total_tokens, hidden_size) -> the same shape, and what backward wants."""
        kept: list[torch.Tensor] = []
        entry: Tensors = {"summed": x, "h": x}
        norm = self._entry_norm(0)
        if norm is not None:
            rms = self.layers[0].numbers.rms
            h, _, mean, rstd = self.kernels.norm_fwd(x, None, None, *norm[:2], None, 0.0, norm.eps, False, True, rms)
            entry = {"summed": x, "h": h, "mean": mean, "rstd": rstd}
        for i, layer in enumerate(self.layers):
            kept += [entry[name] for name in self._entry_names(i)]
            body = self._body(i, entry)
            form = (self.activation, layer.numbers.gated, layer.seeds.inner, layer.numbers.inner_dropout)
            out, pre = self.kernels.feed_forward(body["h"], layer.up, layer.up_bias, layer.down, *form)
            if not self.recomputes:
                kept += [body[name] for name in self._body_names(i)] + [pre]
            drop = (layer.numbers.feed_forward_dropout, layer.seeds.feed_forward)
            residual = body["summed" if self.norm_first else "h"]
            entry = self._join(out, layer.down_bias, residual, self._entry_norm(i + 1), layer, *drop)
        kept += [entry[name] for name in self._entry_names(len(self.layers))]
        return entry["h"], kept

    def _entry_norm(self, i: int) -> Norm | None:
        """The norm of the junction before layer i: a post-norm layer's stands behind its second half."""
        if self.norm_first:
            return self.layers[i].norms[0] if i < len(self.layers) else None
        return self.layers[i - 1].norms[1] if i > 0 else None

    def _middle_norm(self, i: int) -> Norm | None:
        return self.layers[i].norms[1 if self.norm_first else 0]

    def _entry_names(self, i: int) -> list[str]:
        """What is kept of the junction before layer i. x is kept for the first one by the caller, and what comes out of
        the stack need not be.
        """
        has_norm, is_last = self._entry_norm(i) is not None, i == len(self.layers)
        names = ["summed"] if i > 0 and (has_norm or not is_last) else []
        names += ["mean", "rstd"] if has_norm else []
        return names + (["h"] if has_norm and not is_last and not self.recomputes else [])

    def _body_names(self, i: int) -> list[str]:
        """What is kept of a layer beside the junction before it and its wide matrix."""
        norm = ["mean", "rstd", "h"] if self._middle_norm(i) is not None else []
        return ["qkv", "context", "stats", "summed", *norm]

    def _body(self, i: int, entry: Tensors) -> Tensors:
        """A layer from its entry up to the operand of the wide product."""
        layer, numbers, kernels = self.layers[i], self.layers[i].numbers, self.kernels
        qkv = project(entry["h"], layer.qkv, layer.qkv_bias)
        q, k, v = _heads(qkv, numbers)
        if layer.rotary is not None:
            cos, sin, interleaved, by_token = layer.rotary
            kernels.rotate(q, k, cos, sin, layer.tiles, layer.tile, interleaved, by_token)
        context, stats = kernels.attention_fwd(
            q, k, v, layer.tiles, layer.seeds.attention, self._positions(numbers), layer.tile, numbers.softmax_scale,
            numbers.attention_dropout, (numbers.window_left, numbers.window_right), True,
        )  # fmt: skip
        out = torch.mm(context.view(context.shape[0], -1), layer.output.t())
        drop = (numbers.attention_output_dropout, layer.seeds.attention_output)
        residual = entry["summed" if self.norm_first else "h"]
        made = self._join(out, layer.output_bias, residual, self._middle_norm(i), layer, *drop)
        return {"qkv": qkv, "context": context, "stats": stats, **made}

    def _positions(self, numbers: LayerNumbers) -> torch.Tensor | None:
        return self.window_positions if max(numbers.window_left, numbers.window_right) >= 0 else None

    def _join(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        norm: Norm | None,
        layer: Layer,
        dropout_p: float,
        seed: torch.Tensor | None,
    ) -> Tensors:
        rms = layer.numbers.rms
        if norm is None:  # the sum alone: what some norm makes of it is left
            some = layer.norms[1] or layer.norms[0]
            assert some is not None
            _, summed, *_ = self.kernels.norm_fwd(
                x, bias, residual, some.weight, None, seed, dropout_p, 1.0, True, False, rms
            )
            return {"summed": summed, "h": summed}
        h, summed, mean, rstd = self.kernels.norm_fwd(
            x, bias, residual, norm.weight, norm.bias, seed, dropout_p, norm.eps, True, True, rms
        )
        return {"summed": summed, "h": h, "mean": mean, "rstd": rstd}

    # ----------------------------------------------------------------------------------------------------------------
    # Backward

    def backward(
        self,
        dout: torch.Tensor,
        x: torch.Tensor,
        kept: Sequence[torch.Tensor],
        dweights: Iterator[list[torch.Tensor]],
        needs_dx: bool,
    ) -> tuple[torch.Tensor | None, list[Gradients]]:
        """dx, and the gradients of biases and norms. dweights: of each layer, the last one first, memory for the
        gradients of its products' weights.
        """
        entries, bodies = self._unpacked(x, kept)
        biases: list[dict[str, torch.Tensor | None]] = [{} for _ in self.layers]
        norms: dict[tuple[int, int], list[torch.Tensor]] = {}  # by layer, and whether it is the feed-forward's
        # Of what leaves the junction behind the layer: of the operand, and, where that is another tensor, of the sum.
        dh, dsum = dout.contiguous(), None
        for i in reversed(range(len(self.layers))):
            layer, numbers, mine = self.layers[i], self.layers[i].numbers, biases[i]
            body = self._again(i, entries[i]) if self.recomputes else bodies[i]
            dqkv, doutput, dup, ddown = next(dweights)

            drop = (numbers.feed_forward_dropout, layer.seeds.feed_forward)
            behind = (i + 1, 0) if self.norm_first else (i, 1)
            dx, dsum, mine["down"], norms[behind] = self._join_back(
                dh, dsum, entries[i + 1], self._entry_norm(i + 1), layer.down_bias, layer, *drop
            )
            form = (self.activation, numbers.gated, layer.seeds.inner, numbers.inner_dropout)
            into = dsum if self._is_one(self._middle_norm(i)) else None
            dh, mine["up"] = self.kernels.feed_forward_bwd(
                dx, body["h"], body["pre"], layer.up, layer.down, *form, dup, ddown, into,
                None if layer.up_bias is None else self.vectors,
            )  # fmt: skip

            drop = (numbers.attention_output_dropout, layer.seeds.attention_output)
            dx, dsum, mine["output"], norms[i, int(self.norm_first)] = self._join_back(
                dh, None if into is not None else dsum, body, self._middle_norm(i), layer.output_bias, layer, *drop
            )
            into = dsum if self._is_one(self._entry_norm(i)) else None
            needs = needs_dx or i > 0 or self._entry_norm(0) is not None
            dh, mine["qkv"] = self._attention_back(dx, entries[i]["h"], body, layer, dqkv, doutput, into, needs)
            dsum = None if into is not None else dsum
        first = self._entry_norm(0)
        if first is not None:
            dh, _, _, norms[0, 0] = self._join_back(dh, dsum, entries[0], first, None, self.layers[0], 0.0, None)
        return dh, [
            Gradients(found, [*norms.get((i, 0), ()), *norms.get((i, 1), ())]) for i, found in enumerate(biases)
        ]

    def _is_one(self, norm: Norm | None) -> bool:
        """Whether one tensor goes on from a junction, as the operand and as the residual."""
        return not self.norm_first or norm is None

    def _unpacked(self, x: torch.Tensor, kept: Sequence[torch.Tensor]) -> tuple[list[Tensors], list[Tensors]]:
        """What forward kept: of the junctions before each layer and behind the last one, and of each layer beside."""
        given, entries, bodies = iter(kept), [], []
        for i in range(len(self.layers) + 1):
            entry = {name: next(given) for name in self._entry_names(i)}
            if i == 0:
                entry["summed"] = x
            if self._entry_norm(i) is None and "summed" in entry:
                entry["h"] = entry["summed"]
            entries.append(entry)
            if i < len(self.layers) and not self.recomputes:
                body = {name: next(given) for name in (*self._body_names(i), "pre")}
                body.setdefault("h", body["summed"])
                bodies.append(body)
        return entries, bodies

    def _again(self, i: int, entry: Tensors) -> Tensors:
        """What a layer would have kept, made again, with what stands before it completed."""
        layer, norm = self.layers[i], self._entry_norm(i)
        if norm is not None:
            rms = layer.numbers.rms
            made = self.kernels.norm_fwd(
                entry["summed"], None, None, norm.weight, norm.bias, None, 0.0, norm.eps, False, False, rms
            )
            entry["h"] = made[0]
        body = self._body(i, entry)
        return {**body, "pre": project(body["h"], layer.up, layer.up_bias)}

    def _join_back(
        self,
        dh: torch.Tensor,
        dsum: torch.Tensor | None,
        joined: Tensors,
        norm: Norm | None,
        bias: torch.Tensor | None,
        layer: Layer,
        dropout_p: float,
        seed: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, list[torch.Tensor]]:
        """Gradients of what came out of the product, of the residual, of the product's bias, and of the norm."""
        if norm is None:
            dx = self.kernels.dropout(dh, seed, dropout_p) if dropout_p > 0 else dh
            return dx, dh, None if bias is None else torch.sum(dx, 0, dtype=self.vectors), []
        dx, dsummed, dx_bias, dweight, dbias = self.kernels.norm_bwd(
            dh, dsum, joined["summed"], joined["mean"], joined["rstd"], norm.weight, seed, dropout_p, bias is not None,
            layer.numbers.rms,
        )  # fmt: skip
        found = [dweight] if norm.bias is None else [dweight, dbias]
        return dx if dropout_p > 0 else dsummed, dsummed, dx_bias if bias is not None else None, found

    def _attention_back(self, dx, h, body, layer, dqkv_weight, doutput_weight, dh, needs_dh):
        """dh, added to the one that is given, in place, and the gradient of the bias of query, key and value."""
        numbers = layer.numbers
        context = body["context"]
        torch.mm(dx.t(), context.view(context.shape[0], -1), out=doutput_weight)
        dcontext = torch.mm(dx, layer.output).view(context.shape)
        q, k, v = _heads(body["qkv"], numbers)
        cos, sin, interleaved, by_token = layer.rotary or (None, None, False, False)
        dqkv = self.kernels.attention_bwd(
            dcontext, q, k, v, context, body["stats"], layer.tiles, layer.seeds.attention, self._positions(numbers),
            layer.tile, numbers.softmax_scale, numbers.attention_dropout, (numbers.window_left, numbers.window_right),
            cos, sin, interleaved, by_token,
        )  # fmt: skip
        dqkv = dqkv.view(dqkv.shape[0], -1)
        torch.mm(dqkv.t(), h, out=dqkv_weight)
        dbias = None if layer.qkv_bias is None else torch.sum(dqkv, 0, dtype=self.vectors)
        return project_back(dqkv, layer.qkv, dh) if needs_dh else dh, dbias


def _heads(qkv: torch.Tensor, numbers: LayerNumbers) -> tuple[torch.Tensor, ...]:
    heads = (numbers.num_heads, numbers.num_kv_heads, numbers.num_kv_heads)
    return torch.split_with_sizes(qkv.view(qkv.shape[0], sum(heads), numbers.head_dim), heads, 1)
