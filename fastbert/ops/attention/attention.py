"""Bidirectional varlen attention over packed sequences (Vaswani et al. 2017, section 3.2.1, eq. 1)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from fastbert.backend import Backend, register, select
from fastbert.native.availability import extension_error
from fastbert.ops._common import (
    Differentiable,
    Rule,
    check_devices,
    define,
    define_triton,
    needs_grad,
    triton_unsupported,
)
from fastbert.ops.attention.relative import Relative, check_relative
from fastbert.ops.attention.relative_cpu import attention_relative_cpu
from fastbert.ops.attention.relative_triton import attention_relative_triton
from fastbert.ops.attention.rotary import Rotary, check_rotary, rotary_triton, rotate
from fastbert.ops.attention.tiles import tiles_of
from fastbert.ops.attention.torch_backend import attention_from_probs_torch, attention_probs_torch, attention_torch
from fastbert.ops.packing import int32_offsets
from fastbert.ops.seeds import draw_seeds

Window = tuple[int, int]
UNLIMITED: Window = (-1, -1)

# out, (total_tokens, num_heads, head_dim): dropout(softmax(q k^T * softmax_scale)) v within each sequence
# softmax_stats, fp32 (2, num_heads, total_tokens): each query's row_max, of q k^T, and row_sum, of
#   exp(softmax_scale * (q k^T - row_max)); two numbers, for their log-sum-exp in fp32 loses digits of large scores
#
# philox is int64 (2,) = [seed, offset] on q's device, read only when dropout_p > 0; softmax_stats is (0, num_heads,
# total_tokens) unless return_stats. Results are contiguous whatever the strides of q, k and v, and zeros in padding
# rows. q, k, dq and dk are those before the rotation by cos and sin.

_FORM = (
    "Tensor? window_positions, Tensor? num_keys, Tensor? cos, Tensor? sin, float softmax_scale, float dropout_p,"
    " int window_left, int window_right, bool interleaved, bool by_token"
)
_FWD_CPU_SCHEMA = (
    f"(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, Tensor? philox, {_FORM}, bool return_stats)"
    " -> (Tensor out, Tensor softmax_stats)"
)
_BWD_CPU_SCHEMA = (
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_stats, Tensor cu_seqlens, Tensor? philox,"
    f" {_FORM}) -> (Tensor dq, Tensor dk, Tensor dv)"
)


def _fwd_fake(q, *others):
    tokens, num_heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(2 if others[-1] else 0, num_heads, tokens, dtype=torch.float32)


def _bwd_fake(dout, q, k, v, *others):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


_FWD_CPU = define("attention_fwd_cpu", _FWD_CPU_SCHEMA, _fwd_fake)
_BWD_CPU = define("attention_bwd_cpu", _BWD_CPU_SCHEMA, _bwd_fake)

# The Triton kernels take the list of tiles instead, which is made once a batch and has num_keys in it: int32
# (num_tiles, 8), of `tile` tokens each. window_size: (left, right), -1 = unlimited. Statistics are of scores times the
# sign of softmax_scale. The gradients stand beside each other, (total_tokens, the heads of q, k and v, head_dim), as
# the merged projection's backward wants them; with cos and sin they are those of q and k before `rotary`.

_FWD_TRITON_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor tiles, Tensor? philox, Tensor? window_positions, int tile,"
    " float softmax_scale, float dropout_p, SymInt[] window_size, bool return_stats)"
    " -> (Tensor out, Tensor softmax_stats)"
)
_BWD_TRITON_SCHEMA = (
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_stats, Tensor tiles, Tensor? philox,"
    " Tensor? window_positions, int tile, float softmax_scale, float dropout_p, SymInt[] window_size, Tensor? cos,"
    " Tensor? sin, bool interleaved, bool by_token) -> Tensor dqkv"
)


def _bwd_triton_fake(dout, q, k, *others):
    total_tokens, num_heads, head_dim = q.shape
    return q.new_empty(total_tokens, num_heads + 2 * k.shape[1], head_dim)


_FWD_TRITON = define_triton("attention_fwd", _FWD_TRITON_SCHEMA, "attention_fwd", _fwd_fake)
_BWD_TRITON = define_triton("attention_bwd", _BWD_TRITON_SCHEMA, "attention_bwd", _bwd_triton_fake)


class AttentionOptions(NamedTuple):
    softmax_scale: float
    dropout_p: float = 0.0
    window_size: Window = UNLIMITED
    interleaved: bool = False  # of Rotary
    by_token: bool = False
    tile: int = 0  # of the Triton kernels: see `_tile`
    has_relative: bool = False
    has_num_keys: bool = False


def _supports_cpu(q, k, v, options) -> str | None:
    if q.device.type != "cpu":
        return f"tensors are on {q.device.type}"
    if q.dtype not in (torch.float32, torch.bfloat16):
        return f"dtype {q.dtype} (has float32 and bfloat16)"
    return _head_dim_unsupported(q) or extension_error()


def _supports_triton(q, k, v, options) -> str | None:
    largest = 64 if q.dtype is torch.float32 else 128  # what registers hold
    if options.has_relative and options.has_num_keys:
        return "relative terms beside num_keys"
    if options.has_relative and q.shape[-1] > largest:
        return f"relative terms in {q.dtype} with a head_dim of {q.shape[-1]} (has 2 to {largest})"
    return triton_unsupported(q) or _head_dim_unsupported(q)


def _head_dim_unsupported(q) -> str | None:
    if not 2 <= q.shape[-1] <= 256:  # 1: what its rounded output costs the fp32 gradients has nothing to drown in
        return f"head_dim is {q.shape[-1]} (has 2 to 256)"
    return None


def _check_heads(op: str, q: torch.Tensor, **keys: torch.Tensor) -> None:
    if q.dim() != 3:
        raise ValueError(f"{op}: q has shape {tuple(q.shape)}; it must be (total_tokens, num_heads, head_dim)")
    total_tokens, num_heads, head_dim = q.shape
    for name, t in keys.items():
        if t.dim() != 3 or t.shape[0] != total_tokens or t.shape[2] != head_dim:
            raise ValueError(
                f"{op}: {name} has shape {tuple(t.shape)}; it must be (total_tokens, num_kv_heads, head_dim) ="
                f" ({total_tokens}, num_kv_heads, {head_dim})"
            )
        num_kv_heads = t.shape[1]
        if num_heads % num_kv_heads if num_kv_heads else num_heads:
            raise ValueError(f"{op}: q has {num_heads} heads, which the {num_kv_heads} of {name} do not divide")
        if num_kv_heads != keys["k"].shape[1]:
            raise ValueError(f"{op}: k has {keys['k'].shape[1]} heads, {name} has {num_kv_heads}")


def _check_window(op: str, q: torch.Tensor, window_size: Window, window_positions: torch.Tensor | None) -> None:
    if len(window_size) != 2 or min(window_size) < -1:
        raise ValueError(f"{op}: window_size is {window_size}; it must be (left, right), -1 for a side without end")
    if window_positions is None:
        return
    if window_positions.dtype is not torch.int32 or window_positions.shape != q.shape[:1]:
        raise ValueError(
            f"{op}: window_positions is {window_positions.dtype} of shape {tuple(window_positions.shape)};"
            f" it must be torch.int32 of shape (total_tokens,) = ({q.shape[0]},)"
        )


def _check_num_keys(op: str, num_keys: torch.Tensor, cu_seqlens: torch.Tensor) -> None:
    batch = cu_seqlens.shape[0] - 1
    if num_keys.dtype is not torch.int32 or num_keys.shape != (batch,):
        raise ValueError(
            f"{op}: num_keys is {num_keys.dtype} of shape {tuple(num_keys.shape)}; it must be torch.int32 of shape"
            f" (batch,) = ({batch},)"
        )


def _scale(op: str, q: torch.Tensor, softmax_scale: float | None) -> float:
    if softmax_scale is None:
        return q.shape[-1] ** -0.5
    if not math.isfinite(softmax_scale):  # some products take NaN for 1
        raise ValueError(f"{op}: softmax_scale is {softmax_scale}, it must be finite")
    return softmax_scale


def _check_dtypes(op: str, q: torch.Tensor, **keys: torch.Tensor) -> None:
    for name, t in keys.items():
        if t.dtype != q.dtype:
            raise ValueError(f"{op}: {name} is {t.dtype}, q is {q.dtype}")


def _probe(x, vector):
    return *(x[:, None],) * 3, AttentionOptions(1.0)


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


def _form(options, window_positions, num_keys, cos, sin):
    """What the CPU's kernels take of the kind of attention: _FORM."""
    softmax_scale, dropout_p, window_size, interleaved, by_token, *_ = options
    return window_positions, num_keys, cos, sin, softmax_scale, dropout_p, *window_size, interleaved, by_token


