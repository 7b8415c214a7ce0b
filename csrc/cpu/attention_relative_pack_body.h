// Packs tables by distance, and sums up their gradients, for one ISA; included by attention_relative_pack.cpp through
// foreach_isa.h.
#include "attention_pack.h"

template <typename E>
int64_t column_bytes(int64_t head_dim, int64_t panels) {
  return panels * whole_steps<E>(head_dim) * kStepBytes;
}

template <typename E>
int64_t row_bytes(int64_t head_dim, int64_t panels) {
  return (head_dim + kPanel - 1) / kPanel * (panels * kPanel / kPerStep<E>)*kStepBytes;
}

// The rows of one panel's columns: where they lie, if they are equally far apart, as those of neighbouring distances
// mostly are, or copied into `space`.
template <typename T>
StridedRows<T> rows_of_panel(const PackTable<T>& table, int64_t head, int64_t panel, T* space) {
  const int32_t* row = table.row_of_column + panel * kPanel;
  const T* data = table.data + head * table.head_stride;
  const int32_t apart = row[1] - row[0];
  int64_t same = 1;
  while (same < kPanel && row[same] - row[same - 1] == apart) ++same;
  if (same == kPanel) return {data + row[0] * table.row_stride, apart * table.row_stride};
  for (int64_t c = 0; c < kPanel; ++c) {
    std::memcpy(space + c * table.head_dim, data + row[c] * table.row_stride,
                static_cast<size_t>(table.head_dim) * sizeof(T));
  }
  return {space, table.head_dim};
}

template <typename E, typename T>
void pack_panel(const PackTable<T>& table, int64_t head, int64_t panel) {
  static thread_local Scratch scratch;
  const int64_t d = table.head_dim;
  T* space = reinterpret_cast<T*>(scratch.get(kPanel * d * static_cast<int64_t>(sizeof(T))));
  const StridedRows<T> rows = rows_of_panel(table, head, panel, space);
  pack_columns<E>(rows.data, rows.stride, kPanel, d,
                  table.columns + (head * table.panels + panel) * column_bytes<E>(d, 1));
  if (table.rows == nullptr) return;
  const int64_t steps = kPanel / kPerStep<E>;
  pack_rows<E>(rows.data, rows.stride, kPanel, d, table.panels * steps,
               table.rows + head * row_bytes<E>(d, table.panels) + panel * steps * kStepBytes);
}

template <typename T>
void sum_table(const TableGradient<T>& args, int64_t head) {
  const int64_t d = args.head_dim, head_bytes = relative_sum_bytes(d, args.panels);
  const Floats scale = set1(args.softmax_scale);
  for (int64_t row = 0; row < args.num_rows; ++row) {
    T* out = args.out + row * args.row_stride + head * args.head_stride;
    for (int64_t dim = 0; dim < d; dim += kWidth) {
      Floats total = set1(0.0f);
      for (int64_t group = 0; group < args.groups; ++group) {
        const char* sums = args.sums + (group * args.num_heads + head) * head_bytes;
        const auto* from =
            reinterpret_cast<const float*>(sums) + dim / kPanel * args.panels * kPanel * kPanel + dim % kPanel;
        // Many distances may share a row, whose sums nearly cancel.
        constexpr int64_t kChain = 16;
        for (int64_t i = args.begin[row]; i < args.begin[row + 1]; i += kChain) {
          Floats chain = set1(0.0f);
          for (int64_t j = i; j < std::min<int64_t>(i + kChain, args.begin[row + 1]); ++j) {
            chain = add(chain, load(from + args.columns[j] * kPanel));
          }
          total = add(total, chain);
        }
      }
      store_columns(out + dim, mul(total, scale), d - dim);
    }
  }
}

void table_gradient(const TableGradient<float>& args, int64_t head) { sum_table(args, head); }
void table_gradient(const TableGradient<BFloat16>& args, int64_t head) { sum_table(args, head); }

int64_t table_column_bytes(const float*, int64_t head_dim, int64_t panels) {
  return column_bytes<float>(head_dim, panels);
}
int64_t table_row_bytes(const float*, int64_t head_dim, int64_t panels) { return row_bytes<float>(head_dim, panels); }
void pack_table(const PackTable<float>& table, int64_t head, int64_t panel) { pack_panel<float>(table, head, panel); }

#if defined(FASTBERT_BF16)
using BFloat16Operand = BFloat16;
#else
using BFloat16Operand = float;
#endif
int64_t table_column_bytes(const BFloat16*, int64_t head_dim, int64_t panels) {
  return column_bytes<BFloat16Operand>(head_dim, panels);
}
int64_t table_row_bytes(const BFloat16*, int64_t head_dim, int64_t panels) {
  return row_bytes<BFloat16Operand>(head_dim, panels);
}
void pack_table(const PackTable<BFloat16>& table, int64_t head, int64_t panel) {
  pack_panel<BFloat16Operand>(table, head, panel);
}
