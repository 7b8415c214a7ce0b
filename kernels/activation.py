"""Activations and their derivatives, elementwise in fp32; fastbert.ops.activation describes them.

What is rounded to 16 bits anyway takes a shorter way to the normal distribution, without which the exact GELU has more
instructions than its memory traffic hides: erf of Abramowitz & Stegun (1964, 7.1.26), off by 1.5e-7 at most, whose
exponential is the density that the derivative wants, too.
"""

import triton
import triton.language as tl


@triton.jit
def _normal(x, IS_FP32: tl.constexpr):
    """Phi(x), and phi(x) times the square root of 2 pi."""
    if IS_FP32:
        return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)), tl.exp(-0.5 * x * x)
    density = tl.exp2(-0.7213475204444817 * x * x)
    t = 1.0 + 0.23164189 * tl.abs(x)
    t = tl.rsqrt(t * t)  # a division is many instructions
    tail = density * t * (
        0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)))
    )  # fmt: skip
    return tl.where(x < 0.0, tail, 1.0 - tail), density


@triton.jit
def _from_below(x, lowest):
    """x, but `lowest` where x is below it; NaN stays. What the functions make of `lowest` is their limit: 0."""
    return tl.maximum(x, lowest, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _between(x, limit):
    return tl.clamp(x, -limit, limit, propagate_nan=tl.PropagateNan.ALL)


# Where the functions have long reached their limits, in fp32: beyond, x may be infinite, of which 0 times is NaN.
_GELU_END = tl.constexpr(20.0)
_SILU_END = tl.constexpr(200.0)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr, IS_FP32: tl.constexpr):
    if ACTIVATION == "gelu":  # x Phi(x) (Hendrycks & Gimpel 2016)
        probability = _normal(x, IS_FP32)[0]
        return _from_below(x, -_GELU_END) * probability
    if ACTIVATION == "gelu_tanh":  # 0.5 (1 + tanh u) = sigmoid(2 u)
        x = _from_below(x, -_GELU_END)
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    if ACTIVATION == "relu":
        return _from_below(x, 0.0)
    if ACTIVATION == "silu":
        x = _from_below(x, -_SILU_END)
        return x * tl.sigmoid(x)
    if ACTIVATION == "tanh":
        # Near 0, where the difference would lose all digits, a minimax fit of tanh(x) / x, 1.5e-8 off.
        t = x * x
        small = x + x * t * (-0.3333314390 + t * (0.1332587894 + t * (-0.05304549308 + t * 0.01724148912)))
        return tl.where(tl.abs(x) < 0.5, small, 2.0 * tl.sigmoid(2.0 * x) - 1.0)
    return x


# sigmoid(-u) is 1 - sigmoid(u) without the cancellation.
@triton.jit
def activation_slope(x, ACTIVATION: tl.constexpr, IS_FP32: tl.constexpr):
    if ACTIVATION == "gelu":  # Phi(x) + x phi(x)
        probability, density = _normal(x, IS_FP32)
        return probability + _between(x, _GELU_END) * 0.3989422804014327 * density
    if ACTIVATION == "gelu_tanh":
        x = _between(x, _GELU_END)
        u = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        s = tl.sigmoid(u)
        return s + x * s * tl.sigmoid(-u) * (1.5957691216057308 + 0.21406444881780076 * x * x)
    if ACTIVATION == "relu":
        return tl.where(x <= 0.0, 0.0, 1.0)
    if ACTIVATION == "silu":
        x = _between(x, _SILU_END)
        s = tl.sigmoid(x)
        return s + x * s * tl.sigmoid(-x)
    if ACTIVATION == "tanh":
        return 4.0 * tl.sigmoid(2.0 * x) * tl.sigmoid(-2.0 * x)
    return x * 0.0 + 1.0