def _launch(backend, options, q, k, v, where, philox, window_positions, num_keys, cos, sin, return_stats):
    """where: cu_seqlens (cpu), or the tiles (triton, of which num_keys, cos and sin have been used before)."""
    if backend is Backend.CPU:
        return _FWD_CPU(q, k, v, where, philox, *_form(options, window_positions, num_keys, cos, sin), return_stats)
    softmax_scale, dropout_p, window_size, _, _, tile, *_ = options
    return _FWD_TRITON(
        q, k, v, where, philox, window_positions, tile, softmax_scale, dropout_p, window_size, return_stats
    )


def _rotate_triton(options, q, k, tiles, cos, sin):
    if cos is None:
        return q, k
    return rotary_triton(q, k, cos, sin, tiles, options.tile, options.interleaved, options.by_token)


def _forward(backend, options, q, k, v, where, philox, window_positions, num_keys, cos, sin):
    """cos, sin: q and k are rotated here, so that the gradients are, too, where attention's backward has put them."""
    if backend is Backend.TRITON:
        q, k = _rotate_triton(options, q, k, where, cos, sin)
    out, softmax_stats = _launch(backend, options, q, k, v, where, philox, window_positions, num_keys, cos, sin, True)
    return out, (q, k, v, out, softmax_stats, where, philox, window_positions, num_keys, cos, sin)


