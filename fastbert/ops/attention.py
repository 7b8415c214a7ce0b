"""Bidirectional varlen attention over packed sequences (Vaswani et al. 2017, section 3.2.1, eq. 1)."""

from __future__ import annotations

import torch

from fastbert.backend import Backend, register, select
from fastbert.ops import _torch
from fastbert.ops._library import extension_error, needs_grad

_FWD = torch.ops.fastbert.attention_fwd_cpu
_BWD = torch.ops.fastbert.attention_bwd_cpu


def _supports_cpu(q, k, v) -> str | None:
    if q.device.type != "cpu":
        return f"tensors are on {q.device.type}"
    if q.dtype not in (torch.float32, torch.bfloat16):
        return f"dtype {q.dtype} (has float32 and bfloat16)"
    for name, t in (("k", k), ("v", v)):
        if t.device != q.device:
            return f"{name} is on {t.device}, q on {q.device}"
        if t.dtype != q.dtype:
            return f"{name} is {t.dtype}, q is {q.dtype}"
        if t.shape != q.shape:
            return f"{name} has shape {tuple(t.shape)}, q {tuple(q.shape)}"
    if q.dim() != 3:
        return f"q has {q.dim()} dimensions, the kernels take (total_tokens, num_heads, head_dim)"
    if not 2 <= q.shape[-1] <= 256:  # 1: what its rounded output costs the fp32 gradients has nothing to drown in
        return f"head_dim is {q.shape[-1]} (has 2 to 256)"
    return extension_error()


register("attention", Backend.CPU, _supports_cpu, probe=lambda x, vector: (x[:, None],) * 3)


class _Attention(torch.autograd.Function):
    """Autograd around the registered forward and backward; probabilities are recomputed from softmax_stats."""

    @staticmethod
    def forward(ctx, q, k, v, cu_seqlens, philox, softmax_scale, dropout_p):
        out, softmax_stats = _FWD(q, k, v, cu_seqlens, philox, softmax_scale, dropout_p, True)
        ctx.save_for_backward(q, k, v, out, softmax_stats, cu_seqlens, philox)
        ctx.options = (softmax_scale, dropout_p)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        q, k, v, out, softmax_stats, cu_seqlens, philox = ctx.saved_tensors
        dq, dk, dv = _BWD(dout, q, k, v, out, softmax_stats, cu_seqlens, philox, *ctx.options)
        return dq, dk, dv, None, None, None, None


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    *,
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
    cache: dict | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """softmax(q k^T * softmax_scale) v within each sequence; softmax in fp32.

    Args:
        q, k, v: (total_tokens, num_heads, head_dim).
        cu_seqlens: int32 (batch + 1,), the offsets of the sequences; rows beyond cu_seqlens[-1] are slack.
        max_seqlen: an upper bound of the sequence lengths, known on the host.
        softmax_scale: default 1 / sqrt(head_dim).
        dropout_p: probability of dropping an attention probability after the softmax.
        cache: a dict that lives as long as the batch; a backend keeps there what it derives from cu_seqlens, so that
            the layers of one forward pass derive it once.
        backend: None follows `use_backend`; a name forces that backend for this call.

    Returns:
        (total_tokens, num_heads, head_dim); zeros in slack rows. No sequence sees another, bit for bit.
    """
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5
    if torch.is_autocast_enabled(q.device.type) and q.dtype is not torch.float64:
        q, k, v = (t.to(torch.get_autocast_dtype(q.device.type)) for t in (q, k, v))  # as autocast does for SDPA
    if select("attention", backend, q, k, v) is Backend.TORCH:
        return _torch.attention(q, k, v, cu_seqlens, max_seqlen, softmax_scale, dropout_p, cache)
    philox = torch.randint(2**62, (2,), dtype=torch.int64, device=q.device) if dropout_p > 0 else None
    if needs_grad(q, k, v):
        return _Attention.apply(q, k, v, cu_seqlens, philox, softmax_scale, dropout_p)
    return _FWD(q, k, v, cu_seqlens, philox, softmax_scale, dropout_p, False)[0]


def attention_probs(
    q: torch.Tensor,
    k: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    *,
    softmax_scale: float | None = None,
) -> torch.Tensor:
    """The probabilities that `attention` never writes down, for `output_attentions=True`; before dropout.

    Returns (batch, num_heads, max_seqlen, max_seqlen); zeros at query and key slots beyond a sequence's length.
    """
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5
    return _torch.attention_probs(q, k, cu_seqlens, max_seqlen, softmax_scale)
