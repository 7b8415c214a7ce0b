"""Losses on packed tokens: logits of tokens without a label are never made."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from fastbert.backend import Backend, register, select
from fastbert.ops._common import (
    Differentiable,
    Rule,
    at_least_fp32,
    check_devices,
    compute_dtype,
    define_triton,
    needs_grad,
    triton_unsupported,
)
from fastbert.ops.linear.linear import linear, supports_gemm_cpu
from fastbert.ops.linear.torch_backend import product
from fastbert.ops.packing import check_offsets_on_cpu, int32_offsets, token_sequences

# The loss over labelled tokens and, unless needs_grad is False, its gradients for a dloss of 1.


def _fake(hidden_states, weight, bias, labels, ignore_index, label_smoothing, z_loss, needs_grad):
    loss = hidden_states.new_empty((), dtype=torch.float32)
    empty = weight.new_empty(0)
    if not needs_grad:
        return loss, hidden_states.new_empty(0), empty, weight.new_empty(0)
    dbias = empty if bias is None else torch.empty_like(bias)
    return loss, torch.empty_like(hidden_states), torch.empty_like(weight), dbias


_CROSS_ENTROPY = define_triton(
    "cross_entropy",
    "(Tensor hidden_states, Tensor weight, Tensor? bias, Tensor labels, int ignore_index, float label_smoothing,"
    " float z_loss, bool needs_grad) -> (Tensor loss, Tensor dhidden_states, Tensor dweight, Tensor dbias)",
    "cross_entropy",
    _fake,
)


class CrossEntropyOptions(NamedTuple):
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0


def _logits_cross_entropy_torch(logits, labels, options):
    ignore_index, label_smoothing, z_loss = options
    logits = at_least_fp32(logits)
    total = F.cross_entropy(logits, labels, reduction="sum", ignore_index=ignore_index, label_smoothing=label_smoothing)
    if z_loss > 0:
        total = total + z_loss * (_log_sum_exp(logits).square() * (labels != ignore_index)).sum()
    return total / (labels != ignore_index).sum().clamp(min=1)


def _log_sum_exp(logits: torch.Tensor) -> torch.Tensor:
    """As torch's, whose gradient exp(x - log_sum_exp) loses what rounding takes of a large log_sum_exp."""
    row_max = logits.detach().amax(-1, keepdim=True)
    return row_max.squeeze(-1) + (logits - row_max).exp().sum(-1).log()


def _sequence_cross_entropy_torch(logits, cu_seqlens, targets):
    total_tokens, batch_size = logits.shape[0], cu_seqlens.shape[0] - 1
    check_offsets_on_cpu("sequence_cross_entropy", cu_seqlens, total_tokens)
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    kept = (targets >= 0) & (targets < lengths)
    if total_tokens == 0:
        return at_least_fp32(logits).sum()
    logits = at_least_fp32(logits)
    sequence, inside = token_sequences(cu_seqlens, total_tokens)
    logits = torch.where(inside, logits, -math.inf)
    largest = logits.new_zeros(batch_size).scatter_reduce(0, sequence, logits.detach(), "amax", include_self=False)
    largest = largest.where(lengths > 0, 0.0)  # padding rows count for the last sequence, and -inf less -inf is NaN
    total = logits.new_zeros(batch_size).index_add(0, sequence, (logits - largest[sequence]).exp())
    chosen = (cu_seqlens[:-1].long() + targets).clamp(0, total_tokens - 1)
    # The log of an empty sequence's zero total is never used: it is replaced before, so no gradient is NaN.
    # The difference of the logits first: what they have in common would take the digits of the small logarithm.
    losses = torch.where(kept, total, 1.0).log() + (largest - logits.index_select(0, chosen))
    return torch.where(kept, losses, 0.0).sum() / kept.sum().clamp(min=1)


def _supports_triton(x, weight, bias, labels) -> str | None:
    for t in (weight, bias):
        if t is not None and t.dtype is not x.dtype and not torch.is_autocast_enabled(x.device.type):
            return f"a weight is {t.dtype}, hidden_states are {x.dtype}"
    return triton_unsupported(x)


register("cross_entropy", Backend.CPU, lambda x, weight, *others: supports_gemm_cpu(x, weight))
register("cross_entropy", Backend.TRITON, _supports_triton)


class _Call(NamedTuple):
    """dtype: of the products; input_dtypes: of hidden_states, weight and bias, which autocast casts."""

    options: CrossEntropyOptions
    dtype: torch.dtype
    input_dtypes: tuple[torch.dtype, ...]


