"""Rotary embedding as config.json files describe it: every entry is read from where transformers reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastbert.families.fields import MAX_FLOAT32, is_number
from fastbert.layer_spec import Invalid, RotarySpec

_LENGTH, _SHARE, _TRUNCATE = "original_max_position_embeddings", "partial_rotary_factor", "truncate"
# rope_type -> the numbers that its table is made from.
_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _LENGTH),
    "yarn": (_LENGTH, "factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    "proportional": ("factor",),
}
_OPTIONAL = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_OFF_BY_ZERO = _OPTIONAL[1:]


Thetas = float | Mapping[str, float]


def rotary(config: Any, dim: int, theta: Thetas, layer_type: str | None = None, **options: Any) -> RotarySpec:
    """What `config.rope_parameters` mean for heads of width `dim`.

    theta: where they have none; of families whose rope_parameters have an object for each type of layer, one for each
    of these. layer_type: which of these it is. Raises Invalid for a rope_type that is unknown, or whose table depends
    on the longest sequence of a batch: one sequence would change another's result.
    """
    outer = {} if config.rope_parameters is None else config.rope_parameters
    name = "rope_parameters"
    if not isinstance(outer, Mapping):
        raise Invalid(name, outer, "an object with rope_type and rope_theta, or null")
    parameters = outer
    if isinstance(theta, Mapping):
        for other in (key for key in outer if key not in theta):
            raise Invalid(f"{name}.{other}", outer[other], f"in the object of {' or '.join(theta)}")
        name, parameters = f"{name}.{layer_type}", outer.get(layer_type) or {}
    default = theta[layer_type] if isinstance(theta, Mapping) and layer_type is not None else theta
    if not isinstance(parameters, Mapping):
        raise Invalid(name, parameters, "an object with rope_type and rope_theta, or null")
    if config.extra.get("head_dim") not in (None, dim):  # transformers reads it where it is no field, too
        raise Invalid("head_dim", config.extra["head_dim"], f"{dim}, hidden_size / num_attention_heads")
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if rope_type in ("dynamic", "longrope"):
        raise Invalid(
            f"{name}.rope_type",
            rope_type,
            f"one whose table does not depend on the longest sequence of a batch: {', '.join(_NUMBERS)}",
        )
    if not isinstance(rope_type, str) or rope_type not in _NUMBERS:
        raise Invalid(f"{name}.rope_type", rope_type, f"one of {', '.join(_NUMBERS)}")
    base: Any = parameters.get("rope_theta", default)
    if not is_number(base) or not 1 < base < MAX_FLOAT32:
        raise Invalid(f"{name}.rope_theta", base, "a number above 1")
    if rope_type == "default":  # transformers reads nothing else then, not even partial_rotary_factor
        return RotarySpec(float(base), dim, **options)
    numbers = _numbers(config, rope_type, parameters, name, is_flat=layer_type is None)
    numbers |= _share(config, rope_type, dim, parameters, name)
    if rope_type == "yarn":
        # transformers looks for it in rope_parameters itself, which may hold nothing beside objects of layer types.
        numbers[_TRUNCATE] = layer_type is not None or _truncates(parameters)
    return RotarySpec(float(base), dim, scaling=(rope_type, tuple(numbers.items())), **options)


def _numbers(config: Any, rope_type: str, parameters: Mapping[str, Any], name: str, is_flat: bool) -> dict[str, float]:
    """The numbers of `rope_type`, those that are left out filled in."""
    numbers: dict[str, float] = {}
    defaults: dict[str, Any] = {_LENGTH: config.max_position_embeddings}
    if rope_type == "proportional":
        defaults["factor"] = 1.0
    if is_flat and _LENGTH in config.extra:  # beside rope_parameters it goes before that inside
        parameters = {**parameters, _LENGTH: config.extra[_LENGTH]}
    for key in _NUMBERS[rope_type]:
        value = parameters.get(key, defaults.get(key))
        if key == "factor" and rope_type == "yarn" and key in parameters and value is None:
            value = config.max_position_embeddings / numbers[_LENGTH]
        if key in _OPTIONAL and (value is None or (key in _OFF_BY_ZERO and value == 0)):
            continue
        if not is_number(value) or not 0 < value < MAX_FLOAT32:
            raise Invalid(f"{name}.{key}", value, "a number above 0")
        numbers[key] = value
    return numbers


def _share(config: Any, rope_type: str, dim: int, parameters: Mapping[str, Any], name: str) -> dict[str, float]:
    """Which share of a head's frequencies "proportional" keeps; the other types turn whole heads only."""
    above = config.extra.get(_SHARE)
    share = parameters.get(_SHARE, 1.0 if above is None else above)
    if not is_number(share) or not 0 <= share <= 1:
        raise Invalid(f"{name}.{_SHARE}", share, "a number from 0 to 1")
    if rope_type == "proportional":
        return {_SHARE: share}
    if int(dim * share) != dim:
        raise Invalid(
            f"{name}.{_SHARE}", share, f"1.0 with rope_type {rope_type!r}: transformers, too, turns whole heads"
        )
    return {}


def _truncates(parameters: Mapping[str, Any]) -> bool:
    value = parameters.get(_TRUNCATE, True)
    if value is not None and type(value) is not bool:
        raise Invalid(f"rope_parameters.{_TRUNCATE}", value, "true or false")
    return bool(value)


def upgrade_rope(entries: dict[str, Any]) -> dict[str, Any]:
    """Entries of a config.json from before there was rope_parameters, with rope_theta and rope_scaling inside of it.

    As in transformers: a scaling goes before rope_parameters, and the others fill in what these lack.
    """
    scaling, parameters = entries.pop("rope_scaling", None), entries.get("rope_parameters")
    parameters = scaling or parameters
    others = {name: entries.pop(name, None) for name in ("rope_theta", _SHARE)}
    others = {name: value for name, value in others.items() if value is not None}
    if isinstance(parameters, Mapping) or (parameters is None and others):
        parameters = {**others, **(parameters or {"rope_type": "default"})}
    return entries if parameters is None else {**entries, "rope_parameters": parameters}
