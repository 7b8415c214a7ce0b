#include "checksum.h"

#include <algorithm>

#define FASTBERT_BODY "../cpu/checksum_body.h"
#include "../include/foreach_isa.h"

namespace fastbert {

uint64_t checksum(const char* memory, int64_t lines, int64_t bytes, int64_t stride) {
  FASTBERT_RUN(checksum, memory, lines, bytes, stride);
}

}  // namespace fastbert
