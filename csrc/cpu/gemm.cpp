#include "gemm.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <deque>
#include <type_traits>
#include <vector>

#include "../include/scratch.h"

#define FASTBERT_BODY "../cpu/gemm_body.h"
#define FASTBERT_USES_VNNI
#define FASTBERT_USES_AMX
#include "../include/foreach_isa.h"

namespace fastbert {

bool has_bf16_dot() { return current_isa().load(std::memory_order_relaxed) >= Isa::kAvx512Bf16; }

int64_t row_group() { return current_isa().load(std::memory_order_relaxed) == Isa::kAmx ? 32 : 1; }

void pack_panels(const PackArgs& args, int64_t begin, int64_t end) { FASTBERT_RUN(pack_panels, args, begin, end); }

void panel_sums(const char* panel, DType format, int64_t in_features, void* out, DType out_dtype, int64_t columns) {
  FASTBERT_RUN(panel_sums, panel, format, in_features, out, out_dtype, columns);
}

void convert_rows(const RowsArg& x, int64_t begin, int64_t end, const PackedWeight& weight, char* out, float* scales) {
  FASTBERT_RUN(convert_rows, x, begin, end, weight, out, scales);
}

void gemm(const GemmArgs& args, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end) {
  FASTBERT_RUN(gemm, args, row_begin, row_end, panel_begin, panel_end);
}

void gemm_transposed(const GemmTransposedArgs& args, int64_t begin, int64_t end) {
  FASTBERT_RUN(gemm_transposed, args, begin, end);
}

void column_sums(const RowsArg& x, int64_t rows, void* out, DType out_dtype, int64_t begin, int64_t end) {
  FASTBERT_RUN(column_sums, x, rows, out, out_dtype, begin, end);
}

void activation_bwd(const ActivationBwd& args, int64_t begin, int64_t end) {
  FASTBERT_RUN(activation_bwd, args, begin, end);
}

}  // namespace fastbert
