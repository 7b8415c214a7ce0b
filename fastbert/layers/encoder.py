"""One transformer layer on packed tokens, as its LayerSpec says: attention and feed-forward, each with its residual."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fastbert import ops
from fastbert.layer_spec import NORMS, RELATIVES, LayerSpec
from fastbert.layers.context import LayerContext
from fastbert.layers.leaves import (
    called_alone,
    get_leaf,
    in_use,
    is_called,
    is_linear,
    linear,
    linears,
    parent_of,
    projection,
    set_module,
    weights_of,
    within,
)
from fastbert.layers.norms import make_norm, norm_type_of, norm_weights
from fastbert.layers.operands import operands_of_one, run_on_context
from fastbert.layers.relative import relative_of


def add_norm(norm: nn.Module, x, bias, residual, dropout_p: float, prenorm: bool = False):
    """add_layer_norm or add_rms_norm with a leaf's weights, or its own call where the leaf is no plain norm."""
    norm_type = norm_type_of(norm)
    if norm_type is not None:
        weight, norm_bias, eps = norm_weights(norm)
        options: dict[str, Any] = {"x_bias": bias, "dropout_p": dropout_p, "eps": eps, "prenorm": prenorm}
        if norm_type != "layer":
            is_centered = norm_type == "zero_centered_rms"
            return ops.add_rms_norm(x, residual, weight, zero_centered_weight=is_centered, **options)
        return ops.add_layer_norm(x, residual, weight, norm_bias, **options)
    summed = add(x, bias, residual, dropout_p)
    return (norm(summed), summed) if prenorm else norm(summed)


def add(x, bias, residual, dropout_p: float):
    """dropout(x + bias) + residual, the end of a pre-norm sublayer."""
    x = x if bias is None else x + bias
    x = ops.dropout(x, dropout_p)
    return x if residual is None else x + residual


