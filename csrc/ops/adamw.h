// The registered operators adamw_cpu and adamw_deferred_cpu (fastbert/ops/optim/adamw.py has their schemas).
#pragma once

#include <vector>

#include "register.h"

namespace fastbert {

Array adamw_cpu(const List<Array>& weights, const List<Array>& gradients, const List<OptionalArray>& rows,
                const List<Array>& means, const List<Array>& squares, const List<Array>& steps,
                const List<Array>& dones, const List<Array>& histories, const std::vector<int64_t>& counts,
                const std::vector<double>& rates, const std::vector<double>& decays, double beta1, double beta2,
                double eps, double max_norm);

void adamw_deferred_cpu(const Array& weight, const Array& mean, const Array& square, const Array& done,
                        const OptionalArray& rows, const Array& history, int64_t count);

}  // namespace fastbert
