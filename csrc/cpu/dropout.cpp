#include "dropout.h"

#include <algorithm>

#define FASTBERT_BODY "../cpu/dropout_body.h"
#include "../include/foreach_isa.h"

namespace fastbert {

void draw_multipliers(const Dropout& dropout, int64_t row, int64_t width, float* multipliers) {
  FASTBERT_RUN(draw_multipliers, dropout, row, width, multipliers);
}

void dropout_rows(const DropoutArgs<float>& args, int64_t begin, int64_t end) {
  FASTBERT_RUN(dropout_rows, args, begin, end);
}

void dropout_rows(const DropoutArgs<BFloat16>& args, int64_t begin, int64_t end) {
  FASTBERT_RUN(dropout_rows, args, begin, end);
}

}  // namespace fastbert
