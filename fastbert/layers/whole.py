"""Whole layers as one op: all of an encoder for inference, one by one for training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import nn

from fastbert import ops
from fastbert.layers.leaves import GLOBAL_HOOKS, Container, get_leaf, is_linear, is_norm, is_plain, weights_of

if TYPE_CHECKING:
    from fastbert.layers.encoder import LayerNames, LayerOptions
    from fastbert.packing import PackedBatch


@dataclass(frozen=True)
class WholeLayers:
    """What `ops.encoder_layers` takes of some layers, and how to see that their modules still hold nothing else.

    Looking every leaf up takes 10 us a layer, and three times that once the weights have gone through the caches: a
    tenth of a short text's time in int8. Seeing that nothing was replaced takes a fraction of it.
    """

    linears: list[ops.LinearWeights] = field(default_factory=list)
    norms: list[torch.Tensor] = field(default_factory=list)
    eps: list[float] = field(default_factory=list)
    # A module's dict, a name, and what it has there. Tensors are the same objects or others; `==` would compare values.
    tensors: dict[tuple[int, str], tuple[dict, str, object]] = field(default_factory=dict)
    others: dict[tuple[int, str], tuple[dict, str, object]] = field(default_factory=dict)
    modules: list[nn.Module] = field(default_factory=list)
    kinds: list[type] = field(default_factory=list)  # of those modules
    hooks: list[tuple[dict, str]] = field(default_factory=list)  # a module's dict, and the name of what must be empty
    columns: list[tuple] = field(default_factory=list)  # of all these but `modules` and `kinds`

    @classmethod
    def of(cls, layers: Sequence[nn.Module], names: LayerNames) -> WholeLayers | None:
        """None where a leaf is no plain one: it must be called."""
        whole = cls()
        for layer in layers:
            for path in names.linears:
                leaf = get_leaf(layer, path)
                if not is_linear(leaf):
                    return None
                whole.linears.append(weights_of(leaf))
            for path in names.norms:
                norm = get_leaf(layer, path)
                if not is_norm(norm) or norm.bias is None:
                    return None
                whole.norms.extend((norm.weight, norm.bias))
                whole.eps.append(norm.eps)
        return whole

    def remember(
        self, root: nn.Module, paths: Sequence[str], layers: Sequence[nn.Module], names: LayerNames, called: bool
    ) -> None:
        """All by which `is_current` goes. `called`: layers and the containers in them have hooks of their own."""
        for path, layer in dict(zip(paths, layers, strict=True)).items():  # ALBERT's layers come again
            self.watch_path(root, path)
            self.hold(layer.__dict__, "training")
            for leaf in (*names.linears, *names.norms):
                self.watch_path(layer, leaf)
                self.watch(get_leaf(layer, leaf))
            for module in (layer, *(get_leaf(layer, path) for path in names.containers)) if called else ():
                self.watch(module)
        for held in (self.tensors, self.others):
            dicts, keys, values = zip(*held.values(), strict=True)
            self.columns.append((dicts, keys, list(values)))
        self.columns.append(tuple(zip(*self.hooks, strict=True)))

    def hold(self, values: dict, name: str, is_tensor: bool = False) -> None:
        # By id: the paths of leaves have their beginnings in common, and each is held once.
        (self.tensors if is_tensor else self.others)[id(values), name] = values, name, values.get(name)

    def watch(self, module: nn.Module) -> None:
        """Everything of a module that decides what calling it does."""
        attributes = module.__dict__
        for kept in ("_parameters", "_buffers"):
            for name in attributes[kept]:
                self.hold(attributes, kept, is_tensor=True)  # this dict itself: __init__ puts another in its place
                self.hold(attributes[kept], name, is_tensor=True)
        for name in ("forward", *(name for name in ("eps", "input_scale_value") if name in attributes)):
            self.hold(attributes, name)
        self.modules.append(module)
        self.kinds.append(type(module))
        # Not those for backward: where gradients are wanted the op does not serve.
        self.hooks.extend((attributes, name) for name in ("_forward_hooks", "_forward_pre_hooks"))

    def watch_path(self, root: nn.Module, path: str) -> None:
        for name in path.split("."):
            self.hold(root.__dict__, "_modules")
            self.hold(root._modules, name)
            root = root._modules[name]  # type: ignore[assignment]

    def is_current(self) -> bool:
        # By maps, which make no Python frame or loop: this is the longest of all that stands before a short text.
        (tensor_dicts, tensor_names, tensors), (dicts, names, values), (hooked, hooks) = self.columns
        return (
            not any(GLOBAL_HOOKS)
            and not any(map(dict.get, hooked, hooks))
            and all(map(is_, map(dict.get, tensor_dicts, tensor_names), tensors))
            and list(map(dict.get, dicts, names)) == values
            and list(map(type, self.modules)) == self.kinds
        )

    def run(self, options: LayerOptions, x: torch.Tensor, batch: PackedBatch) -> torch.Tensor | None:
        """The last layer's output, as x (total_tokens, hidden_size); None where no backend has this op for x."""
        return ops.encoder_layers(
            x,
            batch.cu_seqlens,
            self.linears,
            self.norms,
            eps=self.eps,
            num_heads=options.num_attention_heads,
            activation=options.activation,
        )


