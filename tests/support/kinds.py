"""One family of each kind of layer: families are data, so what one shows of a layer holds for all that have it.

`make test` asks these where a test goes over families, and `make test-full` all of them (`of_every_kind`). What goes by
little of a layer is asked of a few that have nothing in common (`of_few_kinds`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import pytest
from family_configs import make_config
from full import left_to_full

from fastbert.families import FAMILIES
from fastbert.layer_spec import LayerSpec


def _kind(spec: LayerSpec) -> Hashable:
    """A layer but for what its leaves are called: which roles share one, and what is computed."""
    names = spec.names
    paths = [getattr(names, field.name) for field in dataclasses.fields(names) if field.name != "order"]
    shared = tuple(None if path is None else paths.index(path) for path in paths if not isinstance(path, (tuple, bool)))
    attention = dataclasses.replace(spec.attention, softmax_scale=spec.attention.softmax_scale is not None)
    norm = dataclasses.replace(spec.norm, eps=1.0)
    rest = (spec.feed_forward, spec.norm_first, spec.has_attention_norm, frozenset(spec.biases), spec.after is None)
    return shared, names.per_head, attention, norm, rest


def _kinds_of(model_type: str) -> Hashable:
    config = make_config(model_type)
    paths = config.layer_paths
    return tuple(map(_kind, config.layer_specs)), len(set(paths)) == len(paths)


def _first_of_each() -> frozenset[str]:
    first: dict[Hashable, str] = {}
    for model_type in ("bert", *FAMILIES):  # the one that all know stands for its kind
        first.setdefault(_kinds_of(model_type), model_type)
    return frozenset(first.values())


ONE_OF_EACH = _first_of_each()


# Layers that share weights; the plain one; relative positions; turned ones, a norm first; windows, and no biases.
FEW = ("albert", "bert", "deberta-v2", "esm", "modernbert")


def of_every_kind(name: str = "model_type") -> pytest.MarkDecorator:
    """A mark: families whose kind of layer another one shows are left to `make test-full`. name: of the parameter."""

    def is_shown_by_another(given: dict[str, Any]) -> bool:
        return given[name] not in ONE_OF_EACH

    return left_to_full(is_shown_by_another)


def of_few_kinds(name: str = "model_type") -> pytest.MarkDecorator:
    """A mark: all families but those that have nothing in common are left to `make test-full`."""
    return left_to_full(lambda given: given[name] not in FEW)


def _first_heads() -> frozenset[tuple[str, str]]:
    """Heads are data, too: of each that families share the first one's, and the bare model of each kind of layer."""
    first: dict[str, tuple[str, str]] = {}
    for model_type in ("bert", *FAMILIES):
        for head, form in FAMILIES[model_type].heads.items():
            first.setdefault(f"{head} {form}", (model_type, head))
    return frozenset(first.values()) | {(model_type, "Model") for model_type in ONE_OF_EACH}


HEADS_OF_EACH = _first_heads()


def of_every_kind_of_head() -> pytest.MarkDecorator:
    """A mark for models_axis: heads that another family has in the same form are left to `make test-full`."""
    return left_to_full(lambda given: (given["model_type"], given["head"]) not in HEADS_OF_EACH)
