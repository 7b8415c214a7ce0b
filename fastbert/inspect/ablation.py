"""Heads taken out of a model: which of them can go."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch

from fastbert.errors import InputError
from fastbert.inspect.attention import numbers_of
from fastbert.layers.leaves import get_leaf
from fastbert.models.base import PreTrainedModel


@contextmanager
def without_heads(model: PreTrainedModel, heads: Mapping[int, Collection[int]]) -> Iterator[None]:
    """Within it these heads add nothing. heads: by the numbers of layers, from 0, below 0 from the end.

    The model is one of fastbert's. No weight is touched: a hook on attention's output projection clears what comes from
    the heads.

    Raises:
        InputError: there is no such layer or head; the model is another library's; layers share their weights (ALBERT),
            and not all of those that do are to lose the same heads.
    """
    if not isinstance(model, PreTrainedModel):
        raise InputError(f"{type(model).__name__} is none of fastbert's models: heads are taken out of these alone")
    config = model.base_model.running_config
    paths, count = config.layer_paths, config.num_attention_heads
    lost: dict[int, set[int]] = {}
    for number, of in heads.items():  # -1 and 11 may be one layer
        lost.setdefault(numbers_of("layer", [number], len(paths))[0], set()).update(numbers_of("head", of, count))
    by_path: dict[str, set[int]] = {}
    for i, path in enumerate(paths):
        if by_path.setdefault(path, lost.get(i, set())) != lost.get(i, set()):
            shared = [n for n, other in enumerate(paths) if other == path]
            raise InputError(f"layers {shared} share their weights: they lose the same heads, or none")
    with ExitStack() as stack:
        for i, path in enumerate(paths):
            gone = by_path.pop(path, set())
            if gone:
                spec = config.layer_specs[i]
                leaf = get_leaf(get_leaf(model.base_model, path), spec.names.attention_output)
                hook = leaf.register_forward_pre_hook(_clear(sorted(gone), spec.attention.head_dim))
                stack.callback(hook.remove)
        yield


def _clear(heads: list[int], head_dim: int) -> Callable[[torch.nn.Module, tuple], tuple]:
    def hook(module: torch.nn.Module, args: tuple) -> tuple:
        x = args[0].unflatten(-1, (-1, head_dim))
        gone = torch.zeros(x.shape[-2], dtype=torch.bool, device=x.device)
        gone[heads] = True
        return (x.masked_fill(gone[:, None], 0.0).flatten(-2), *args[1:])

    return hook


def measure_without_each_head(model: PreTrainedModel, measure: Callable[[], float]) -> torch.Tensor:
    """What `measure` gives (a loss, a metric on some data) without each head: (layers, heads), float64.

    Layers that share their weights lose their heads together, and have the same numbers.
    """
    config = model.base_model.running_config
    paths = config.layer_paths
    values = torch.zeros(len(paths), config.num_attention_heads, dtype=torch.float64)
    for path in dict.fromkeys(paths):
        layers = [i for i, other in enumerate(paths) if other == path]
        for head in range(config.num_attention_heads):
            with without_heads(model, dict.fromkeys(layers, (head,))):
                values[layers, head] = measure()
    return values