def _launch(call, hidden_states, weight, bias, labels, needs_grad):
    floats = (None if t is None else t.to(call.dtype) for t in (hidden_states, weight, bias))
    return _CROSS_ENTROPY(*floats, labels, *call.options, needs_grad)


def _forward(backend, call, *operands):
    """Gradients are made with the loss, while the logits are there; backward scales them."""
    loss, *gradients = _launch(call, *operands, True)
    return loss, gradients


def _backward(backend, call, needed, saved, dloss):
    scale = dloss.to(call.dtype)
    return *(_scaled(gradient, scale, dtype) for gradient, dtype in zip(saved, call.input_dtypes, strict=True)), None


def _scaled(gradient, scale, dtype):
    """In another dtype without a tensor between, which is a table's worth of memory."""
    if gradient.dtype is dtype:
        return gradient * scale
    return torch.mul(gradient, scale, out=torch.empty_like(gradient, dtype=dtype))


_RULE = Rule(_forward, _backward)


def cross_entropy(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    backend: str | None = None,
) -> torch.Tensor:
    """Mean cross-entropy of softmax(hidden_states weight^T + bias) over the tokens whose label is not `ignore_index`.

    Args:
        hidden_states: (total_tokens, hidden_size); weight: (num_classes, hidden_size); bias: (num_classes,).
        labels: int64 (total_tokens,).
        ignore_index: tokens with this label take no part in the mean. On a GPU they cost as much as the others, since
            looking for them would be a wait, and their hidden states must be numbers: pick those that have a label
            before, if few have.
        label_smoothing: of the target, towards all classes (Szegedy et al. 2016, section 7).
        z_loss: this times the mean of (log sum exp)^2 is added (Chowdhery et al. 2022, section 5).

    Returns:
        fp32 scalar, fp64 where that came in; 0, with zero gradients, when no token has a label (torch: NaN).

    Raises:
        ValueError: tensors on two devices. BackendError: the backend that was asked for cannot serve the call.
    """
    check_devices("cross_entropy", hidden_states=hidden_states, weight=weight, bias=bias, labels=labels)
    options = CrossEntropyOptions(ignore_index, label_smoothing, z_loss)
    chosen = select("cross_entropy", backend, hidden_states, weight, bias, labels)
    if chosen is Backend.TRITON:
        input_dtypes = tuple([(weight if t is None else t).dtype for t in (hidden_states, weight, bias)])
        call, operands = _Call(options, compute_dtype(hidden_states), input_dtypes), (hidden_states, weight, bias)
        labels = labels.contiguous()
        if needs_grad(*operands):
            return Differentiable.apply(_RULE, chosen, call, *operands, labels)
        return _launch(call, *operands, labels, False)[0]
    if hidden_states.device.type == "cpu":
        kept = (labels != ignore_index).nonzero().flatten()
        hidden_states, labels = hidden_states.index_select(0, kept), labels.index_select(0, kept)
    if chosen is Backend.CPU:
        logits = linear(hidden_states, weight, bias, backend="cpu")
    else:
        logits = product(hidden_states, weight, bias)
    return _logits_cross_entropy_torch(logits, labels, options)


def logits_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0
) -> torch.Tensor:
    """`cross_entropy` of logits that are wanted anyway: (n, num_classes), labels int64 (n,) -> fp32 scalar."""
    check_devices("logits_cross_entropy", logits=logits, labels=labels)
    return _logits_cross_entropy_torch(logits, labels, CrossEntropyOptions(ignore_index, label_smoothing))


def sequence_cross_entropy(logits: torch.Tensor, cu_seqlens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean over sequences of the cross-entropy of a softmax over the tokens of each (BERT's span loss, section 4.2).

    Args:
        logits: (total_tokens,); targets: int64 (batch,), the position of the right token within its sequence.

    Returns:
        fp32 scalar; sequences whose target is outside of them are left out; 0 when all are.

    Raises:
        ValueError: tensors on two devices, a cu_seqlens of another dtype or shape, or, on a CPU, offsets that do not
            fit the tokens.
    """
    check_devices("sequence_cross_entropy", logits=logits, cu_seqlens=cu_seqlens, targets=targets)
    cu_seqlens = int32_offsets("sequence_cross_entropy", cu_seqlens)
    return _sequence_cross_entropy_torch(logits, cu_seqlens, targets)