def _backward(backend, options, needed, saved, dout):
    """Probabilities are recomputed from softmax_stats."""
    *operands, window_positions, num_keys, cos, sin = saved
    if backend is Backend.CPU:
        gradients = _BWD_CPU(dout, *operands, *_form(options, window_positions, num_keys, cos, sin))
    else:
        softmax_scale, dropout_p, window_size, interleaved, by_token, tile, *_ = options
        dqkv = _BWD_TRITON(
            dout,
            *operands,
            window_positions,
            tile,
            softmax_scale,
            dropout_p,
            window_size,
            cos,
            sin,
            interleaved,
            by_token,
        )
        num_heads, num_kv_heads = operands[0].shape[1], operands[1].shape[1]
        gradients = dqkv.split((num_heads, num_kv_heads, num_kv_heads), 1)
    return *gradients, None, None, None, None, None, None


_RULE = Rule(_forward, _backward)


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
    window_positions: torch.Tensor | None = None,
    num_keys: torch.Tensor | None = None,
    rotary: Rotary | None = None,
    relative: Relative | None = None,
    cache: dict | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """softmax(q k^T * softmax_scale) v within each sequence; softmax in fp32.

    Args:
        q: (total_tokens, num_heads, head_dim).
        k, v: (total_tokens, num_kv_heads, head_dim); query head h reads head h // (num_heads // num_kv_heads) of them
            (Ainslie et al. 2023, "GQA", section 2.2).
        cu_seqlens: int32 (batch + 1,), the offsets of the sequences (int64 is converted); rows beyond cu_seqlens[-1]
            are padding.
        max_seqlen: an upper bound of the sequence lengths, known on the host.
        softmax_scale: finite; default 1 / sqrt(head_dim).
        dropout_p: probability of dropping an attention probability after the softmax.
        window_size: (left, right), how far before and behind itself a query sees keys; -1 = unlimited (Beltagy et al.
            2020, section 3.1).
        window_positions: int32 (total_tokens,), ascending in each sequence: a query sees a key where
            -left <= position of the key - position of the query <= right. Default: their places 0, 1, 2... in the
            sequence. Padded columns, by which transformers counts, are others where a mask has holes.
        num_keys: int32 (batch,): the first so many tokens of each sequence are keys, and the others are queries alone:
            they attend, and nothing attends to them, as to those that ColBERT expands queries by (Khattab & Zaharia
            2020, section 3.2). Default: all tokens. The result of a query that sees no key is 0.
        rotary: q and k, not v, are rotated (Su et al. 2021, section 3.4.2), in fp32, and rounded to q's dtype: by
            tables of at least max_seqlen rows, a token's row being its place in its sequence, or by a row for each
            token. The tables take no gradient.
        relative: terms of the scores that go by the distance of a query and a key, and not beside `rotary`. The tables
            take gradients.
        cache: a dict that lives as long as the batch; a backend keeps there what it derives from cu_seqlens and
            num_keys, so that the layers of one forward pass derive it once.
        backend: None follows `use_backend`; a name forces that backend for this call.

    Returns:
        (total_tokens, num_heads, head_dim); zeros in padding rows. No sequence sees another, bit for bit.

    Raises:
        ValueError: tensors on two devices, of two dtypes, or of shapes that do not fit; heads of k that do not divide
            those of q; a cu_seqlens, window_positions or num_keys of another dtype or shape; a softmax_scale that is
            not finite; a window_size below -1; on a CPU (there RuntimeError or IndexError, too) offsets that do not fit
            the tokens, positions that do not ascend, and more keys than tokens; of rotary, an odd head_dim, or tables
            of another shape, dtype or device, that require a gradient, or with fewer positions than max_seqlen; of
            relative, tables that do not fit q, or rows for shorter sequences.
        BackendError: the backend that was asked for cannot serve the call.
    """
    check_devices(
        "attention", q=q, k=k, v=v, cu_seqlens=cu_seqlens, window_positions=window_positions, num_keys=num_keys
    )
    cu_seqlens = int32_offsets("attention", cu_seqlens)
    if not (k.shape == q.shape == v.shape and q.dim() == 3):
        _check_heads("attention", q, k=k, v=v)
    if window_size != UNLIMITED or window_positions is not None:
        _check_window("attention", q, window_size, window_positions)
        window_positions = None if max(window_size) < 0 else window_positions
    options = AttentionOptions(_scale("attention", q, softmax_scale), dropout_p, window_size)
    if num_keys is not None:
        _check_num_keys("attention", num_keys, cu_seqlens)
        options = options._replace(has_num_keys=True)
    if rotary is not None:
        check_rotary(q, rotary, max_seqlen)
        options = options._replace(interleaved=rotary.interleaved, by_token=rotary.by_token)
    if torch.is_autocast_enabled(q.device.type) and q.dtype is not torch.float64:
        q, k, v = (t.to(torch.get_autocast_dtype(q.device.type)) for t in (q, k, v))  # as autocast does for SDPA
        relative = None if relative is None else relative.to(q.dtype)
    if not (k.dtype is q.dtype is v.dtype):
        _check_dtypes("attention", q, k=k, v=v)
    if relative is not None:
        if rotary is not None:
            raise ValueError("attention: rotary and relative exclude each other")
        check_relative("attention", q, k, relative, max_seqlen)
        options = options._replace(has_relative=True)
    chosen = select("attention", backend, q, k, v, options)
    if chosen is Backend.TORCH:
        if rotary is not None:
            q, k = rotate((q, k), rotary, cu_seqlens, cache)
        return attention_torch(q, k, v, cu_seqlens, max_seqlen, window_positions, num_keys, options, cache, relative)
    philox = draw_seeds(q.device) if dropout_p > 0 else None
    if relative is not None:
        operands = (options, q, k, v, cu_seqlens, philox, window_positions)
        if chosen is Backend.TRITON:
            return attention_relative_triton(*operands, relative, max_seqlen, cache)
        return attention_relative_cpu(*operands, num_keys, relative)
    where, cos, sin = cu_seqlens, None, None
    if rotary is not None:
        cos, sin = rotary.cos, rotary.sin
    if chosen is Backend.TRITON:
        options = options._replace(tile=_tile(q.shape[-1], max_seqlen, q.dtype is torch.float32))
        where = tiles_of(cu_seqlens, q.shape[0], options.tile, cache, num_keys)
        if cos is not None and sin is not None:
            cos, sin = (t if t.stride(1) == 1 else t.contiguous() for t in (cos, sin))
    if needs_grad(q, k, v):
        tensors = (q, k, v, where, philox, window_positions, num_keys, cos, sin)
        return Differentiable.apply(_RULE, chosen, options, *tensors)
    if chosen is Backend.TRITON:
        q, k = _rotate_triton(options, q, k, where, cos, sin)
    return _launch(chosen, options, q, k, v, where, philox, window_positions, num_keys, cos, sin, False)[0]


