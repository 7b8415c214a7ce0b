#include "adamw.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <tuple>

#include "../cpu/adamw.h"
#include "gradients.h"
#include "packed_weights.h"
#include "tensors.h"

namespace fastbert {
namespace {

constexpr int64_t kChunk = 16384;  // elements: what a thread takes at a time, whatever tensor they are of

// A row of a history, as tensors have it.
using Step = AdamWStep<float>;
constexpr int64_t kNumbers = 6;
static_assert(sizeof(Step) == kNumbers * sizeof(float));

// One weight and what goes with it. Where it has rows, the gradient is that of these rows of `width` elements, and only
// they take the step: the others' is written down.
struct Entry {
  AdamWArgs<float> args;
  int64_t size, gradient_size;  // size: of what takes the step
  bool has_rows;
  const int64_t* rows;
  int64_t row_count, width;
  Renewal packed;  // empty where it has rows
  int32_t* done;   // of each row of the weight: how many steps of the history it has had
  Step* history;
  int64_t count;  // of steps in the history, before this one
};

// Elements [begin, end) of entry `entry`.
struct Chunk {
  size_t entry;
  int64_t begin, end;
};

template <typename Length>
std::vector<Chunk> chunks_of(const std::vector<Entry>& entries, int64_t Entry::* size, const Length& length_of) {
  std::vector<Chunk> chunks;
  for (size_t i = 0; i < entries.size(); ++i) {
    const int64_t length = length_of(entries[i]);
    for (int64_t at = 0; at < entries[i].*size; at += length) {
      chunks.push_back({i, at, std::min(at + length, entries[i].*size)});
    }
  }
  return chunks;
}

// The same bits for any number of threads: each chunk's sum has its own place. `known`: of those entries whose gradient
// need not be read, the sum of its squares.
double norm_of(const std::vector<Entry>& entries, const std::vector<std::optional<double>>& known) {
  std::vector<Chunk> chunks = chunks_of(entries, &Entry::gradient_size, [](const Entry&) { return kChunk; });
  const auto is_known = [&](const Chunk& chunk) { return known[chunk.entry].has_value(); };
  chunks.erase(std::remove_if(chunks.begin(), chunks.end(), is_known), chunks.end());
  std::vector<double> sums(chunks.size());
  run_tasks(static_cast<int64_t>(chunks.size()), [&](int64_t task) {
    const Chunk& chunk = chunks[static_cast<size_t>(task)];
    sum_of_squares(entries[chunk.entry].args.gradient, chunk.begin, chunk.end, &sums[static_cast<size_t>(task)]);
  });
  double total = 0;
  for (double sum : sums) total += sum;
  for (const auto& sum : known) total += sum.value_or(0.0);
  return std::sqrt(total);
}

// Rows number [begin, end) of those with a gradient.
void step_rows(const Entry& entry, int64_t begin, int64_t end) {
  AdamWArgs<float> part = entry.args;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t row = entry.rows[i], at = row * entry.width;
    part.weight = entry.args.weight + at, part.mean = entry.args.mean + at, part.square = entry.args.square + at;
    part.gradient = entry.args.gradient + i * entry.width;
    adamw(part, 0, entry.width);
    entry.done[row] = static_cast<int32_t>(entry.count + 1);
  }
}

void check_rows(const Array& rows, int64_t limit) {
  check(rows.dim() == 1 && rows.scalar_type() == ScalarType::Long && rows.is_contiguous() && rows.is_cpu(),
        "adamw: rows have shape ", rows.sizes(), ", expected contiguous int64 (rows,)");
  const auto* row = rows.data<const int64_t>();
  int64_t before = -1;
  for (int64_t k = 0; k < rows.numel(); before = row[k++]) {
    check(row[k] > before && row[k] < limit, "adamw: rows are not ascending, or not below ", limit);
  }
}

// How many steps each row has had, and the history in which they count.
std::tuple<int32_t*, Step*> checked_deferred(const Array& done, const Array& history, int64_t rows, int64_t least) {
  check(done.is_cpu() && done.scalar_type() == ScalarType::Int && done.is_contiguous() && done.sizes() == Shape{rows},
        "adamw: done has shape ", done.sizes(), ", expected contiguous int32 (", rows, ",)");
  check(history.is_cpu() && history.scalar_type() == ScalarType::Float && history.is_contiguous() &&
            history.dim() == 2 && history.size(1) == kNumbers && history.size(0) >= least,
        "adamw: the history has shape ", history.sizes(), ", expected contiguous float32 (", least, " or more, ",
        kNumbers, ")");
  return {done.data<int32_t>(), history.data<Step>()};
}

}  // namespace

