// The memory of what int8 panels are split of (../cpu/gemm.h).
#pragma once

#include <cstdint>
#include <vector>

#include "../cpu/gemm.h"

namespace fastbert {

// Where the residuals of each column of a weight begin, and how many there are; empty where the ISA in use wants whole
// panels.
std::vector<int32_t> residual_begins(const PackArgs& args);

// The bytes that they take; 0 of an empty list.
int64_t residual_bytes(const std::vector<int32_t>& begins);

// Splits the panels that pack_panels has written, into `memory` of that size.
void split_panels_into(char* memory, const PackArgs& args, const std::vector<int32_t>& begins);

// Of such memory; of null, none.
Residuals residuals_in(const char* memory, int64_t out_features);

}  // namespace fastbert
