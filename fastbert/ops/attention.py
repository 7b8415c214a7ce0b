"""Bidirectional varlen attention over packed sequences (Vaswani et al. 2017, section 3.2.1, eq. 1)."""

from __future__ import annotations

import math

import torch

from fastbert.backend import Backend, register, select
from fastbert.ops import _torch
from fastbert.ops._checks import check_devices, int32_offsets
from fastbert.ops._library import extension_error, needs_grad, triton_objection
from fastbert.ops.rotary import Pair, check_rotary, rotate

Window = tuple[int, int]
UNLIMITED: Window = (-1, -1)


def _supports_common(q, k, v) -> str | None:
    for name, t in (("k", k), ("v", v)):
        if t.dtype != q.dtype:
            return f"{name} is {t.dtype}, q is {q.dtype}"
        if t.shape != q.shape:
            return f"{name} has shape {tuple(t.shape)}, q {tuple(q.shape)}"
    if q.dim() != 3:
        return f"q has {q.dim()} dimensions, the kernels take (total_tokens, num_heads, head_dim)"
    if not 2 <= q.shape[-1] <= 256:  # 1: what its rounded output costs the fp32 gradients has nothing to drown in
        return f"head_dim is {q.shape[-1]} (has 2 to 256)"
    return None


def _supports_cpu(q, k, v, window_size=UNLIMITED) -> str | None:
    if q.device.type != "cpu":
        return f"tensors are on {q.device.type}"
    if q.dtype not in (torch.float32, torch.bfloat16):
        return f"dtype {q.dtype} (has float32 and bfloat16)"
    if window_size != UNLIMITED:
        return f"window_size is {window_size} (has no windows)"
    return _supports_common(q, k, v) or extension_error()


def _supports_triton(q, k, v, window_size=UNLIMITED) -> str | None:
    return triton_objection(q) or _supports_common(q, k, v)


def _scale(op: str, q: torch.Tensor, softmax_scale: float | None) -> float:
    if softmax_scale is None:
        return q.shape[-1] ** -0.5
    if not math.isfinite(softmax_scale):  # some products take NaN for 1
        raise ValueError(f"{op}: softmax_scale is {softmax_scale}, it must be finite")
    return softmax_scale


def _probe(x, vector):
    return (x[:, None],) * 3


register("attention", Backend.CPU, _supports_cpu, probe=_probe)
register("attention", Backend.TRITON, _supports_triton, probe=_probe)


def _tile(head_dim: int, max_seqlen: int, is_fp32: bool) -> int:
    """Tokens of a sequence that a Triton program takes: all of a short one in one go, else what registers hold.

    Comparisons only, so that a traced length is guarded by them alone.
    """
    largest = 128 if head_dim <= 64 else 64 if head_dim <= 128 else 32
    if is_fp32:
        largest = 32 if head_dim <= 64 else 16
    tile = 16
    while tile < largest and tile < max_seqlen:
        tile *= 2
    return tile


def _tiles(cu_seqlens: torch.Tensor, total_tokens: int, tile: int, cache: dict | None) -> torch.Tensor:
    """The list of tiles of a batch, made once for all layers."""
    tiles = None if cache is None else cache.get(("triton_tiles", tile))
    if tiles is None:
        tiles = torch.ops.fastbert.attention_tiles_triton(cu_seqlens, total_tokens, tile)
        if cache is not None:
            cache["triton_tiles", tile] = tiles
    return tiles


class _Attention(torch.autograd.Function):
    """Autograd around the registered forward and backward; probabilities are recomputed from softmax_stats.

    `where`: cu_seqlens (cpu), or the tiles (triton), whose own arguments `tile` and `window` are empty otherwise.
    cos, sin: q and k are rotated here, so that the gradients are, too, where attention's backward has put them.
    """

    @staticmethod
    def forward(ctx, q, k, v, where, philox, cos, sin, backend, tile, softmax_scale, dropout_p, window):
        if cos is not None:
            q, k = torch.ops.fastbert.rotary_triton(q, k, cos, sin, where, *tile)
        out, softmax_stats = _FWD[backend](q, k, v, where, philox, *tile, softmax_scale, dropout_p, *window, True)
        ctx.save_for_backward(q, k, v, out, softmax_stats, where, philox, cos, sin)
        ctx.options = (backend, tile, softmax_scale, dropout_p, window)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        q, k, v, out, softmax_stats, where, philox, cos, sin = ctx.saved_tensors
        backend, tile, softmax_scale, dropout_p, window = ctx.options
        operands = (dout, q, k, v, out, softmax_stats, where, philox, *tile, softmax_scale, dropout_p, *window)
        if backend is Backend.TRITON:
            gradients = torch.ops.fastbert.attention_bwd_triton(*operands, cos, sin).unbind(1)
        else:
            gradients = torch.ops.fastbert.attention_bwd_cpu(*operands)
        return *gradients, *(None,) * 9


