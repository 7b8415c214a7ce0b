"""Losses on packed tokens: logits of tokens without a label are never made."""

from __future__ import annotations

import torch

from fastbert.backend import Backend, register, select
from fastbert.ops import _torch
from fastbert.ops._checks import check_devices, int32_offsets
from fastbert.ops._library import needs_grad, triton_objection
from fastbert.ops.linear import linear, supports_gemm_cpu


def _supports_triton(x, weight, bias, labels) -> str | None:
    for t in (weight, bias):
        if t is not None and t.dtype is not x.dtype and not torch.is_autocast_enabled(x.device.type):
            return f"a weight is {t.dtype}, hidden_states are {x.dtype}"
    return triton_objection(x)


register("cross_entropy", Backend.CPU, lambda x, weight, *others: supports_gemm_cpu(x, weight))
register("cross_entropy", Backend.TRITON, _supports_triton)

at_least_fp32 = _torch.at_least_fp32


class _CrossEntropy(torch.autograd.Function):
    """Gradients are made with the loss, while the logits are there; backward scales them."""

    @staticmethod
    def forward(ctx, hidden_states, weight, bias, labels, ignore_index, label_smoothing, z_loss):
        loss, *gradients = torch.ops.fastbert.cross_entropy_triton(
            hidden_states, weight, bias, labels, ignore_index, label_smoothing, z_loss, True
        )
        ctx.save_for_backward(*gradients)
        ctx.has_bias = bias is not None
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dloss):
        dhidden, dweight, dbias = (g * dloss.to(g.dtype) for g in ctx.saved_tensors)
        return dhidden, dweight, dbias if ctx.has_bias else None, None, None, None, None


def cross_entropy(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    *,
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    backend: str | None = None,
) -> torch.Tensor:
    """Mean cross-entropy of softmax(hidden_states weight^T + bias) over the tokens whose label is not `ignore_index`.

    Args:
        hidden_states: (total_tokens, hidden_size); weight: (num_classes, hidden_size); bias: (num_classes,).
        labels: int64 (total_tokens,).
        ignore_index: None where every token has a label: nobody looks for those that have, which is a wait on a GPU.
        label_smoothing: of the target, towards all classes (Szegedy et al. 2016, section 7).
        z_loss: this times the mean of (log sum exp)^2 is added (Chowdhery et al. 2022, section 5).

    Returns:
        fp32 scalar, fp64 where that came in; 0, with zero gradients, when no token has a label (torch: NaN).

    Raises:
        ValueError: tensors on two devices. BackendError: the backend that was asked for cannot serve the call.
    """
    check_devices("cross_entropy", hidden_states=hidden_states, weight=weight, bias=bias, labels=labels)
    chosen = select("cross_entropy", backend, hidden_states, weight, bias, labels)
    if chosen is Backend.TRITON:
        dtype = _torch.compute_dtype(hidden_states)
        operands = (hidden_states.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype), labels)
        if needs_grad(*operands[:3]):
            return _CrossEntropy.apply(*operands, ignore_index, label_smoothing, z_loss)
        options = (ignore_index, label_smoothing, z_loss, False)
        return torch.ops.fastbert.cross_entropy_triton(*operands, *options)[0]
    if ignore_index is None:
        ignore_index = -100
    else:
        kept = (labels != ignore_index).nonzero().flatten()
        hidden_states, labels = hidden_states.index_select(0, kept), labels.index_select(0, kept)
    if chosen is Backend.CPU:
        logits = linear(hidden_states, weight, bias, backend="cpu")
    else:
        logits = _torch.product(hidden_states, weight, bias)
    return _torch.logits_cross_entropy(logits, labels, ignore_index, label_smoothing, z_loss)


def logits_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0
) -> torch.Tensor:
    """`cross_entropy` of logits that are wanted anyway: (n, num_classes), labels int64 (n,) -> fp32 scalar."""
    check_devices("logits_cross_entropy", logits=logits, labels=labels)
    return _torch.logits_cross_entropy(logits, labels, ignore_index, label_smoothing)


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
    return _torch.sequence_cross_entropy(logits, cu_seqlens, targets)
