"""Every registered op on two pages, this and _library_products.py: schema, fake kernel, lazily imported kernels.

The backend stands in the op's name, so the choice is visible in profiles and compiled graphs, and each name has one
kernel per dispatch key (DESIGN 4.4). Autograd lives outside, in the op's own file. The C++ extension registers its
kernels when it is loaded; Triton kernels are imported by the functions below on their first call.
"""

from __future__ import annotations

import importlib
import os
import weakref
from collections.abc import Callable
from types import ModuleType

import torch

# --------------------------------------------------------------------------------------------------------------------
# Availability: asked once, in `supports`, never at import.

_extension_error: str | None = "not asked yet"


def extension_error() -> str | None:
    """None when the C++ extension is loaded, else why it is not. ValueError: FASTBERT_ISA is none that runs here."""
    global _extension_error
    if _extension_error == "not asked yet":
        try:
            from fastbert import _C  # loading it registers its kernels
        except ModuleNotFoundError as error:
            _extension_error = f"the C++ extension is not built ({error})"
        except ImportError as error:  # mostly a symbol that another torch had
            _extension_error = f"the C++ extension does not load, build it for this torch ({error})"
        else:
            if (isa := os.environ.get("FASTBERT_ISA")) is not None:
                _hold_down(_C, isa)
            _extension_error = None
    return _extension_error


def _hold_down(extension: ModuleType, isa: str) -> None:
    try:
        extension.set_isa(isa)
    except ValueError as error:
        raise ValueError(f"FASTBERT_ISA: {error}") from None


_triton_error: str | None = "not asked yet"


def triton_error() -> str | None:
    """None when Triton can be imported, else why not."""
    global _triton_error
    if _triton_error == "not asked yet":
        try:
            import triton  # noqa: F401

            _triton_error = None
        except ImportError as error:
            _triton_error = f"Triton is not installed ({error})"
    return _triton_error


def cuda_error() -> str | None:
    """None when the C++ extension is loaded with its CUDA part, else why not."""
    if extension_error() is not None:
        return extension_error()
    from fastbert._C import has_cuda

    return None if has_cuda else "the C++ extension was built without its CUDA part"


# What torch.compiler.assume_constant_result does, without its import of torch._dynamo (0.7 s): a trace calls these
# functions instead of tracing their imports, also when it is the process's first call.
for _asked_once in (extension_error, triton_error, cuda_error):
    _asked_once._dynamo_marked_constant = True  # type: ignore[attr-defined]


def triton_objection(x: torch.Tensor) -> str | None:
    """Why Triton's kernels cannot run on x: no GPU and no interpreter, no Triton, or a dtype that they do not have."""
    if x.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"tensors are on {x.device.type}"
    if x.device.type != "cuda" and torch.compiler.is_compiling():
        return "the Triton interpreter does not run under torch.compile"
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"dtype {x.dtype} (has float32, bfloat16 and float16)"
    return triton_error()


def cuda_objection(x: torch.Tensor, max_columns: int | None = 8192) -> str | None:
    """Why the CUDA kernels cannot run on x (total_tokens, width); max_columns None: they do not keep whole rows."""
    if x.device.type != "cuda":
        return f"tensors are on {x.device.type}"
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"dtype {x.dtype} (has float32, bfloat16 and float16)"
    if max_columns is not None and x.shape[-1] > max_columns:
        return f"rows have {x.shape[-1]} columns, the kernels keep up to {max_columns} in registers"
    return cuda_error()


