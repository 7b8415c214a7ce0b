// 2^x, tanh, the activations and their derivatives over vectors. Included by foreach_isa.h. The coefficients are
// minimax fits (least squares, reweighted until the largest errors are equal) made for this file; errors given are the
// fits'. Where an operand may be NaN it is the second one of min and max, which return that one then.

// 2^x, for x up to 128.4; 0 instead of what is below 2^-126.5, and infinite at 128 and above (without AVX-512 at 127.5
// and above, where n is 128 already). kFine: relative error 7.5e-8, else 7.5e-5, which is plenty for a result that is
// rounded to bfloat16.
template <bool kFine>
FASTBERT_SIMD Floats exp2(Floats x) {
  x = power_that_scales(x);
  const Floats n = round(x);
  const Floats f = sub(x, n);
  Floats p;
  if constexpr (kFine) {
    p = fma(set1(1.327647944e-03f), f, set1(9.675543755e-03f));
    p = fma(p, f, set1(5.550713092e-02f));
    p = fma(p, f, set1(2.402212024e-01f));
    p = fma(p, f, set1(6.931469440e-01f));
    p = fma(p, f, set1(1.0f));
  } else {
    p = fma(set1(5.517134070e-02f), f, set1(2.426111698e-01f));
    p = fma(p, f, set1(6.932610273e-01f));
    p = fma(p, f, set1(9.999280572e-01f));
  }
  return scale_by_power(p, n);
}

constexpr float kLog2e = 1.44269504f;

// The activations' limits are exact, because x is bounded where the result has reached its limit: what is beyond gets
// the bits of the bound, an infinite x too, for which x times 0 would be NaN.
constexpr float kSigmoidEnd = 88.896f;  // here exp(x) = 2^128.25, infinite to exp2, and sigmoid(-x) = 0

// sigmoid(x) for x from -kSigmoidEnd on, and `rest` = 1 - sigmoid(x) without the cancellation.
FASTBERT_SIMD Floats sigmoid(Floats x, Floats& rest) {
  const Floats e = exp2<true>(mul(x, set1(-kLog2e)));
  const Floats s = div(set1(1.0f), add(e, set1(1.0f)));
  rest = min(mul(e, s), set1(1.0f));  // 1 where e is infinite
  return s;
}

FASTBERT_SIMD Floats sigmoid(Floats x) {
  Floats rest;
  return sigmoid(x, rest);
}

// By e^(2x) - 1 = 2^n (2^f - 1) + (2^n - 1), which keeps all digits of a small x; 2^f - 1 has a relative error
// of 1.1e-8.
FASTBERT_SIMD Floats tanh(Floats x) {
  const Floats y = mul(min(set1(10.0f), max(set1(-10.0f), x)), set1(2.0f * kLog2e));  // beyond 10 it is 1, rounded
  const Floats n = round(y);
  const Floats f = sub(y, n);
  Floats p = fma(set1(1.540351203e-04f), f, set1(1.339073548e-03f));
  p = fma(p, f, set1(9.618237496e-03f));
  p = fma(p, f, set1(5.550357434e-02f));
  p = fma(p, f, set1(2.402264979e-01f));
  p = fma(p, f, set1(6.931471879e-01f));
  const Floats power = scale_by_power(set1(1.0f), n);
  const Floats e = fma(power, mul(p, f), sub(power, set1(1.0f)));
  return div(e, add(e, set1(2.0f)));
}

// Where erf_of_scaled becomes 1: of the points next to the fit's end, 5.5 or 4.5, one at which its value is exactly 1,
// whether products and sums are rounded together (FMA) or one after the other.
template <bool kFine>
constexpr float kErfEnd = kFine ? 5.49998617f : 4.49800348f;