def attention_probs(
    q: torch.Tensor,
    k: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    *,
    softmax_scale: float | None = None,
    window_size: Window = UNLIMITED,
    window_positions: torch.Tensor | None = None,
    num_keys: torch.Tensor | None = None,
    rotary: Rotary | None = None,
    relative: Relative | None = None,
) -> torch.Tensor:
    """The probabilities that `attention` never writes down, for `output_attentions=True`; before dropout.

    Arguments as of `attention`. Returns (batch, num_heads, max_seqlen, max_seqlen); zeros at query and key slots beyond
    a sequence's length, and where a query sees no key. Raises ValueError as `attention` does.
    """
    positions = {"window_positions": window_positions, "num_keys": num_keys}
    check_devices("attention_probs", q=q, k=k, cu_seqlens=cu_seqlens, **positions)
    cu_seqlens = int32_offsets("attention_probs", cu_seqlens)
    if num_keys is not None:
        _check_num_keys("attention_probs", num_keys, cu_seqlens)
    _check_heads("attention_probs", q, k=k)
    _check_window("attention_probs", q, window_size, window_positions)
    _check_dtypes("attention_probs", q, k=k)
    if rotary is not None:
        check_rotary(q, rotary, max_seqlen)
        q, k = rotate((q, k), rotary, cu_seqlens)
    if relative is not None:
        check_relative("attention_probs", q, k, relative, max_seqlen)
    options = AttentionOptions(_scale("attention_probs", q, softmax_scale), 0.0, window_size)
    return attention_probs_torch(q, k, cu_seqlens, max_seqlen, window_positions, num_keys, options, relative)