_FWD = {
    Backend.CPU: torch.ops.fastbert.attention_fwd_cpu,
    Backend.TRITON: torch.ops.fastbert.attention_fwd_triton,
}


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    *,
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
    window_size: Window = UNLIMITED,
    rotary: Pair | None = None,
    cache: dict | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """softmax(q k^T * softmax_scale) v within each sequence; softmax in fp32.

    Args:
        q, k, v: (total_tokens, num_heads, head_dim).
        cu_seqlens: int32 (batch + 1,), the offsets of the sequences (int64 is converted); rows beyond cu_seqlens[-1]
            are slack.
        max_seqlen: an upper bound of the sequence lengths, known on the host.
        softmax_scale: finite; default 1 / sqrt(head_dim).
        dropout_p: probability of dropping an attention probability after the softmax.
        window_size: (left, right), how far before and behind itself a query sees keys; -1 = unlimited (Beltagy et al.
            2020, section 3.1).
        rotary: (cos, sin), fp32, each (max_positions, head_dim // 2): q and k, not v, are rotated by their tokens'
            positions in the sequences (Su et al. 2021, section 3.4.2), dimension i with dimension head_dim // 2 + i as
            in GPT-NeoX, in fp32, and rounded to q's dtype. The tables take no gradient.
        cache: a dict that lives as long as the batch; a backend keeps there what it derives from cu_seqlens, so that
            the layers of one forward pass derive it once.
        backend: None follows `use_backend`; a name forces that backend for this call.

    Returns:
        (total_tokens, num_heads, head_dim); zeros in slack rows. No sequence sees another, bit for bit.

    Raises:
        ValueError: tensors on two devices, a cu_seqlens of another dtype or shape, or a softmax_scale that is not
            finite; on a CPU (there RuntimeError or IndexError, too) offsets that do not fit the tokens; of rotary, an
            odd head_dim, or tables of another shape, dtype or device, that require a gradient, or with fewer positions
            than max_seqlen.
        BackendError: the backend that was asked for cannot serve the call.
    """
    check_devices("attention", q=q, k=k, v=v, cu_seqlens=cu_seqlens)
    cu_seqlens = int32_offsets("attention", cu_seqlens)
    if rotary is not None:
        check_rotary(q, rotary, max_seqlen)
    softmax_scale = _scale("attention", q, softmax_scale)
    if torch.is_autocast_enabled(q.device.type) and q.dtype is not torch.float64:
        q, k, v = (t.to(torch.get_autocast_dtype(q.device.type)) for t in (q, k, v))  # as autocast does for SDPA
    chosen = select("attention", backend, q, k, v, window_size)
    if rotary is not None and chosen is not Backend.TRITON:
        q, k = rotate(q, k, rotary, cu_seqlens, cache)
    if chosen is Backend.TORCH:
        return _torch.attention(q, k, v, cu_seqlens, max_seqlen, softmax_scale, dropout_p, window_size, cache)
    philox = torch.randint(2**62, (2,), dtype=torch.int64, device=q.device) if dropout_p > 0 else None
    where, tile, window, cos, sin = cu_seqlens, [], [], None, None
    if chosen is Backend.TRITON:
        size = _tile(q.shape[-1], max_seqlen, q.dtype is torch.float32)
        where, tile, window = _tiles(cu_seqlens, q.shape[0], size, cache), [size], [window_size]
        if rotary is not None:
            cos, sin = (t if t.stride(1) == 1 else t.contiguous() for t in rotary)
    if needs_grad(q, k, v):
        return _Attention.apply(q, k, v, where, philox, cos, sin, chosen, tile, softmax_scale, dropout_p, window)
    if cos is not None:
        q, k = torch.ops.fastbert.rotary_triton(q, k, cos, sin, where, *tile)
    return _FWD[chosen](q, k, v, where, philox, *tile, softmax_scale, dropout_p, *window, False)[0]


def attention_probs(
    q: torch.Tensor,
    k: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    *,
    softmax_scale: float | None = None,
    rotary: Pair | None = None,
) -> torch.Tensor:
    """The probabilities that `attention` never writes down, for `output_attentions=True`; before dropout.

    Arguments as of `attention`. Returns (batch, num_heads, max_seqlen, max_seqlen); zeros at query and key slots beyond
    a sequence's length. Raises ValueError as `attention` does.
    """
    check_devices("attention_probs", q=q, k=k, cu_seqlens=cu_seqlens)
    cu_seqlens = int32_offsets("attention_probs", cu_seqlens)
    if rotary is not None:
        check_rotary(q, rotary, max_seqlen)
        q, k = rotate(q, k, rotary, cu_seqlens)
    softmax_scale = _scale("attention_probs", q, softmax_scale)
    return _torch.attention_probs(q, k, cu_seqlens, max_seqlen, softmax_scale)
