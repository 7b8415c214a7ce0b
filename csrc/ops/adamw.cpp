#include "adamw.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "../cpu/adamw.h"
#include "tensors.h"

namespace fastbert {
namespace {

constexpr int64_t kChunk = 16384;  // elements: what a thread takes at a time, whatever tensor they are of

// Elements [begin, end) of tensor `tensor`.
struct Chunk {
  size_t tensor;
  int64_t begin, end;
};

std::vector<Chunk> chunks_of(const std::vector<AdamWArgs<float>>& tensors, const std::vector<int64_t>& sizes) {
  std::vector<Chunk> found;
  for (size_t i = 0; i < tensors.size(); ++i) {
    for (int64_t at = 0; at < sizes[i]; at += kChunk) found.push_back({i, at, std::min(at + kChunk, sizes[i])});
  }
  return found;
}

// The same bits for any number of threads: each chunk's sum has its own place.
double norm_of(const std::vector<AdamWArgs<float>>& tensors, const std::vector<Chunk>& chunks) {
  std::vector<double> sums(chunks.size());
  parallel_for(0, static_cast<int64_t>(chunks.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Chunk& chunk = chunks[static_cast<size_t>(i)];
      sum_of_squares(tensors[chunk.tensor].gradient, chunk.begin, chunk.end, &sums[static_cast<size_t>(i)]);
    }
  });
  double total = 0;
  for (double sum : sums) total += sum;
  return std::sqrt(total);
}

}  // namespace

Array adamw_cpu(const List<Array>& weights, const List<Array>& gradients, const List<Array>& means,
                const List<Array>& squares, const List<Array>& steps, const std::vector<double>& rates,
                const std::vector<double>& decays, double beta1, double beta2, double eps, double max_norm) {
  const size_t count = weights.size();
  check(gradients.size() == count && means.size() == count && squares.size() == count && steps.size() == count &&
            rates.size() == count && decays.size() == count,
        "adamw: ", count, " weights, but other numbers of what goes with them");
  std::vector<AdamWArgs<float>> tensors;
  std::vector<int64_t> sizes;
  for (size_t i = 0; i < count; ++i) {
    const Array weight = weights[i];
    const auto in_place = [&](const char* name, const Array& t) {
      check(t.scalar_type() == ScalarType::Float && t.is_contiguous() && t.is_cpu() && t.sizes() == weight.sizes(),
            "adamw: ", name, " ", i, " has shape ", t.sizes(), ", expected contiguous float32 ", weight.sizes());
      return t.data<float>();
    };
    check(steps[i].scalar_type() == ScalarType::Float && steps[i].numel() == 1, "adamw: step ", i, " is no number");
    float* step = steps[i].data<float>();
    const double n = static_cast<double>(*step) + 1;
    tensors.push_back({in_place("weight", weight), in_place("gradient", gradients[i]), in_place("mean", means[i]),
                       in_place("square", squares[i]), 1.0f, static_cast<float>(1 - rates[i] * decays[i]),
                       static_cast<float>(rates[i] / (1 - std::pow(beta1, n))),
                       static_cast<float>(1 / std::sqrt(1 - std::pow(beta2, n))), static_cast<float>(1 - beta1),
                       static_cast<float>(1 - beta2), static_cast<float>(eps)});
    sizes.push_back(weight.numel());
  }
  for (size_t i = 0; i < count; ++i) *steps[i].data<float>() += 1;
  const std::vector<Chunk> chunks = chunks_of(tensors, sizes);
  double norm = std::numeric_limits<double>::quiet_NaN();
  if (max_norm > 0) {
    norm = norm_of(tensors, chunks);
    const double clip = std::min(1.0, max_norm / (norm + 1e-6));  // as torch.nn.utils.clip_grad_norm_ has it
    // A norm that is no number is to show in the weights: min() would hide it.
    for (auto& tensor : tensors) tensor.clip = static_cast<float>(std::isnan(norm) ? norm : clip);
  }
  parallel_for(0, static_cast<int64_t>(chunks.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Chunk& chunk = chunks[static_cast<size_t>(i)];
      adamw(tensors[chunk.tensor], chunk.begin, chunk.end);
    }
  });
  const Array result = empty({}, ScalarType::Float);
  *result.data<float>() = static_cast<float>(norm);
  return result;
}

}  // namespace fastbert
