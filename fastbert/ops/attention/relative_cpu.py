"""Attention with relative terms by the CPU's kernels. fastbert/ops/attention/relative.py says what the terms are."""

from __future__ import annotations

import torch

from fastbert.backend import Backend
from fastbert.ops._common import Differentiable, Rule, define, needs_grad
from fastbert.ops.attention.relative import Relative

# As attention_fwd_cpu and attention_bwd_cpu; rows, key, query, bias and positions as in Relative, bias in fp32, in
# which it is added up. Where there is a bias, softmax_stats are of scores that have been scaled. The gradient of a
# table that is None is (0,). Ops of their own: what plain attention passes on stays as it is.

_TERMS = (
    "Tensor? window_positions, Tensor? num_keys, Tensor rows, Tensor? key, Tensor? query, Tensor? bias,"
    " Tensor? positions, float softmax_scale, float dropout_p, int window_left, int window_right"
)
_FWD_SCHEMA = (
    f"(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, Tensor? philox, {_TERMS}, bool return_stats)"
    " -> (Tensor out, Tensor softmax_stats)"
)
_BWD_SCHEMA = (
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_stats, Tensor cu_seqlens, Tensor? philox,"
    f" {_TERMS}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dkey, Tensor dquery, Tensor dbias)"
)


def _fwd_fake(q, *others):
    total_tokens, num_heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(2 if others[-1] else 0, num_heads, total_tokens, dtype=torch.float32)


def _bwd_fake(dout, q, k, v, out, softmax_stats, cu_seqlens, philox, window_positions, num_keys, rows, *terms):
    tables = (q.new_empty(0) if t is None else t.new_empty(t.shape) for t in terms[:3])
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), *tables


_FWD = define("attention_relative_fwd_cpu", _FWD_SCHEMA, _fwd_fake)
_BWD = define("attention_relative_bwd_cpu", _BWD_SCHEMA, _bwd_fake)


def _forward(backend, options, *tensors):
    q, k, v, *others = tensors
    out, softmax_stats = _FWD(*tensors, options.softmax_scale, options.dropout_p, *options.window_size, True)
    return out, (q, k, v, out, softmax_stats, *others)


def _backward(backend, options, needed, saved, dout):
    dq, dk, dv, dkey, dquery, dbias = _BWD(dout, *saved, options.softmax_scale, options.dropout_p, *options.window_size)
    return dq, dk, dv, None, None, None, None, None, dkey, dquery, dbias, None


_RULE = Rule(_forward, _backward)


def attention_relative_cpu(options, q, k, v, cu_seqlens, philox, window_positions, num_keys, relative: Relative):
    """fastbert.ops.attention of checked operands; options: AttentionOptions."""
    rows, key, query, bias, positions = relative
    bias = None if bias is None else bias.float()
    tensors = (q, k, v, cu_seqlens, philox, window_positions, num_keys, rows, key, query, bias, positions)
    if needs_grad(q, k, v, key, query, bias):
        return Differentiable.apply(_RULE, Backend.CPU, options, *tensors)
    return _FWD(*tensors, options.softmax_scale, options.dropout_p, *options.window_size, False)[0]
