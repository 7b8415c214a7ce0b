// What the AMX instructions do, in plain C++ (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2:
// LDTILECFG, TILELOADD, TILESTORED, TDPBF16PS, TDPBUSD). Stands in for them where FASTBERT_AMX_EMULATION names this
// file: `make sanitize` builds it so. What the processor would fault on ends the program.

struct EmulatedTiles {
  bool is_configured = false;
  TileShapes shapes;
  char data[8][16][64];
};

inline EmulatedTiles& emulated_tiles() {
  static thread_local EmulatedTiles tiles;
  return tiles;
}

inline void amx_expects(bool holds) {
  if (!holds) std::abort();
}

inline void amx_configure(const TileShapes& shapes) {
  amx_expects(shapes.palette == 1 && shapes.start_row == 0);
  for (int tile = 0; tile < 16; ++tile) {
    amx_expects(shapes.rows[tile] <= 16 && shapes.row_bytes[tile] <= 64 && shapes.row_bytes[tile] % 4 == 0);
    amx_expects((shapes.rows[tile] == 0) == (shapes.row_bytes[tile] == 0) && (tile < 8 || shapes.rows[tile] == 0));
  }
  emulated_tiles().is_configured = true;
  emulated_tiles().shapes = shapes;
  std::memset(emulated_tiles().data, 0, sizeof(emulated_tiles().data));
}

inline void amx_release() { emulated_tiles().is_configured = false; }

template <int kTile>
int amx_rows() {
  amx_expects(emulated_tiles().is_configured && emulated_tiles().shapes.rows[kTile] > 0);
  return emulated_tiles().shapes.rows[kTile];
}

template <int kTile>
void amx_zero() {
  amx_rows<kTile>();
  std::memset(emulated_tiles().data[kTile], 0, 16 * 64);
}

template <int kTile>
void amx_load(const char* from, int64_t stride) {
  const int bytes = emulated_tiles().shapes.row_bytes[kTile];
  amx_zero<kTile>();
  for (int r = 0; r < amx_rows<kTile>(); ++r) {
    std::memcpy(emulated_tiles().data[kTile][r], from + r * stride, static_cast<size_t>(bytes));
  }
}

template <int kTile>
void amx_store(char* to, int64_t stride) {
  const int bytes = emulated_tiles().shapes.row_bytes[kTile];
  for (int r = 0; r < amx_rows<kTile>(); ++r) {
    std::memcpy(to + r * stride, emulated_tiles().data[kTile][r], static_cast<size_t>(bytes));
  }
}

// f(c, a, b) for every four bytes of the sums and every step.
template <typename Sum, int kC, int kA, int kB, typename F>
void amx_products(const F& f) {
  auto& tiles = emulated_tiles();
  const int rows = amx_rows<kC>(), columns = tiles.shapes.row_bytes[kC] / 4, steps = amx_rows<kB>();
  amx_expects(amx_rows<kA>() == rows && tiles.shapes.row_bytes[kA] == 4 * steps);
  amx_expects(tiles.shapes.row_bytes[kB] == 4 * columns);
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < columns; ++c) {
      Sum sum;
      std::memcpy(&sum, tiles.data[kC][r] + 4 * c, 4);
      for (int step = 0; step < steps; ++step) sum = f(sum, tiles.data[kA][r] + 4 * step, tiles.data[kB][step] + 4 * c);
      std::memcpy(tiles.data[kC][r] + 4 * c, &sum, 4);
    }
  }
}

template <int kC, int kA, int kB>
void amx_dot_bf16() {
  amx_products<float, kC, kA, kB>([](float sum, const char* a, const char* b) {
    BFloat16 x[2], y[2];
    std::memcpy(x, a, 4);
    std::memcpy(y, b, 4);
    return sum + to_float(x[0]) * to_float(y[0]) + to_float(x[1]) * to_float(y[1]);
  });
}

template <int kC, int kA, int kB>
void amx_dot_bytes() {
  amx_products<uint32_t, kC, kA, kB>([](uint32_t sum, const char* a, const char* b) {  // which wraps, as tiles do
    for (int i = 0; i < 4; ++i) sum += static_cast<uint32_t>(static_cast<uint8_t>(a[i]) * static_cast<int8_t>(b[i]));
    return sum;
  });
}