def attention_from_probs(probs: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """`attention` out of its probabilities, so that gradients with respect to these are to be had.

    Args:
        probs: (batch, num_heads, max_seqlen, max_seqlen), of `attention_probs`.
        v: (total_tokens, num_kv_heads, head_dim).
        cu_seqlens: int32 (batch + 1,), the offsets of the sequences.

    Returns:
        (total_tokens, num_heads, head_dim).

    Raises:
        ValueError: shapes that do not fit.
    """
    check_devices("attention_from_probs", probs=probs, v=v, cu_seqlens=cu_seqlens)
    cu_seqlens = int32_offsets("attention_from_probs", cu_seqlens)
    batch, num_heads = cu_seqlens.shape[0] - 1, probs.shape[1] if probs.dim() == 4 else 0
    if probs.dim() != 4 or probs.shape[0] != batch or probs.shape[2] != probs.shape[3]:
        expected = f"({batch}, heads, max_seqlen, max_seqlen)"
        raise ValueError(f"attention_from_probs: probs has shape {tuple(probs.shape)}, expected {expected}")
    if v.dim() != 3 or v.shape[1] == 0 or num_heads % v.shape[1]:
        raise ValueError(f"attention_from_probs: v has shape {tuple(v.shape)}, for {num_heads} heads of probs")
    return attention_from_probs_torch(probs, v, cu_seqlens)
