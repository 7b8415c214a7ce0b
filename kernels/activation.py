"""Activations and their derivatives, elementwise in fp32; fastbert.ops.activation describes them."""

import triton
import triton.language as tl


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "gelu":  # x Phi(x) (Hendrycks & Gimpel 2016)
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    if ACTIVATION == "gelu_tanh":  # 0.5 (1 + tanh u) = sigmoid(2 u)
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    if ACTIVATION == "relu":
        return tl.maximum(x, 0.0)
    if ACTIVATION == "silu":
        return x * tl.sigmoid(x)
    if ACTIVATION == "tanh":
        return 2.0 * tl.sigmoid(2.0 * x) - 1.0
    return x


# sigmoid(-u) is 1 - sigmoid(u) without the cancellation.
@triton.jit
def activation_slope(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "gelu":  # Phi(x) + x phi(x)
        return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    if ACTIVATION == "gelu_tanh":
        u = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        s = tl.sigmoid(u)
        return s + x * s * tl.sigmoid(-u) * (1.5957691216057308 + 0.21406444881780076 * x * x)
    if ACTIVATION == "relu":
        return tl.where(x > 0.0, 1.0, 0.0)
    if ACTIVATION == "silu":
        s = tl.sigmoid(x)
        return s + x * s * tl.sigmoid(-x)
    if ACTIVATION == "tanh":
        return 4.0 * tl.sigmoid(2.0 * x) * tl.sigmoid(-2.0 * x)
    return x * 0.0 + 1.0
