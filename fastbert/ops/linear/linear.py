"""Products with a weight: one or several over the same x, with bias and activation in the GEMM's epilogue.

int8 weights (Dettmers et al. 2022, section 2.1) hold round(w / scale) with one scale an output channel; rows of x are
quantised on the fly by their own largest value, or by a scale that calibration has found.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from fastbert.backend import Backend, register, select
from fastbert.native.availability import extension_error
from fastbert.ops._common import (
    Differentiable,
    Rule,
    check_devices,
    compute_dtype,
    define,
    for_kernels,
    needs_grad,
)
from fastbert.ops.linear.torch_backend import linear_torch

# out_i, (total_tokens, out_features_i) in `dtype`: activation(x weight_i^T + bias_i), for every weight of the list
#
# x is fp32 or bf16; weights are fp32, bf16, or int8 with weight_scales fp32 (out_features,). An input scale, fp32 (),
# is read for int8 weights only: 0 quantises each row of x by its own largest value. The kernels keep packed copies of
# weights that are used again, until these change or die. With return_pre each out is followed by its value before the
# activation, which backward needs. Gradients come in the dtypes of x and of the weights, a bias's in its weight's;
# those that are not needed are empty.

_FWD_SCHEMA = (
    "(Tensor x, Tensor[] weights, Tensor?[] biases, Tensor?[] weight_scales, Tensor?[] input_scales, str activation,"
    " ScalarType dtype, bool return_pre) -> Tensor[]"
)
_BWD_SCHEMA = (
    "(Tensor[] douts, Tensor x, Tensor[] weights, Tensor[] pres, str activation, bool needs_dx, bool needs_dweight,"
    " bool needs_dbias) -> (Tensor dx, Tensor[] dweights, Tensor[] dbiases)"
)


def _fwd_fake(x, weights, biases, weight_scales, input_scales, activation, dtype, return_pre):
    copies = 2 if return_pre else 1
    return [x.new_empty(x.shape[0], w.shape[0], dtype=dtype) for w in weights for _ in range(copies)]


def _bwd_fake(douts, x, weights, pres, activation, needs_dx, needs_dweight, needs_dbias):
    dweights = [torch.empty_like(w) for w in weights] if needs_dweight else []
    dbiases = [w.new_empty(w.shape[0]) for w in weights] if needs_dbias else []
    return x.new_empty(x.shape[0] if needs_dx else 0, x.shape[1]), dweights, dbiases


_FWD = define("linear_cpu", _FWD_SCHEMA, _fwd_fake)
_BWD = define("linear_bwd_cpu", _BWD_SCHEMA, _bwd_fake)


class LinearOptions(NamedTuple):
    input_scales: Sequence[torch.Tensor | None]
    activation: str
    dtype: torch.dtype


def supports_gemm_cpu(x, *weights) -> str | None:
    """Whether the C++ GEMMs take x and these weights (None among them means: not there)."""
    if x.device.type != "cpu":
        return f"tensors are on {x.device.type}"
    for t in (x, *weights):
        if t is not None and t.dtype not in (torch.float32, torch.bfloat16) and (t is x or t.dtype is not torch.int8):
            return f"dtype {t.dtype} (has float32, bfloat16 and int8 weights)"
    if compute_dtype(x) not in (torch.float32, torch.bfloat16):
        return f"autocast to {compute_dtype(x)}"
    if x.dim() != 2:
        return f"x has {x.dim()} dimensions, the kernels take (total_tokens, in_features)"
    return extension_error()


register("linears", Backend.CPU, supports_gemm_cpu)


def _launch(options, x, weights, biases, weight_scales, return_pre):
    return _FWD(x, for_kernels(weights), biases, weight_scales, *options, return_pre)


def _forward(backend, options, x, *weights_and_biases):
    count, has_pre = len(weights_and_biases) // 2, options.activation != "none"
    weights, biases = weights_and_biases[:count], weights_and_biases[count:]
    out = _launch(options, x, weights, biases, [None] * count, has_pre)
    outs, pres = (out[::2], out[1::2]) if has_pre else (out, [])
    return tuple(outs), (x, *weights, *pres)


def _backward(backend, options, needed, saved, *douts):
    count = len(douts)
    x, weights, pres = saved[0], saved[1 : 1 + count], saved[1 + count :]
    needs_dweight, needs_dbias = any(needed[1 : 1 + count]), any(needed[1 + count :])
    dx, dweights, dbiases = _BWD(douts, x, weights, pres, options.activation, needed[0], needs_dweight, needs_dbias)
    none = [None] * count
    return dx, *(dweights or none), *(dbiases or none)


_RULE = Rule(_forward, _backward)


def linears(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    *,
    weight_scales: Sequence[torch.Tensor | None] | None = None,
    input_scales: Sequence[torch.Tensor | None] | None = None,
    activation: str = "none",
    backend: str | None = None,
) -> list[torch.Tensor]:
    """[activation(x w^T + b) for w, b in zip(weights, biases)], in one call: x is read, or quantised, once for all.

    Args:
        x: (total_tokens, in_features).
        weights: (out_features, in_features) each, in x's dtype, or int8.
        biases: (out_features,) each, or None.
        weight_scales: float32 (out_features,) for each int8 weight, None for others.
        input_scales: float32 () for int8 weights, read at each call: what a step of x stands for; 0, and None, quantise
            each row by its own largest value.
        activation: "none", or a name that the op `activation` knows.
        backend: None follows `use_backend`; a name forces that backend for this call.

    Returns:
        (total_tokens, out_features) each, in x's dtype, or autocast's.

    Raises:
        ValueError: tensors on two devices. BackendError: the backend that was asked for cannot serve the call.
        RuntimeError: a gradient is wanted through an int8 weight; an input scale on a CPU is negative or not finite; an
        int8 weight has more than 132,103 columns, whose sums int32 does not hold (the CPU's kernels).
    """
    scales = [None] * len(weights) if weight_scales is None else list(weight_scales)
    inputs = [None] * len(weights) if input_scales is None else list(input_scales)
    for weight, bias, scale, step in zip(weights, biases, scales, inputs, strict=True):
        check_devices("linears", x=x, weight=weight, bias=bias, weight_scale=scale, input_scale=step)
    chosen = select("linears", backend, x, *weights)
    check_gradient(x, scales)
    if chosen is Backend.TORCH:
        return [
            linear_torch(x, w, b, s, i, activation) for w, b, s, i in zip(weights, biases, scales, inputs, strict=True)
        ]
    options = LinearOptions(inputs, activation, compute_dtype(x))
    if needs_grad(x, *weights, *biases):
        return list(Differentiable.apply(_RULE, chosen, options, x, *weights, *biases))
    return _launch(options, x, weights, biases, scales, False)


def check_gradient(x: torch.Tensor, weight_scales: Sequence[torch.Tensor | None]) -> None:
    for scale in weight_scales:  # not any(): a generator takes longer than all of them
        if scale is not None and needs_grad(x):
            raise RuntimeError("int8 weights have no gradient: run the quantised model under torch.no_grad()")


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    weight_scale: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
    activation: str = "none",
    backend: str | None = None,
) -> torch.Tensor:
    """activation(x weight^T + bias): `linears` with one weight, or the first half of `feed_forward`."""
    return linears(
        x,
        [weight],
        [bias],
        weight_scales=[weight_scale],
        input_scales=[input_scale],
        activation=activation,
        backend=backend,
    )[0]


def multiplies_bf16(device: torch.device) -> bool:
    """Whether products of bfloat16 have an instruction on a device; where not, they are emulated, and slow."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if extension_error() is not None:
        return False
    from fastbert import _C

    return _C.has_bf16()


def are_weights_packed() -> bool:
    """Whether products on CPUs read packed copies of weights. Torch's read the weights themselves: they are used where
    the extension is missing, and on processors that none of our products were written for."""
    if extension_error() is not None:
        return False
    from fastbert import _C

    return _C.has_products()


def repack(tensors: Iterable[torch.Tensor]) -> None:
    """Forget the packed copies of weights on CPUs; nothing happens to tensors that have none."""
    if extension_error() is None:  # without the extension nothing is packed
        from fastbert import _C

        storages = [t.untyped_storage() for t in tensors if t.device.type == "cpu"]
        for storage in storages:
            _let_go_of_moved(storage)
        _C.repack([storage.data_ptr() for storage in storages])


# --------------------------------------------------------------------------------------------------------------------
# What the extension asks Python for on behalf of packed weights (csrc/ops/storages.cpp, packed_weights.cpp)
#
# watch_storage: before it keeps something for a storage whose memory it has not met. That goes when the storage does,
# or when its memory is seen to be another: torch keeps one Python object for as long as a storage
# lives.
# warn_of_weight: a warning that goes through Python's filters.

_sees_fused_steps = False


_watched: weakref.WeakKeyDictionary[torch.UntypedStorage, weakref.finalize] = weakref.WeakKeyDictionary()


def _watch_storage(tensor):
    from fastbert._C import forget_storage

    global _sees_fused_steps
    if not _sees_fused_steps:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(_after_step)
        _sees_fused_steps = True
    storage = tensor.untyped_storage()
    _let_go_of_moved(storage)
    _watched[storage] = weakref.finalize(storage, forget_storage, storage.data_ptr())
    _watched[storage].atexit = False


def _let_go_of_moved(storage):
    """Of what is kept where the storage's memory was before it was resized."""
    finalizer = _watched.get(storage)
    watched = finalizer and finalizer.peek()
    if watched and watched[2] != (storage.data_ptr(),):
        finalizer()


def _after_step(optimizer, args, kwargs):
    """torch's fused optimizers count no version of what they write. That a gradient is None says nothing here: the step
    itself, or a hook of the optimizer's own, may have dropped it."""
    groups = [group for group in optimizer.param_groups if group.get("fused")]
    if groups:
        from fastbert._C import weights_changed

        parameters = [p for group in groups for p in group["params"] if type(p) in (torch.Tensor, torch.nn.Parameter)]
        weights_changed([p.untyped_storage().data_ptr() for p in parameters if p.device.type == "cpu"])


# What torch.compiler.disable does, without its import of torch._dynamo: a compiled step calls the hook, untraced.
_after_step._torchdynamo_disable = True  # type: ignore[attr-defined]


def _warn_of_weight(weight, message):
    import warnings

    warnings.warn(message, stacklevel=2)


def _called_by_a_kernel(function):
    """A kernel can tell no more than that its call failed, and a signal's handler runs wherever the main thread comes
    to Python: what it raised (a Ctrl-C, mostly) waits until the kernel is done.
    """

    def call(*args):
        try:
            function(*args)
        except BaseException as error:
            if threading.current_thread() is not threading.main_thread():
                raise
            from fastbert._C import raise_behind_kernel

            function(*args)  # which raises again, if it was its own
            raise_behind_kernel(error)

    return call


define("watch_storage_cpu", "(Tensor tensor) -> ()", lambda tensor: None)
define("warn_of_weight_cpu", "(Tensor weight, str message) -> ()", lambda weight, message: None)
torch.library.impl("fastbert::watch_storage_cpu", "CPU", _called_by_a_kernel(_watch_storage))
torch.library.impl("fastbert::warn_of_weight_cpu", "CPU", _called_by_a_kernel(_warn_of_weight))