Array adamw_cpu(const List<Array>& weights, const List<Array>& gradients, const List<OptionalArray>& rows,
                const List<Array>& means, const List<Array>& squares, const List<Array>& steps,
                const List<Array>& dones, const List<Array>& histories, const std::vector<int64_t>& counts,
                const std::vector<double>& rates, const std::vector<double>& decays, double beta1, double beta2,
                double eps, double max_norm) {
  const size_t count = weights.size();
  check(gradients.size() == count && rows.size() == count && means.size() == count && squares.size() == count &&
            steps.size() == count && rates.size() == count && decays.size() == count,
        "adamw: ", count, " weights, but other numbers of what goes with them");
  size_t tables = 0;
  for (size_t i = 0; i < count; ++i) tables += rows[i].defined();
  check(dones.size() == tables && histories.size() == tables && counts.size() == tables, "adamw: ", tables,
        " weights have rows, but there are other numbers of histories");
  std::vector<Entry> entries;
  entries.reserve(count);
  std::vector<std::optional<double>> known(count);
  size_t table = 0;
  for (size_t i = 0; i < count; ++i) {
    const Array weight = weights[i];
    const auto floats = [&](const char* name, const Array& t, bool fits) {
      check(fits && t.scalar_type() == ScalarType::Float && t.is_contiguous() && t.is_cpu(), "adamw: ", name, " ", i,
            " has shape ", t.sizes(), ", expected contiguous float32 for a weight of ", weight.sizes());
      return t.data<float>();
    };
    const auto whole = [&](const char* name, const Array& t) { return floats(name, t, t.sizes() == weight.sizes()); };
    const int64_t numel = weight.numel(), width = weight.dim() > 0 ? numel / std::max<int64_t>(1, weight.size(0)) : 1;
    Entry entry{{}, numel, numel, false, nullptr, 0, width, {}, nullptr, nullptr, 0};
    const OptionalArray chosen = rows[i];
    const Array gradient = gradients[i];
    bool fits = gradient.sizes() == weight.sizes();
    if (chosen.defined()) {
      check(weight.dim() > 0 && weight.size(0) > 0, "adamw: weight ", i, " has no rows");
      check_rows(chosen, weight.size(0));
      entry.has_rows = true;
      entry.rows = chosen.data<const int64_t>();
      entry.row_count = chosen.numel();
      entry.size = entry.gradient_size = entry.row_count * entry.width;
      entry.count = counts[table];
      check(entry.count >= 0, "adamw: a history has ", entry.count, " steps");
      std::tie(entry.done, entry.history) =
          checked_deferred(dones[table], histories[table], weight.size(0), entry.count + 1);
      ++table;
      for (int64_t k = 0; k < entry.row_count; ++k) {
        check(entry.done[entry.rows[k]] == entry.count, "adamw: row ", entry.rows[k], " of weight ", i,
              " has a gradient from before it took all of its steps");
      }
      fits = gradient.dim() > 0 && gradient.size(0) == entry.row_count && gradient.numel() == entry.gradient_size;
    } else {
      entry.packed = Renewal(weight);
      if (max_norm > 0 && only_recorded_writes()) known[i] = known_squares(weight, gradient);
    }
    check(steps[i].scalar_type() == ScalarType::Float && steps[i].numel() == 1, "adamw: step ", i, " is no number");
    const double n = static_cast<double>(*steps[i].data<float>()) + 1;
    entry.args = {
        whole("weight", weight),
        floats("gradient", gradient, fits),
        whole("mean", means[i]),
        whole("square", squares[i]),
        1.0f,
        beta1 * beta1 > beta2,
        {static_cast<float>(1 - rates[i] * decays[i]), static_cast<float>(rates[i] / (1 - std::pow(beta1, n))),
         static_cast<float>(1 / std::sqrt(1 - std::pow(beta2, n))), static_cast<float>(1 - beta1),
         static_cast<float>(1 - beta2), static_cast<float>(eps)}};
    entries.push_back(entry);
  }
  for (size_t i = 0; i < count; ++i) {
    *steps[i].data<float>() += 1;
    const Entry& entry = entries[i];
    if (entry.has_rows) entry.history[entry.count] = entry.args.step;
  }
  double norm = std::numeric_limits<double>::quiet_NaN();
  if (max_norm > 0) {
    norm = norm_of(entries, known);
    const double clip = std::min(1.0, max_norm / (norm + 1e-6));  // as torch.nn.utils.clip_grad_norm_ has it
    // A norm that is no number is to show in the weights: min() would hide it.
    for (auto& entry : entries) entry.args.clip = static_cast<float>(std::isnan(norm) ? norm : clip);
  }
  const auto length_of = [](const Entry& entry) {
    if (entry.has_rows) return std::max<int64_t>(1, kChunk / std::max<int64_t>(1, entry.width)) * entry.width;
    return entry.packed.empty() ? kChunk : kPanel * entry.width;
  };
  const std::vector<Chunk> chunks = chunks_of(entries, &Entry::size, length_of);
  run_tasks(static_cast<int64_t>(chunks.size()), [&](int64_t task) {
    const Chunk& chunk = chunks[static_cast<size_t>(task)];
    const Entry& entry = entries[chunk.entry];
    if (entry.has_rows) return step_rows(entry, chunk.begin / entry.width, chunk.end / entry.width);
    adamw(entry.args, chunk.begin, chunk.end);
    if (!entry.packed.empty()) entry.packed.pack(chunk.begin / entry.width, chunk.end / entry.width);
  });
  for (const Entry& entry : entries) entry.packed.finish();
  const Array result = empty({}, ScalarType::Float);
  *result.data<float>() = static_cast<float>(norm);
  return result;
}

