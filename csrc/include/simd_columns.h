// The last vector of a row, which may be partly beyond it. Included by foreach_isa.h.

// What is beyond is zero.
template <typename T>
FASTBERT_SIMD Floats load_columns(const T* in, int64_t columns) {
  if (columns >= kWidth) return load(in);
  T lane[kWidth] = {};
  for (int64_t i = 0; i < columns; ++i) lane[i] = in[i];
  return load(lane);
}

template <typename T>
FASTBERT_SIMD void store_columns(T* out, Floats x, int64_t columns) {
  if (columns >= kWidth) return store(out, x);
  T lane[kWidth];
  store(lane, x);
  for (int64_t i = 0; i < columns; ++i) out[i] = lane[i];
}