// erf(x / sqrt(2)), for x from -kErfEnd on. kFine: a quotient, such that x/2 of it is within 2.2e-8; else a polynomial,
// within 3.3e-5.
template <bool kFine>
FASTBERT_SIMD Floats erf_of_scaled(Floats x) {
  const Floats c = min(set1(kErfEnd<kFine>), x);
  if constexpr (kFine) {
    const Floats t = mul(c, c);
    Floats p = fma(set1(4.443196389e-08f), t, set1(1.306149534e-05f));
    p = fma(p, t, set1(3.657164343e-04f));
    p = fma(p, t, set1(9.523233399e-03f));
    p = fma(p, t, set1(7.028464973e-02f));
    p = fma(p, t, set1(7.978839874e-01f));
    Floats q = fma(set1(1.195400046e-06f), t, set1(7.861032645e-05f));
    q = fma(q, t, set1(1.962434500e-03f));
    q = fma(q, t, set1(2.939869463e-02f));
    q = fma(q, t, set1(2.547523379e-01f));
    q = fma(q, t, set1(1.0f));
    return div(mul(c, p), q);
  } else {
    const Floats t = mul(c, c);
    Floats p = fma(set1(6.072860270e-11f), t, set1(-6.629341076e-09f));
    p = fma(p, t, set1(3.182001649e-07f));
    p = fma(p, t, set1(-8.903473827e-06f));
    p = fma(p, t, set1(1.628504979e-04f));
    p = fma(p, t, set1(-2.075183671e-03f));
    p = fma(p, t, set1(1.917040907e-02f));
    p = fma(p, t, set1(-1.319693178e-01f));
    p = fma(p, t, set1(7.974252105e-01f));
    return mul(c, p);
  }
}

// The argument of gelu_tanh's tanh: sqrt(2/pi) (x + 0.044715 x^3).
constexpr float kGeluTanhEnd = 10.0684f;  // twice the argument is kSigmoidEnd here
FASTBERT_SIMD Floats gelu_tanh_argument(Floats x) {
  return mul(x, fma(set1(0.7978845608f * 0.044715f), mul(x, x), set1(0.7978845608f)));
}

template <bool kFine>
FASTBERT_SIMD Floats activate(Activation activation, Floats x) {
  switch (activation) {
    case Activation::kGelu: {
      const Floats c = max(set1(-kErfEnd<kFine>), x), half = mul(set1(0.5f), c);
      return fma(half, erf_of_scaled<kFine>(c), half);
    }
    case Activation::kGeluTanh: {
      const Floats c = max(set1(-kGeluTanhEnd), x);
      return mul(c, sigmoid(mul(set1(2.0f), gelu_tanh_argument(c))));
    }
    case Activation::kRelu:
      return max(set1(0.0f), x);
    case Activation::kTanh:
      return tanh(x);
    case Activation::kSilu: {
      const Floats c = max(set1(-kSigmoidEnd), x);
      return mul(c, sigmoid(c));
    }
    default:
      return x;
  }
}

// d activate(x) / dx; beside activate<kFine>(x) they share what they have in common.
template <bool kFine>
FASTBERT_SIMD Floats activation_slope(Activation activation, Floats x) {
  Floats rest;
  switch (activation) {
    case Activation::kGelu: {  // Phi(x) + x phi(x)
      const Floats phi = mul(set1(0.3989422804f), exp2<kFine>(mul(mul(x, x), set1(-0.5f * kLog2e))));
      const Floats c = max(set1(-15.0f), min(set1(15.0f), x));  // where phi is 0
      const Floats erf = erf_of_scaled<kFine>(max(set1(-kErfEnd<kFine>), x));
      return fma(c, phi, fma(set1(0.5f), erf, set1(0.5f)));
    }
    case Activation::kGeluTanh: {  // s + x s (1 - s) 2 u'(x), s = sigmoid(2 u)
      const Floats c = max(set1(-kGeluTanhEnd), x), both = min(set1(kGeluTanhEnd), c);
      const Floats s = sigmoid(mul(set1(2.0f), gelu_tanh_argument(c)), rest);
      const Floats slope = fma(set1(6.0f * 0.7978845608f * 0.044715f), mul(both, both), set1(2.0f * 0.7978845608f));
      return fma(mul(both, slope), mul(s, rest), s);
    }
    case Activation::kRelu:
      return sub(set1(1.0f), step_up_to_zero(x));
    case Activation::kTanh: {
      const Floats s = sigmoid(max(set1(-kSigmoidEnd), add(x, x)), rest);
      return mul(set1(4.0f), mul(s, rest));
    }
    case Activation::kSilu: {
      const Floats c = max(set1(-kSigmoidEnd), x);
      const Floats s = sigmoid(c, rest);
      return fma(mul(min(set1(kSigmoidEnd), c), s), rest, s);
    }
    default:
      return set1(1.0f);
  }
}