# Only eager calls look here. A graph of torch.compile guards what it has read of a model, but not which entry of a
# table it found: two models that share one compilation would share one model's weights. A trace looks at the tree anew.
_cache: WeakKeyDictionary[nn.Module, tuple[Sequence[str], WholeLayers]] = WeakKeyDictionary()


def forget_layers(root: nn.Module) -> None:
    """Let go of the weights of `root`'s layers, which are otherwise held until it runs again."""
    _cache.pop(root, None)


def run_whole_layers(
    root: nn.Module,
    paths: Sequence[str],
    layer_type: type[nn.Module] | None,
    names: LayerNames,
    options: LayerOptions,
    x: torch.Tensor,
    batch: PackedBatch,
) -> torch.Tensor | None:
    """The post-norm layers at `paths` below `root` as one op; None where they must be called, or run op by op.

    `layer_type`: layers of another type, or with hooks on them or on a container in them, are called; None where the
    caller has looked at them.
    """
    if options.norm_first:
        return None
    if torch.compiler.is_compiling():
        whole = _look_at(root, paths, layer_type, names)
        return None if whole is None else whole.run(options, x, batch)
    found = _cache.get(root)
    if found is not None and found[0] == paths and found[1].is_current():
        return found[1].run(options, x, batch)
    whole = _look_at(root, paths, layer_type, names)
    if whole is None:
        return None
    _cache[root] = paths, whole
    return whole.run(options, x, batch)


def _look_at(
    root: nn.Module, paths: Sequence[str], layer_type: type[nn.Module] | None, names: LayerNames
) -> WholeLayers | None:
    """The layers as they are now; None where one of them must be called."""
    layers = [get_leaf(root, path) for path in paths]
    if not layers or any([layer.training for layer in layers]):
        return None
    if layer_type is not None:
        for layer in layers:
            if not is_plain(layer, layer_type):
                return None
            for path in names.containers:  # the outer ones first: below one that was replaced nothing is looked for
                if not is_plain(get_leaf(layer, path), Container):
                    return None
    whole = WholeLayers.of(layers, names)
    if whole is not None and not torch.compiler.is_compiling():
        whole.remember(root, paths, layers, names, layer_type is not None)
    return whole


def run_training_layer(
    layer: nn.Module, names: LayerNames, options: LayerOptions, x: torch.Tensor, batch: PackedBatch
) -> torch.Tensor | None:
    """A post-norm layer as one op with a backward; None where a leaf must be called, or the ops run one by one."""
    linears = [get_leaf(layer, path) for path in names.linears]
    first_norm, second_norm = get_leaf(layer, names.attention_norm), get_leaf(layer, names.feed_forward_norm)
    if not all(is_linear(leaf) for leaf in linears):
        return None
    if not is_norm(first_norm) or not is_norm(second_norm):
        return None
    dropouts = (options.attention_dropout, options.attention_output_dropout, options.feed_forward_dropout)
    return ops.encoder_layer(
        x,
        batch.cu_seqlens,
        [weights_of(leaf) for leaf in linears],
        [first_norm.weight, first_norm.bias, second_norm.weight, second_norm.bias],
        dropouts=dropouts if layer.training else (0.0, 0.0, 0.0),
        eps=[first_norm.eps, second_norm.eps],
        num_heads=options.num_attention_heads,
        activation=options.activation,
    )
