"""Norms: the leaves that families have, ours and transformers', and what the ops take of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastbert import ops
from fastbert.layer_spec import NormSpec, NormType
from fastbert.layers.leaves import is_plain


class ZeroCenteredRMSNorm(nn.RMSNorm):
    """RMSNorm by 1 + weight, which begins at 0: NormSpec's "zero_centered_rms"."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, _, eps = norm_weights(self)
        rows: Any = ops.add_rms_norm(x.reshape(-1, x.shape[-1]), None, weight, eps=eps, zero_centered_weight=True)
        return rows.view(x.shape)  # type: ignore[no-any-return]


def make_norm(spec: NormSpec, width: int) -> nn.Module:
    if spec.type == "zero_centered_rms":
        return ZeroCenteredRMSNorm(width, eps=spec.eps)
    if spec.type == "rms":
        return nn.RMSNorm(width, eps=spec.eps)
    return nn.LayerNorm(width, eps=spec.eps, bias=spec.bias)


def norm_type_of(module: nn.Module) -> NormType | None:
    """As in NormSpec, where a norm's weight, bias and eps describe all that calling it does, else None.

    The bias may be None, the weight not: ops take one of None for no norm at all.
    """
    if is_plain(module, nn.LayerNorm):
        return None if module.weight is None else "layer"
    if is_hf_class(module, "DebertaLayerNorm"):  # DeBERTa's, of its first version
        return "layer"
    if is_plain(module, ZeroCenteredRMSNorm) or is_hf_class(module, "Gemma3RMSNorm"):
        return None if module._parameters["weight"] is None else "zero_centered_rms"
    if not is_plain(module, nn.RMSNorm) and not is_hf_class(module, "RMSNorm"):
        return None
    return None if module._parameters["weight"] is None else "rms"


def is_hf_class(module: nn.Module, ending: str) -> bool:
    """Whether it is a plain norm of transformers, which has classes of its own that compute just what `ending` says:
    one of RMSNorm for every family (all but Gemma's are LlamaRMSNorm's text), and DebertaLayerNorm.
    """
    cls = type(module)
    is_hf = cls.__name__.endswith(ending) and cls.__module__.startswith("transformers.models.")
    return is_hf and is_plain(module, cls)


def norm_weights(norm: nn.Module) -> ops.NormWeights:
    """Those of a norm that norm_type_of knows."""
    parameters, attributes = norm._parameters, norm.__dict__
    weight = parameters["weight"]
    assert weight is not None
    eps = attributes["variance_epsilon"] if "variance_epsilon" in attributes else attributes["eps"]
    return ops.NormWeights(weight, parameters.get("bias"), torch.finfo(weight.dtype).eps if eps is None else eps)
