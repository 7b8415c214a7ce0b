"""fastbert's own models leaf by leaf: a padded forward that calls every leaf in turn, with the hooks of containers.

Nothing of fastbert computes here but the leaves, which are torch's: the family only says where they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastbert import EncoderConfig
from fastbert.families import FAMILIES
from fastbert.testing import reference


def _is_plain(kind: str) -> bool:
    """Whether `run_layer` below computes all that the family's layers do."""
    specs, leaves = EncoderConfig.of_family(kind).layer_specs, EncoderConfig.of_family(kind).embeddings
    has_distances = any(spec.attention.position or spec.attention.window_size != (-1, -1) for spec in specs)
    is_other = any(spec.feed_forward.gated or spec.norm.type != "layer" or len(spec.names.qkv) < 3 for spec in specs)
    return not has_distances and not is_other and leaves.position is not None and leaves.task_type is None


PLAIN = tuple(kind for kind in FAMILIES if _is_plain(kind))


class Hook:
    """A hook that counts its calls, and multiplies the floats that it sees by `factor`; copied with its module."""

    def __init__(self, factor: float = 1.0):
        self.factor, self.calls = factor, 0

    def scaled(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value * self.factor if value.is_floating_point() else value
        if isinstance(value, tuple) and type(value) is tuple:
            return (self.scaled(value[0]), *value[1:])
        if "last_hidden_state" in value:
            value["last_hidden_state"] = self.scaled(value["last_hidden_state"])
        return value


class After(Hook):
    def __call__(self, module: nn.Module, args: tuple, out: Any) -> Any:
        self.calls += 1
        return None if self.factor == 1.0 else self.scaled(out)


class Before(Hook):
    def __call__(self, module: nn.Module, args: tuple) -> Any:
        self.calls += 1
        return None if self.factor == 1.0 else (self.scaled(args[0]), *args[1:])


def at(root: nn.Module, path: str) -> nn.Module | None:
    """The module at a path; None where there is none."""
    for name in path.split(".") if path else ():
        root = root._modules.get(name)  # type: ignore[assignment]
        if root is None:
            return None
    return root


def leave(root: nn.Module, path: str, x: torch.Tensor) -> torch.Tensor:
    """What the hooks of a container make of its output; x where there is no such container in the family."""
    module = at(root, path)
    for hook in () if module is None else module._forward_hooks.values():
        out = hook(module, (), x)
        x = x if out is None else out
    return x


def positions_of(family, config, ids: torch.Tensor) -> torch.Tensor:
    if not family.positions_from_ids:
        return torch.arange(ids.shape[1]).expand(ids.shape)
    real = (ids != config.pad_token_id).long()
    return real.cumsum(1) * real + config.pad_token_id


def embeddings(model, ids, types) -> torch.Tensor:
    names = model.config.embeddings
    x = at(model, names.word)(ids) + at(model, names.position)(positions_of(model.family, model.config, ids))
    if names.token_type is not None:
        x = x + at(model, names.token_type)(types)
    x = x if names.norm is None else at(model, names.norm)(x)
    x = leave(model, "embeddings", x)
    return x if names.project is None else at(model, names.project)(x)


def attention(layer, names, heads: int, x, mask) -> torch.Tensor:
    """Up to the output projection, whose bias is in."""
    q, k, v = (
        at(layer, path)(x).unflatten(-1, (heads, -1)).transpose(1, 2) for path in (names.query, names.key, names.value)
    )
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    probs = reference.softmax(scores.masked_fill(~mask[:, None, None], -torch.inf))
    out = (probs @ v).transpose(1, 2).flatten(2)
    return at(layer, names.attention_output)(leave(layer, "attention.self", out))


def feed_forward(layer, names, activation: str, x) -> torch.Tensor:
    inner = reference.activation(at(layer, names.up)(x), activation)
    return at(layer, names.down)(leave(layer, "intermediate", inner))


def run_layer(layer, spec, x, mask) -> torch.Tensor:
    names, norm_first = spec.names, spec.norm_first
    first, second = at(layer, names.attention_norm), at(layer, names.feed_forward_norm)
    inputs = first(x) if norm_first else x
    out = attention(layer, names, spec.attention.num_heads, inputs, mask)
    holds_norm = names.attention_norm.startswith("attention.")  # and the residual; DistilBERT's has the products alone
    out = (out if holds_norm else leave(layer, "attention", out)) + x
    x = out if norm_first else first(out)
    x = leave(layer, "attention", leave(layer, "attention.output", x)) if holds_norm else x
    inner = feed_forward(layer, names, spec.feed_forward.activation, second(x) if norm_first else x)
    inner = leave(layer, "ffn", inner) if isinstance(at(layer, "ffn"), nn.Module) and names.up != "ffn" else inner
    out = inner + x if norm_first else second(inner + x)
    return leave(layer, "", leave(layer, "output", out))


def literal_forward(model: nn.Module, ids, mask, types) -> dict[str, torch.Tensor]:
    """last_hidden_state (batch, seqlen, hidden_size), with rubbish at padding, and pooler_output where there is one."""
    family, config = model.family, model.config
    x = embeddings(model, ids, types)
    groups = config.scopes.groups  # ALBERT's: one stands for each run of so many layers
    for i, (path, spec) in enumerate(zip(config.layer_paths, config.layer_specs, strict=True)):
        layer = at(model, path)
        if layer is not None:
            x = run_layer(layer, spec, x, mask)
        if groups and (i + 1) % config.inner_group_num == 0:
            x = leave(model, groups[i // config.inner_group_num], x)
    scopes = config.scopes  # the stack's is "encoder", or DistilBERT's "transformer"
    x = x if scopes.ends else leave(model, scopes.encoder, x)
    x = x if family.final_norm is None else at(model, family.final_norm)(x)
    outputs = {"last_hidden_state": leave(model, scopes.encoder, x) if scopes.ends else x}
    if family.pooler is not None:
        rows = torch.arange(len(ids))
        first = outputs["last_hidden_state"][rows, mask.long().argmax(1)]
        pooled = torch.tanh(at(model, family.pooler)(first))
        outputs["pooler_output"] = leave(model, "pooler", pooled) if family.pooler != "pooler" else pooled
    for hook in model._forward_hooks.values():
        hook(model, (), outputs)
    return outputs
