#include "adamw.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "../cpu/adamw.h"
#include "packed_weights.h"
#include "tensors.h"

namespace fastbert {
namespace {

constexpr int64_t kChunk = 16384;  // elements: what a thread takes at a time, whatever tensor they are of

// One weight and what goes with it. Where it has rows, the gradient is that of these rows of `width` elements.
struct Entry {
  AdamWArgs<float> args;
  int64_t size, gradient_size;
  bool has_rows;
  const int64_t* rows;
  int64_t row_count, width;
  Renewal packed;  // empty where it has rows
};

// Elements [begin, end) of entry `entry`.
struct Chunk {
  size_t entry;
  int64_t begin, end;
};

template <typename Length>
std::vector<Chunk> chunks_of(const std::vector<Entry>& entries, int64_t Entry::* size, const Length& length_of) {
  std::vector<Chunk> found;
  for (size_t i = 0; i < entries.size(); ++i) {
    const int64_t length = length_of(entries[i]);
    for (int64_t at = 0; at < entries[i].*size; at += length) {
      found.push_back({i, at, std::min(at + length, entries[i].*size)});
    }
  }
  return found;
}

// The same bits for any number of threads: each chunk's sum has its own place.
double norm_of(const std::vector<Entry>& entries) {
  const std::vector<Chunk> chunks = chunks_of(entries, &Entry::gradient_size, [](const Entry&) { return kChunk; });
  std::vector<double> sums(chunks.size());
  run_tasks(static_cast<int64_t>(chunks.size()), [&](int64_t task) {
    const Chunk& chunk = chunks[static_cast<size_t>(task)];
    sum_of_squares(entries[chunk.entry].args.gradient, chunk.begin, chunk.end, &sums[static_cast<size_t>(task)]);
  });
  double total = 0;
  for (double sum : sums) total += sum;
  return std::sqrt(total);
}

// Rows without a gradient read zeros that stay in the cache: a table's gradient is never there as a whole.
void step_rows(const Entry& entry, int64_t begin, int64_t end) {
  static const std::vector<float> zeros(kChunk);
  const int64_t* const last = entry.rows + entry.row_count;
  const int64_t* next = std::lower_bound(entry.rows, last, begin / entry.width);
  while (begin < end) {
    AdamWArgs<float> part = entry.args;
    part.weight += begin;
    part.mean += begin;
    part.square += begin;
    int64_t stop = end;
    if (next != last && *next == begin / entry.width) {
      part.gradient += (next - entry.rows) * entry.width + begin % entry.width;
      stop = std::min(stop, (*next + 1) * entry.width);
      ++next;
    } else {
      part.gradient = zeros.data();
      if (next != last) stop = std::min(stop, *next * entry.width);
    }
    adamw(part, 0, stop - begin);
    begin = stop;
  }
}

void check_rows(const Array& rows, int64_t limit, size_t i) {
  check(rows.dim() == 1 && rows.scalar_type() == ScalarType::Long && rows.is_contiguous() && rows.is_cpu(),
        "adamw: rows ", i, " have shape ", rows.sizes(), ", expected contiguous int64 (rows,)");
  const auto* row = rows.data<const int64_t>();
  int64_t before = -1;
  for (int64_t k = 0; k < rows.numel(); before = row[k++]) {
    check(row[k] > before && row[k] < limit, "adamw: rows ", i, " are not ascending, or not below ", limit);
  }
}

}  // namespace

Array adamw_cpu(const List<Array>& weights, const List<Array>& gradients, const List<OptionalArray>& rows,
                const List<Array>& means, const List<Array>& squares, const List<Array>& steps,
                const std::vector<double>& rates, const std::vector<double>& decays, double beta1, double beta2,
                double eps, double max_norm) {
  const size_t count = weights.size();
  check(gradients.size() == count && rows.size() == count && means.size() == count && squares.size() == count &&
            steps.size() == count && rates.size() == count && decays.size() == count,
        "adamw: ", count, " weights, but other numbers of what goes with them");
  std::vector<Entry> entries;
  for (size_t i = 0; i < count; ++i) {
    const Array weight = weights[i];
    const auto floats = [&](const char* name, const Array& t, bool fits) {
      check(fits && t.scalar_type() == ScalarType::Float && t.is_contiguous() && t.is_cpu(), "adamw: ", name, " ", i,
            " has shape ", t.sizes(), ", expected contiguous float32 for a weight of ", weight.sizes());
      return t.data<float>();
    };
    const auto whole = [&](const char* name, const Array& t) { return floats(name, t, t.sizes() == weight.sizes()); };
    const int64_t numel = weight.numel(), width = weight.dim() > 0 ? numel / std::max<int64_t>(1, weight.size(0)) : 1;
    Entry entry{{}, numel, numel, false, nullptr, 0, width, {}};
    const OptionalArray chosen = rows[i];
    const Array gradient = gradients[i];
    bool fits = gradient.sizes() == weight.sizes();
    if (chosen.defined()) {
      check(weight.dim() > 0 && weight.size(0) > 0, "adamw: weight ", i, " has no rows");
      check_rows(chosen, weight.size(0), i);
      entry.has_rows = true;
      entry.rows = chosen.data<const int64_t>();
      entry.row_count = chosen.numel();
      entry.gradient_size = entry.row_count * entry.width;
      fits = gradient.dim() > 0 && gradient.size(0) == entry.row_count && gradient.numel() == entry.gradient_size;
    } else {
      entry.packed = Renewal(weight);
    }
    check(steps[i].scalar_type() == ScalarType::Float && steps[i].numel() == 1, "adamw: step ", i, " is no number");
    const double n = static_cast<double>(*steps[i].data<float>()) + 1;
    entry.args = {whole("weight", weight),
                  floats("gradient", gradient, fits),
                  whole("mean", means[i]),
                  whole("square", squares[i]),
                  1.0f,
                  static_cast<float>(1 - rates[i] * decays[i]),
                  static_cast<float>(rates[i] / (1 - std::pow(beta1, n))),
                  static_cast<float>(1 / std::sqrt(1 - std::pow(beta2, n))),
                  static_cast<float>(1 - beta1),
                  static_cast<float>(1 - beta2),
                  static_cast<float>(eps)};
    entries.push_back(entry);
  }
  for (size_t i = 0; i < count; ++i) *steps[i].data<float>() += 1;
  double norm = std::numeric_limits<double>::quiet_NaN();
  if (max_norm > 0) {
    norm = norm_of(entries);
    const double clip = std::min(1.0, max_norm / (norm + 1e-6));  // as torch.nn.utils.clip_grad_norm_ has it
    // A norm that is no number is to show in the weights: min() would hide it.
    for (auto& entry : entries) entry.args.clip = static_cast<float>(std::isnan(norm) ? norm : clip);
  }
  const auto length_of = [](const Entry& entry) { return entry.packed.empty() ? kChunk : kPanel * entry.width; };
  const std::vector<Chunk> chunks = chunks_of(entries, &Entry::size, length_of);
  run_tasks(static_cast<int64_t>(chunks.size()), [&](int64_t task) {
    const Chunk& chunk = chunks[static_cast<size_t>(task)];
    const Entry& entry = entries[chunk.entry];
    entry.has_rows ? step_rows(entry, chunk.begin, chunk.end) : adamw(entry.args, chunk.begin, chunk.end);
    if (!entry.packed.empty()) entry.packed.pack(chunk.begin / entry.width, chunk.end / entry.width);
  });
  for (const Entry& entry : entries) entry.packed.finish();
  const Array result = empty({}, ScalarType::Float);
  *result.data<float>() = static_cast<float>(norm);
  return result;
}

}  // namespace fastbert