def norm_heads(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The norm of each head of x, (total_tokens, its heads, head_dim)."""
    if norm_type_of(norm) is None:
        return norm(x)
    return add_norm(norm, x.reshape(-1, x.shape[-1]), None, None, 0.0).view(x.shape)


def run_attention(layer: nn.Module, spec: LayerSpec, x, context: LayerContext, wants_probs: bool):
    """Self-attention of x (total_tokens, hidden_size), before its output projection: (total_tokens, heads' width).

    Also its probabilities (batch, heads, max_seqlen, max_seqlen), as the context shows them, or None. Where they are
    wanted the result is made of these, so that they have gradients, as those of transformers have.
    """
    q, k, v, options = _operands(layer, spec, x, context)
    batch, dropout_p = context.batch, spec.attention.dropout if layer.training else 0.0
    if wants_probs:
        probs = ops.attention_probs(q, k, batch.cu_seqlens, batch.max_seqlen, **options)
        shown, probs = (probs, probs) if context.show_probs is None else context.show_probs(probs)
        return ops.attention_from_probs(ops.dropout(probs, dropout_p), v, batch.cu_seqlens).flatten(1), shown
    out = ops.attention(q, k, v, batch.cu_seqlens, batch.max_seqlen, dropout_p=dropout_p, cache=batch.cache, **options)
    return out.flatten(1), None


def run_probs(layer: nn.Module, spec: LayerSpec, x, context: LayerContext) -> torch.Tensor:
    """The probabilities of run_attention alone, of what goes into the layer."""
    q, k, _, options = _operands(layer, spec, attention_input(layer, spec, x), context)
    return ops.attention_probs(q, k, context.batch.cu_seqlens, context.batch.max_seqlen, **options)


def attention_input(layer: nn.Module, spec: LayerSpec, x) -> torch.Tensor:
    """What a layer's attention gets of what goes into the layer: a pre-norm layer's is normed."""
    begins = spec.norm_first and spec.has_attention_norm
    return add_norm(get_leaf(layer, spec.names.attention_norm), x, None, None, 0.0) if begins else x


def _operands(layer: nn.Module, spec: LayerSpec, x, context: LayerContext):
    """Queries, keys and values, and the options of the ops of attention."""
    attention, batch = spec.attention, context.batch
    q, k, v = queries_keys_values(layer, spec, x, context)
    rotary = None if attention.rotary is None else context.rotary[attention.rotary]
    # Attention turns whole heads.
    if rotary is not None and attention.rotary is not None and attention.rotary.dim < attention.head_dim:
        (q, k), rotary = ops.rotate((q, k), rotary, batch.cu_seqlens, batch.cache), None
    relative = (
        None if attention.relative is None else relative_of(layer, spec, context.relative[attention.relative], q.dtype)
    )
    options: dict[str, Any] = {
        "softmax_scale": attention.softmax_scale,
        "window_size": attention.window_size,
        "window_positions": context.window_positions,
        "num_keys": batch.num_keys,
        "rotary": rotary,
        "relative": relative,
    }
    return q, k, v, options


def queries_keys_values(layer: nn.Module, spec: LayerSpec, x, context: LayerContext) -> list[torch.Tensor]:
    """(total_tokens, its heads, head_dim) each. Queries and keys are normed, and values are rotated, where a family
    does that; the others are not rotated yet.
    """
    q, k, v = _projected(layer, spec, x)
    if spec.names.query_norm is not None:
        q = norm_heads(get_leaf(layer, spec.names.query_norm), q)
    if spec.names.key_norm is not None:
        k = norm_heads(get_leaf(layer, spec.names.key_norm), k)
    rotary = spec.attention.rotary
    if rotary is not None and rotary.rotates_values:
        (v,) = ops.rotate((v,), context.rotary[rotary], context.batch.cu_seqlens, context.batch.cache)
    return [q, k, v]


def _projected(layer: nn.Module, spec: LayerSpec, x) -> list[torch.Tensor]:
    attention, names = spec.attention, spec.names
    heads = (attention.num_heads, attention.num_kv_heads, attention.num_kv_heads)
    products = linears([get_leaf(layer, path) for path in names.qkv], x)
    if names.per_head:
        return _with_biases(
            layer, spec, list(products[0].unflatten(-1, (attention.num_heads, 3, attention.head_dim)).unbind(2))
        )
    if len(products) == 1:
        products = list(products[0].split([count * attention.head_dim for count in heads], dim=-1))
    qkv = [t.unflatten(-1, (count, attention.head_dim)) for t, count in zip(products, heads, strict=True)]
    return _with_biases(layer, spec, qkv)


def _with_biases(layer: nn.Module, spec: LayerSpec, qkv: list[torch.Tensor]) -> list[torch.Tensor]:
    """Those of query and value that are parameters by themselves."""
    for i, path in ((0, spec.names.query_bias), (2, spec.names.value_bias)):
        if path is not None:
            parent, _, name = path.rpartition(".")
            bias = in_use(get_leaf(layer, parent))._parameters[name]
            assert bias is not None
            qkv[i] = qkv[i] + bias.view(qkv[i].shape[1:]).to(qkv[i].dtype)
    return qkv


def run_feed_forward(layer: nn.Module, spec: LayerSpec, x):
    """The MLP block, up to its last product: (out, the bias it still lacks)."""
    feed_forward, down = spec.feed_forward, get_leaf(layer, spec.names.down)
    ups = [get_leaf(layer, path) for path in spec.names.ups]
    if is_linear(down) and all(map(is_linear, ups)):
        *gates, up, last = operands = [weights_of(leaf) for leaf in (*ups, down)]
        out = ops.feed_forward(
            x,
            up.weight,
            up.bias,
            last.weight,
            activation=feed_forward.activation,
            gated=feed_forward.gated,
            gate_weight=gates[0].weight if gates else None,
            gate_bias=gates[0].bias if gates else None,
            dropout_p=feed_forward.dropout if layer.training else 0.0,
            weight_scales=tuple(each.weight_scale for each in operands),
            input_scales=tuple(each.input_scale for each in operands),
        )
        return out, last.bias
    return projection(down, run_activations(layer, spec, x))


def run_activations(layer: nn.Module, spec: LayerSpec, x):
    """What goes into the feed-forward's last product, by calls of the leaves: (total_tokens, intermediate_size)."""
    feed_forward, ups = spec.feed_forward, [get_leaf(layer, path) for path in spec.names.ups]
    if not feed_forward.gated:
        inner = linear(ups[0], x, feed_forward.activation)
    else:
        products = linears(ups, x)
        gate, up = products if len(products) == 2 else products[0].chunk(2, -1)
        inner = ops.activation(gate, feed_forward.activation) * up
    return ops.dropout(inner, feed_forward.dropout) if layer.training else inner


class Sum(NamedTuple):
    """dropout(x + bias) + residual, which the norm that comes next may take along."""

    x: torch.Tensor
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    dropout_p: float = 0.0

    def added(self) -> torch.Tensor:
        return add(*self)


class Sublayer(NamedTuple):
    """Attention or feed-forward: `compute`, and then the Linear at `last`; `both` is the two in one, with the bias that
    is still to be added. first: a leaf of what is computed first, by which its container is known. output_norm: of what
    `last` gives, where the residual is added to it; None: there is none.
    """

    first: str
    last: str
    norm: str
    has_norm: bool
    output_norm: str | None
    dropout_p: float
    compute: Callable[[torch.Tensor], torch.Tensor]
    both: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]


class SublayerScopes(NamedTuple):
    """The containers of a sublayer, None where there is none to call: of what it computes first, of its last Linear, of
    both, and of all that and the norm.
    """

    first: str | None = None
    last: str | None = None
    around: str | None = None
    outer: str | None = None

    @classmethod
    def of(cls, sublayer: Sublayer) -> SublayerScopes:
        first, last = parent_of(sublayer.first), parent_of(sublayer.last)
        around = last if first == last else parent_of(first or "")
        first, last = (None if path == around else path for path in (first, last))
        return cls(first, last, around, parent_of(around or ""))


_LAYER = ""  # the scope that is the layer itself


def run_sublayer(layer: nn.Module, spec: LayerSpec, sublayer: Sublayer, pending: Sum, scopes: SublayerScopes) -> Sum:
    """One sublayer. A container with hooks is called with what it stands for in transformers: of what is
    computed first x -> its result, of the last Linear (that result, x) -> the sublayer's end, of both x -> that end. A
    norm and the residual take part where the norm's path says so.
    """

    def holding(*paths: str | None) -> str:
        return next((path for path in paths if path is not None and sublayer.norm.startswith(f"{path}.")), _LAYER)

    def norm(x: torch.Tensor) -> torch.Tensor:
        return add_norm(get_leaf(layer, sublayer.norm), x, None, None, 0.0)

    def enter(path: str | None, run: Callable[..., Sum], *args: torch.Tensor) -> Sum:
        if path is None or not is_called(layer, path):
            return run(*args)
        return Sum(within(layer, path, lambda *args: run(*args).added(), *args))

    if spec.norm_first:
        begins_at = holding(scopes.first, scopes.around)
        ends_at = scopes.last or (scopes.around if begins_at == scopes.around and scopes.around else _LAYER)
    else:
        begins_at, ends_at = _LAYER, holding(scopes.last, scopes.around, scopes.outer)

    def ended(result: Sum, residual: torch.Tensor, at: str | None) -> Sum:
        """With what ends the sublayer, if that is in the scope `at`."""
        if ends_at != at:
            return result
        if sublayer.output_norm is not None:
            x = add_norm(get_leaf(layer, sublayer.output_norm), result.x, result.bias, None, 0.0)
            result = result._replace(x=x, bias=None)
        if spec.norm_first:
            return result._replace(residual=residual)
        return Sum(add_norm(get_leaf(layer, sublayer.norm), result.x, result.bias, residual, result.dropout_p))

    def first(x: torch.Tensor) -> Sum:
        return Sum(sublayer.compute(norm(x) if begins_at == scopes.first else x))

    def last(hidden: torch.Tensor, residual: torch.Tensor) -> Sum:
        return ended(
            Sum(*projection(get_leaf(layer, sublayer.last), hidden), None, sublayer.dropout_p), residual, scopes.last
        )

    def around(hidden: torch.Tensor) -> Sum:
        residual = x if spec.norm_first and begins_at == _LAYER else hidden
        inner = norm(hidden) if begins_at == scopes.around else hidden
        if scopes == SublayerScopes():
            return Sum(*sublayer.both(inner), None, sublayer.dropout_p)
        result = enter(scopes.last, last, enter(scopes.first, first, inner).added(), residual)
        return ended(result, residual, scopes.around)

    def outer(hidden: torch.Tensor) -> Sum:
        return ended(enter(scopes.around, around, hidden), x if spec.norm_first else hidden, scopes.outer)

    if not (spec.norm_first and sublayer.has_norm and begins_at == _LAYER):
        normed = x = pending.added()
    elif pending.residual is None:
        x = pending.added()
        normed = norm(x)
    else:  # the end of the sublayer before, and this one's norm
        normed, x = add_norm(get_leaf(layer, sublayer.norm), *pending, prenorm=True)
    return ended(enter(scopes.outer, outer, normed), x, _LAYER)


def run_layer(
    layer: nn.Module,
    spec: LayerSpec,
    x,
    context: LayerContext,
    wants_probs: bool = False,
    calls_containers: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One layer over the leaves of `layer`, ours or Hugging Face's: x (total_tokens, hidden_size) -> the same shape.

    Also the attention probabilities, where they are wanted. calls_containers: a container of `layer` has hooks.
    """
    if not wants_probs and not calls_containers:
        call = ops.try_fused("encoder_layers_training", x, partial(operands_of_one, layer, spec))
        if not isinstance(call, str):
            return run_on_context(call, x, [layer], [spec], context), None
    names, probs = spec.names, None

    def heads(x):
        nonlocal probs
        out, probs = run_attention(layer, spec, x, context, wants_probs)
        return out

    attention = Sublayer(
        names.query,
        names.attention_output,
        names.attention_norm,
        spec.has_attention_norm,
        names.attention_output_norm,
        spec.attention_output_dropout if layer.training else 0.0,
        heads,
        lambda x: projection(get_leaf(layer, names.attention_output), heads(x)),
    )
    feed_forward = Sublayer(
        names.up,
        names.down,
        names.feed_forward_norm,
        True,
        names.feed_forward_output_norm,
        spec.feed_forward_dropout if layer.training else 0.0,
        lambda x: run_activations(layer, spec, x),
        lambda x: run_feed_forward(layer, spec, x),
    )
    pending = Sum(x)
    for sublayer in (attention, feed_forward):
        pending = run_sublayer(
            layer, spec, sublayer, pending, SublayerScopes.of(sublayer) if calls_containers else SublayerScopes()
        )
    return pending.added(), probs


class EncoderLayer(nn.Module):
    """Holds the leaves of one layer under the family's names."""

    def __init__(self, spec: LayerSpec, hidden_size: int):
        super().__init__()
        self.spec = spec
        names, attention = spec.names, spec.attention
        queries, keys = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
        inner = spec.feed_forward.intermediate_size
        rows = {
            "query": queries,
            "key": keys,
            "value": keys,
            "attention_output": hidden_size,
            "gate": inner,
            "up": inner,
            "down": hidden_size,
        }
        columns = {"attention_output": queries, "down": inner}
        for role in names.order:
            path = getattr(names, role)
            if role == "attention_norm" and not spec.has_attention_norm:
                continue
            if role in NORMS:
                is_of_heads = role in ("query_norm", "key_norm")
                norm = spec.norm_of(NORMS.index(role))
                set_module(self, path, make_norm(norm, attention.head_dim if is_of_heads else hidden_size))
            elif role in RELATIVES:
                if path in names.relatives:
                    set_module(self, path, nn.Linear(hidden_size, queries, bias=role in spec.biases))
            else:
                served = [other for other in rows if getattr(names, other) == path]
                has_bias = role in spec.biases
                leaf = nn.Linear(columns.get(role, hidden_size), sum(rows[other] for other in served), bias=has_bias)
                set_module(self, path, leaf)
        for path, width in ((names.query_bias, queries), (names.value_bias, keys)):
            if path is not None:
                parent, _, name = path.rpartition(".")
                get_leaf(self, parent).register_parameter(name, nn.Parameter(torch.zeros(width)))

    part: Callable[..., Any] | None = None  # as Container.part

    def forward(self, hidden_states: torch.Tensor, *args: Any, **options: Any) -> Any:
        """What `run` gives, of a model's own call, which brings a LayerContext; else as transformers' layer."""
        if args and type(args[0]) is LayerContext:
            return self.run(hidden_states, *args)
        return called_alone(self, hidden_states, *args, **options)

    def run(
        self, x: torch.Tensor, context: LayerContext, wants_probs: bool = False, spec: LayerSpec | None = None
    ) -> Any:
        """x (total_tokens, hidden_size) -> the layer's result; where they are wanted, (result, attention
        probabilities). spec: instead of its own.
        """
        # A list, not any(...): each of them must be asked whether it is still a container.
        has_hooks = any([is_called(self, path) for path in self.spec.names.containers])
        spec = self.spec if spec is None else spec
        out, probs = run_layer(self, spec, x, context, wants_probs, has_hooks)
        return (out, probs) if wants_probs else out


def call_checkpointed(layer: nn.Module, *arguments: Any) -> Any:
    """`layer(*arguments)`, run once more in backward, with the same dropout, instead of keeping what it made."""
    return checkpoint(ops.with_same_seeds(layer), *arguments, use_reentrant=False)
