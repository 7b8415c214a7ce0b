#include <algorithm>
#include <atomic>
#include <type_traits>

#include "../include/scratch.h"
#include "attention_relative.h"
#include "gemm.h"

#define FASTBERT_BODY "../cpu/attention_relative_pack_body.h"
#define FASTBERT_USES_AMX
#include "../include/foreach_isa.h"

namespace fastbert {

template <typename T>
int64_t table_column_bytes(const T* dtype, int64_t head_dim, int64_t panels) {
  FASTBERT_RUN(table_column_bytes, dtype, head_dim, panels);
}

template <typename T>
int64_t table_row_bytes(const T* dtype, int64_t head_dim, int64_t panels) {
  FASTBERT_RUN(table_row_bytes, dtype, head_dim, panels);
}

template <typename T>
void pack_table(const PackTable<T>& table, int64_t head, int64_t panel) {
  FASTBERT_RUN(pack_table, table, head, panel);
}

template <typename T>
void table_gradient(const TableGradient<T>& args, int64_t head) {
  FASTBERT_RUN(table_gradient, args, head);
}

template void table_gradient(const TableGradient<float>&, int64_t);
template void table_gradient(const TableGradient<BFloat16>&, int64_t);
template int64_t table_column_bytes(const float*, int64_t, int64_t);
template int64_t table_column_bytes(const BFloat16*, int64_t, int64_t);
template int64_t table_row_bytes(const float*, int64_t, int64_t);
template int64_t table_row_bytes(const BFloat16*, int64_t, int64_t);
template void pack_table(const PackTable<float>&, int64_t, int64_t);
template void pack_table(const PackTable<BFloat16>&, int64_t, int64_t);

}  // namespace fastbert
