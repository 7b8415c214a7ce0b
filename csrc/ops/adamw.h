// The registered operator adamw_cpu (fastbert/ops/adamw.py has its schema).
#pragma once

#include <vector>

#include "register.h"

namespace fastbert {

Array adamw_cpu(const List<Array>& weights, const List<Array>& gradients, const List<OptionalArray>& rows,
                const List<Array>& means, const List<Array>& squares, const List<Array>& steps,
                const std::vector<double>& rates, const std::vector<double>& decays, double beta1, double beta2,
                double eps, double max_norm);

}  // namespace fastbert