void adamw_deferred_cpu(const Array& weight, const Array& mean, const Array& square, const Array& done,
                        const OptionalArray& rows, const Array& history, int64_t count) {
  check(weight.dim() > 0 && weight.size(0) > 0, "adamw: the weight has shape ", weight.sizes(), ", and no rows");
  const auto floats = [&](const char* name, const Array& t) {
    check(t.sizes() == weight.sizes() && t.scalar_type() == ScalarType::Float && t.is_contiguous() && t.is_cpu(),
          "adamw: ", name, " has shape ", t.sizes(), ", expected contiguous float32 ", weight.sizes());
    return t.data<float>();
  };
  const int64_t height = weight.size(0), width = weight.numel() / height;
  const auto [had, steps] = checked_deferred(done, history, height, count);
  std::vector<int64_t> chosen;  // each once, in order
  if (rows.defined()) {
    check(rows.dim() == 1 && rows.scalar_type() == ScalarType::Long && rows.is_contiguous() && rows.is_cpu(),
          "adamw: rows have shape ", rows.sizes(), ", expected contiguous int64 (rows,)");
    chosen.assign(rows.data<const int64_t>(), rows.data<const int64_t>() + rows.numel());
    std::sort(chosen.begin(), chosen.end());
    chosen.erase(std::unique(chosen.begin(), chosen.end()), chosen.end());
    check(chosen.empty() || (chosen.front() >= 0 && chosen.back() < height), "adamw: rows are not below ", height);
  }
  const int64_t count_of_rows = rows.defined() ? static_cast<int64_t>(chosen.size()) : height;
  const auto row_at = [&](int64_t k) { return rows.defined() ? chosen[static_cast<size_t>(k)] : k; };
  const bool mean_outlives = std::any_of(steps, steps + count, [](const Step& step) {
    return (1 - step.new_mean) * (1 - step.new_mean) > 1 - step.new_square;
  });
  const AdamWArgs<float> all{floats("the weight", weight),
                             nullptr,
                             floats("the mean", mean),
                             floats("the square", square),
                             1.0f,
                             mean_outlives,
                             {}};
  for (int64_t k = 0; k < count_of_rows; ++k) {
    const int32_t had_before = had[row_at(k)];
    check(had_before >= 0 && had_before <= count, "adamw: a row has had ", had_before, " of ", count, " steps");
  }
  constexpr int64_t kRows = 8;  // that a thread takes at a time: they lack very different numbers of steps
  run_tasks((count_of_rows + kRows - 1) / kRows, [&, had = had, steps = steps](int64_t task) {
    for (int64_t k = task * kRows; k < std::min(count_of_rows, (task + 1) * kRows); ++k) {
      const int64_t row = row_at(k);
      if (had[row] == count) continue;
      adamw_deferred(all, steps + had[row], count - had[row], row * width, (row + 1) * width);
      had[row] = static_cast<int32_t>(count);
    }
  });
}

}  // namespace fastbert