def needs_grad(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd must record this call."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def define(name: str, schema: str, fake: Callable) -> None:
    """Register an op whose kernels the C++ extension brings."""
    torch.library.define(f"fastbert::{name}", schema)
    torch.library.register_fake(f"fastbert::{name}", fake)


def define_triton(op: str, schema: str, module: str, fake: Callable) -> None:
    """Register fastbert::{op}_triton, which is function `op` of fastbert.kernels.{module}, imported by the first call.

    Its CPU key is for TRITON_INTERPRET=1, which tests the kernels without a GPU.
    """
    kernel = None

    def implementation(*args):
        nonlocal kernel
        if kernel is None:
            kernel = getattr(importlib.import_module(f"fastbert.kernels.{module}"), op)
        return kernel(*args)

    define(f"{op}_triton", schema, fake)
    for key in ("CUDA", "CPU"):
        torch.library.impl(f"fastbert::{op}_triton", key, implementation)


# --------------------------------------------------------------------------------------------------------------------
# add_layer_norm
#
#   summed, (total_tokens, hidden_size): dropout(x + x_bias) + residual
#   out, (total_tokens, hidden_size): (summed - mean) * rstd * weight + bias; mean, rstd: fp32 (total_tokens,)
#
# The sum is rounded to x's dtype before it is normalised: backward differentiates exactly what forward computed.
# philox is int64 (2,) = [seed, offset] on x's device, read only when dropout_p > 0. `summed` has zero rows unless
# return_sum; mean and rstd are empty unless return_stats. In backward dx has zero rows unless dropout_p > 0: without
# dropout it equals dsummed. dx_bias is fp32-accumulated over tokens and empty unless has_x_bias.

_ADD_LAYER_NORM_FWD = (
    "(Tensor x, Tensor? x_bias, Tensor? residual, Tensor weight, Tensor? bias, Tensor? philox, float dropout_p,"
    " float eps, bool return_sum, bool return_stats) -> (Tensor out, Tensor summed, Tensor mean, Tensor rstd)"
)
_ADD_LAYER_NORM_BWD = (
    "(Tensor dout, Tensor? dsum, Tensor summed, Tensor mean, Tensor rstd, Tensor weight, Tensor? philox,"
    " float dropout_p, bool has_x_bias) -> (Tensor dx, Tensor dsummed, Tensor dx_bias, Tensor dweight, Tensor dbias)"
)


def _add_layer_norm_fwd_fake(x, x_bias, residual, weight, bias, philox, dropout_p, eps, return_sum, return_stats):
    tokens, hidden_size = x.shape
    stats = tokens if return_stats else 0
    summed = x.new_empty(tokens if return_sum else 0, hidden_size)
    mean, rstd = (x.new_empty(stats, dtype=torch.float32) for _ in range(2))
    return x.new_empty(tokens, hidden_size), summed, mean, rstd


def _add_layer_norm_bwd_fake(dout, dsum, summed, mean, rstd, weight, philox, dropout_p, has_x_bias):
    tokens, hidden_size = dout.shape
    dx = dout.new_empty(tokens if dropout_p > 0 else 0, hidden_size)
    dx_bias = weight.new_empty(hidden_size if has_x_bias else 0)
    return dx, dout.new_empty(tokens, hidden_size), dx_bias, torch.empty_like(weight), torch.empty_like(weight)


for _backend in ("cpu", "cuda"):
    define(f"add_layer_norm_fwd_{_backend}", _ADD_LAYER_NORM_FWD, _add_layer_norm_fwd_fake)
    define(f"add_layer_norm_bwd_{_backend}", _ADD_LAYER_NORM_BWD, _add_layer_norm_bwd_fake)
define_triton("add_layer_norm_fwd", _ADD_LAYER_NORM_FWD, "layer_norm", _add_layer_norm_fwd_fake)
define_triton("add_layer_norm_bwd", _ADD_LAYER_NORM_BWD, "layer_norm", _add_layer_norm_bwd_fake)


# --------------------------------------------------------------------------------------------------------------------
# embed_layer_norm; in CUDA its forward alone
#
#   out, (total_tokens, width): word[input_ids] + token_type[token_type_ids] + position[position_ids]
#
# rounded once, and its LayerNorm where weight is given (inference; autograd has add_layer_norm for that). Without
# input_ids `word` holds the tokens' own rows; without token_type_ids every token is of type 0.
# Backward gives one table's gradient, dense; row padding_idx takes none (-1: every row does).

_EMBED_FWD = (
    "(Tensor? input_ids, Tensor position_ids, Tensor? token_type_ids, Tensor word, Tensor position,"
    " Tensor? token_type, Tensor? weight, Tensor? bias, float eps) -> Tensor"
)
_EMBED_BWD = "(Tensor dout, Tensor ids, Tensor table, int padding_idx) -> Tensor"


def _embed_fwd_fake(input_ids, position_ids, token_type_ids, word, position, token_type, weight, bias, eps):
    return position.new_empty(position_ids.shape[0], position.shape[1])


def _embed_bwd_fake(dout, ids, table, padding_idx):
    return torch.empty_like(table)


for _backend in ("cpu", "cuda"):
    define(f"embed_fwd_{_backend}", _EMBED_FWD, _embed_fwd_fake)
define("embed_bwd_cpu", _EMBED_BWD, _embed_bwd_fake)
define_triton("embed_fwd", _EMBED_FWD, "embedding", _embed_fwd_fake)
define_triton("embed_bwd", _EMBED_BWD, "embedding", _embed_bwd_fake)


# --------------------------------------------------------------------------------------------------------------------
# dropout: x (..., width) by the mask of philox, which add_layer_norm would have for the same rows; backward is the same
# op over dout

_DROPOUT = "(Tensor x, Tensor philox, float dropout_p) -> Tensor"


def _dropout_fake(x, philox, dropout_p):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


define("dropout_cpu", _DROPOUT, _dropout_fake)
define_triton("dropout", _DROPOUT, "dropout", _dropout_fake)


# --------------------------------------------------------------------------------------------------------------------
# pooling: x (total_tokens, hidden_size) -> out (batch, hidden_size), by mode "mean", "cls" or "max"
#
# ties, int32 and out's shape: how many tokens have a maximum; zero rows unless return_ties. Backward reads x, out and
# ties for "max" only.


def _pooling_fwd_fake(x, cu_seqlens, mode, return_ties):
    batch_size = cu_seqlens.shape[0] - 1
    ties = x.new_empty(batch_size if return_ties else 0, x.shape[1], dtype=torch.int32)
    return x.new_empty(batch_size, x.shape[1]), ties


define_triton(
    "pooling_fwd",
    "(Tensor x, Tensor cu_seqlens, str mode, bool return_ties) -> (Tensor out, Tensor ties)",
    "pooling",
    _pooling_fwd_fake,
)
define_triton(
    "pooling_bwd",
    "(Tensor dout, Tensor? x, Tensor? out, Tensor? ties, Tensor cu_seqlens, str mode, SymInt total_tokens) -> Tensor",
    "pooling",
    lambda dout, x, out, ties, cu_seqlens, mode, total_tokens: dout.new_empty(total_tokens, dout.shape[1]),
)


# --------------------------------------------------------------------------------------------------------------------
# packing: rows of x (num_rows, width) to (total_tokens, width), and back with zeros in the rows that indices leaves out
#
# indices: int64 (total_tokens,), ascending. Each op is the other's backward.

define_triton(
    "pack",
    "(Tensor x, Tensor indices) -> Tensor",
    "packing",
    lambda x, indices: x.new_empty(indices.shape[0], x.shape[1]),
)
define_triton(
    "unpack",
    "(Tensor packed, Tensor indices, SymInt num_rows) -> Tensor",
    "packing",
    lambda packed, indices, num_rows: packed.new_empty(num_rows, packed.shape[1]),
)


# --------------------------------------------------------------------------------------------------------------------
# attention
#
#   out, (total_tokens, num_heads, head_dim): dropout(softmax(q k^T * softmax_scale)) v within each sequence
#   softmax_stats, fp32 (2, num_heads, total_tokens): each query's top q k^T and its sum of
#     exp(softmax_scale * (q k^T - top)); two numbers, for their log-sum-exp in fp32 loses digits where scores are large
#
# philox as above; softmax_stats is (0, num_heads, total_tokens) unless return_stats. Results are contiguous whatever
# the strides of q, k and v, and zeros in slack rows.

_ATTENTION_FWD = (
    "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, Tensor? philox, float softmax_scale, float dropout_p,"
    " bool return_stats) -> (Tensor out, Tensor softmax_stats)"
)
_ATTENTION_BWD = (
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_stats, Tensor cu_seqlens, Tensor? philox,"
    " float softmax_scale, float dropout_p) -> (Tensor dq, Tensor dk, Tensor dv)"
)


def _attention_fwd_fake(q, k, v, cu_seqlens, philox, softmax_scale, dropout_p, return_stats):
    tokens, num_heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(2 if return_stats else 0, num_heads, tokens, dtype=torch.float32)


def _attention_bwd_fake(dout, q, k, v, out, softmax_stats, cu_seqlens, philox, softmax_scale, dropout_p):
    return q.new_empty(q.shape), q.new_empty(q.shape), q.new_empty(q.shape)


define("attention_fwd_cpu", _ATTENTION_FWD, _attention_fwd_fake)
define("attention_bwd_cpu", _ATTENTION_BWD, _attention_bwd_fake)

# The Triton kernels take the list of tiles instead, which is made once a batch: int32 (num_tiles, 4), of `tile` tokens
# each. window_size: (left, right), -1 = unlimited. Statistics are of scores times the sign of softmax_scale. The
# gradients stand beside each other, (total_tokens, 3, num_heads, head_dim), as the merged projection's backward wants
# them; with cos and sin they are those of q and k before `rotary`.

_ATTENTION_FWD_TRITON = (
    "(Tensor q, Tensor k, Tensor v, Tensor tiles, Tensor? philox, int tile, float softmax_scale, float dropout_p,"
    " SymInt[] window_size, bool return_stats) -> (Tensor out, Tensor softmax_stats)"
)
_ATTENTION_BWD_TRITON = (
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_stats, Tensor tiles, Tensor? philox,"
    " int tile, float softmax_scale, float dropout_p, SymInt[] window_size, Tensor? cos, Tensor? sin) -> Tensor dqkv"
)


def _attention_fwd_triton_fake(q, k, v, tiles, philox, tile, softmax_scale, dropout_p, window_size, return_stats):
    return _attention_fwd_fake(q, k, v, None, philox, softmax_scale, dropout_p, return_stats)


def _attention_bwd_triton_fake(dout, q, *others):
    return q.new_empty(q.shape[0], 3, *q.shape[1:])


define_triton(
    "attention_tiles",
    "(Tensor cu_seqlens, SymInt total_tokens, int tile) -> Tensor",
    "attention",
    lambda cu_seqlens, total_tokens, tile: cu_seqlens.new_empty(total_tokens // tile + cu_seqlens.numel(), 4),
)
define_triton("attention_fwd", _ATTENTION_FWD_TRITON, "attention_fwd", _attention_fwd_triton_fake)
define_triton("attention_bwd", _ATTENTION_BWD_TRITON, "attention_bwd", _attention_bwd_triton_fake)

# rotary: q and k turned by their tokens' positions (cos and sin, fp32 (max_positions, head_dim // 2) by position, rows
# in one piece): both contiguous, zeros in slack rows.

define_triton(
    "rotary",
    "(Tensor q, Tensor k, Tensor cos, Tensor sin, Tensor tiles, int tile) -> (Tensor q_rotated, Tensor k_rotated)",
    "rotary",
    lambda q, k, cos, sin, tiles, tile: (q.new_empty(q.shape), k.new_empty(k.shape)),
)


# --------------------------------------------------------------------------------------------------------------------
# What the extension asks Python for on behalf of packed weights (csrc/ops/packed_weights.cpp)
#
# watch_weight: before it packs a weight of a storage that it has not met. The packed copies go when the storage does:
# torch keeps one Python object for as long as a storage lives, whoever holds it, and finalizes it before the storage's
# address can be another's.
# warn_of_weight: a warning that goes through Python's filters.

_sees_fused_steps = False


def _watch_weight(weight):
    from fastbert._C import forget_packed

    global _sees_fused_steps
    if not _sees_fused_steps:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(_after_step)
        _sees_fused_steps = True
    storage = weight.untyped_storage()
    weakref.finalize(storage, forget_packed, storage._cdata).atexit = False


def _after_step(optimizer, args, kwargs):
    """torch's fused optimizers count no version of what they write. That a gradient is None says nothing here: the step
    itself, or a hook of the optimizer's own, may have dropped it."""
    groups = [group for group in optimizer.param_groups if group.get("fused")]
    if groups:
        from fastbert._C import weights_changed

        parameters = [p for group in groups for p in group["params"] if type(p) in (torch.Tensor, torch.nn.Parameter)]
        weights_changed([p.untyped_storage()._cdata for p in parameters])


# What torch.compiler.disable does, without its import of torch._dynamo: a compiled step calls the hook, untraced.
_after_step._torchdynamo_disable = True  # type: ignore[attr-defined]


def _warn_of_weight(weight, message):
    import warnings

    warnings.warn(message, stacklevel=2)


define("watch_weight_cpu", "(Tensor weight) -> ()", lambda weight: None)
define("warn_of_weight_cpu", "(Tensor weight, str message) -> ()", lambda weight, message: None)
torch.library.impl("fastbert::watch_weight_cpu", "CPU", _watch_weight)
torch.library.impl("fastbert::warn_of_weight_cpu", "CPU", _warn_of_weight)
