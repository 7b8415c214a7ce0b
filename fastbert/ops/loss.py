"""Losses on packed tokens: logits of tokens without a label are never made."""

from __future__ import annotations

import torch

from fastbert.backend import Backend, register, select
from fastbert.ops import _torch
from fastbert.ops.linear import linear, supports_gemm_cpu

register("cross_entropy", Backend.CPU, lambda x, weight, *others: supports_gemm_cpu(x, weight))

at_least_fp32 = _torch.at_least_fp32


def cross_entropy(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    backend: str | None = None,
) -> torch.Tensor:
    """Mean cross-entropy of softmax(hidden_states weight^T + bias) over the tokens whose label is not `ignore_index`.

    Args:
        hidden_states: (total_tokens, hidden_size); weight: (num_classes, hidden_size); bias: (num_classes,).
        labels: int64 (total_tokens,).

    Returns:
        fp32 scalar, fp64 where that came in; 0, with zero gradients, when no token has a label (torch: NaN).
    """
    if select("cross_entropy", backend, hidden_states, weight, bias, labels) is Backend.CPU:
        kept = (labels != ignore_index).nonzero().flatten()
        logits = linear(hidden_states.index_select(0, kept), weight, bias, backend="cpu")
        return _torch.logits_cross_entropy(logits, labels.index_select(0, kept), ignore_index, label_smoothing)
    return _torch.cross_entropy(hidden_states, weight, bias, labels, ignore_index, label_smoothing)


def logits_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0
) -> torch.Tensor:
    """`cross_entropy` of logits that are wanted anyway: (n, num_classes), labels int64 (n,) -> fp32 scalar."""
    return _torch.logits_cross_entropy(logits, labels, ignore_index, label_smoothing)


def sequence_cross_entropy(logits: torch.Tensor, cu_seqlens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean over sequences of the cross-entropy of a softmax over the tokens of each (BERT's span loss, section 4.2).

    Args:
        logits: (total_tokens,); targets: int64 (batch,), the position of the right token within its sequence.

    Returns:
        fp32 scalar; sequences whose target is outside of them are left out; 0 when all are.
    """
    return _torch.sequence_cross_entropy(logits, cu_seqlens, targets)
