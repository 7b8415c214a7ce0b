#include "attention_relative.h"

#include <algorithm>
#include <vector>

#include "../cpu/attention_relative.h"
#include "attention_distances.h"
#include "attention_operands.h"
#include "workspace.h"

namespace fastbert {
namespace {

// Relative terms as the kernels read them, and the memory of what they point to.
struct PreparedTerms {
  RelativeTerms terms{};
  Distances distances;
  Array places, packed_key, packed_query, bias;
};

// The most places that a sequence spans, as `places` has them, or as its tokens follow each other.
int64_t checked_reach(const std::vector<int64_t>& offsets, const int32_t* places, int64_t longest) {
  int64_t reach = 0;
  for (size_t i = 1; i < offsets.size(); ++i) {
    const int64_t first = offsets[i - 1], end = offsets[i];
    if (places == nullptr) {
      check(end - first <= longest, "relative.rows serves ", longest, " places, sequence ", i - 1, " has ", end - first,
            " tokens");
      reach = std::max(reach, end - first);
      continue;
    }
    for (int64_t t = first + 1; t < end; ++t) {
      check(places[t] > places[t - 1], "relative.positions falls or stands still at token ", t,
            "; it must ascend within a sequence");
    }
    const int64_t spread = end > first ? int64_t{places[end - 1]} - places[first] : -1;
    check(spread < longest, "relative.positions has places ", spread, " apart in a sequence; relative.rows serves ",
          longest, " places");
    reach = std::max(reach, spread + 1);
  }
  return reach;
}

// A head's row for each distance ahead from 1 - reach on, and the same turned over, behind those of all heads.
Array expanded_bias(const Array& bias, const int32_t* rows, int64_t longest, RelativeTerms& terms) {
  constexpr int64_t kRead = 16;  // beyond the last, in whole vectors
  const int64_t num_heads = bias.size(1), distances = 2 * terms.reach - 1;
  terms.bias_stride = distances + kRead;
  const Array buffer = workspace({2, num_heads, terms.bias_stride}, ScalarType::Float);
  auto *ahead = buffer.data<float>(), *behind = ahead + num_heads * terms.bias_stride;
  const auto* from = bias.data<const float>();
  for (int64_t head = 0; head < num_heads; ++head, ahead += terms.bias_stride, behind += terms.bias_stride) {
    for (int64_t i = 0; i < distances; ++i) {
      const int32_t row = rows[longest - terms.reach + i];  // of a query's place less a key's
      behind[i] = ahead[distances - 1 - i] = from[row * bias.stride(0) + head * bias.stride(1)];
    }
    std::fill_n(ahead + distances, kRead, 0.0f);
    std::fill_n(behind + distances, kRead, 0.0f);
  }
  terms.bias = buffer.data<const float>();
  terms.bias_turned = terms.bias + num_heads * terms.bias_stride;
  return buffer;
}

template <typename T>
PackTable<T> table_to_pack(const Array& table, const DistanceColumns& columns, bool has_rows, Array& memory,
                           DistanceTable& packed) {
  const auto* dtype = static_cast<const T*>(nullptr);
  const int64_t num_heads = table.size(1), head_dim = table.size(2);
  const int64_t bytes = num_heads * table_column_bytes(dtype, head_dim, columns.panels) + kPackedSlack;
  const int64_t row_bytes = has_rows ? num_heads * table_row_bytes(dtype, head_dim, columns.panels) : 0;
  memory = workspace({(bytes + row_bytes) / 4}, ScalarType::Float);
  char* buffer = memory.data<char>();
  packed.columns = buffer, packed.rows = buffer + bytes;
  return {table.data<T>(),     table.stride(0), table.stride(1), head_dim,
          columns.rows.data(), columns.panels,  buffer,          has_rows ? buffer + bytes : nullptr};
}

// Throws where the terms do not fit q or the sequences.
PreparedTerms prepare(const RelativeInputs& relative, const Operands& operands, bool is_backward) {
  const Array& q = operands.q;
  check(operands.group() == 1, "relative terms are of as many heads as q has, ", operands.num_heads, "; k has ",
        operands.num_kv_heads);
  check(relative.rows.dim() == 1 && relative.rows.size(0) % 2 == 1, "relative.rows has shape ", relative.rows.sizes(),
        ", expected (2 * longest - 1,)");
  const Array rows = checked("relative.rows", relative.rows, relative.rows.sizes(), ScalarType::Int);
  const auto* row = rows.data<const int32_t>();
  const int64_t longest = (rows.size(0) + 1) / 2;
  int64_t num_rows = -1;
  for (const Array& table : {relative.key, relative.query, relative.bias}) {
    if (num_rows < 0 && table.defined()) num_rows = table.size(0);
  }
  check(num_rows >= 0, "relative has neither key nor query nor bias");
  for (int64_t i = 0; i < rows.size(0); ++i) {
    check(row[i] >= 0 && row[i] < num_rows, "relative.rows[", i, "] is ", row[i], "; the tables have ", num_rows,
          " rows");
  }
  PreparedTerms prepared;
  RelativeTerms& terms = prepared.terms;
  if (relative.positions.defined()) {
    prepared.places = checked("relative.positions", relative.positions, {operands.total_tokens}, ScalarType::Int);
    terms.places = prepared.places.data<const int32_t>();
  }
  terms.reach = checked_reach(operands.offsets, terms.places, longest);
  const Shape of_table{num_rows, operands.num_heads, q.size(2)};
  const auto checked_table = [&](const char* name, const Array& table) {
    return table.defined() ? with_rows(name, table, of_table, q) : Array();
  };
  const Array key = checked_table("relative.key", relative.key),
              query = checked_table("relative.query", relative.query);
  const Array bias =
      checked_if_defined("relative.bias", relative.bias, {num_rows, operands.num_heads}, ScalarType::Float, cpu());
  if (terms.reach == 0 || operands.num_heads == 0) return prepared;

  prepared.distances = Distances::of(row, longest, terms.reach);
  terms.clamped_left = prepared.distances.clamped_left, terms.clamped_right = prepared.distances.clamped_right;
  const DistanceColumns &ahead = prepared.distances.ahead, &behind = prepared.distances.behind;
  terms.key.first = ahead.first, terms.key.panels = ahead.panels;
  terms.query.first = behind.first, terms.query.panels = behind.panels;
  if (bias.defined()) prepared.bias = expanded_bias(bias, row, longest, terms);
  for_dtype(q.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    std::vector<PackTable<T>> tables;
    if (key.defined()) {
      tables.push_back(table_to_pack<T>(key, ahead, is_backward, prepared.packed_key, terms.key));
    }
    if (query.defined()) {
      tables.push_back(table_to_pack<T>(query, behind, is_backward, prepared.packed_query, terms.query));
    }
    constexpr int64_t kGrain = 8;  // panels: about 10 microseconds
    for (const PackTable<T>& table : tables) {
      parallel_for(0, operands.num_heads * table.panels, kGrain, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) pack_table(table, i / table.panels, i % table.panels);
      });
    }
  });
  return prepared;
}

// The sums of one term's gradients, of each group and head.
struct GradientSums {
  Array memory;
  int64_t stride = 0;  // floats

  GradientSums() = default;
  GradientSums(int64_t groups, int64_t num_heads, int64_t floats)
      : memory(workspace({groups, num_heads, floats}, ScalarType::Float)), stride(floats) {}

  float* of(int64_t group, int64_t head) const {
    return memory.defined() ? memory.data<float>() + (group * memory.size(1) + head) * stride : nullptr;
  }
};

template <typename T>
void write_table(const GradientSums& sums, const DistanceColumns& columns, double softmax_scale, const Array& out) {
  const ColumnsOfRows of_rows = ColumnsOfRows::of(columns.rows, out.size(0));
  const TableGradient<T> args{sums.memory.data<const char>(),
                              sums.memory.size(0),
                              sums.memory.size(1),
                              out.size(2),
                              columns.panels,
                              out.size(0),
                              of_rows.begin.data(),
                              of_rows.columns.data(),
                              static_cast<float>(softmax_scale),
                              out.data<T>(),
                              out.stride(0),
                              out.stride(1)};
  parallel_for(0, out.size(1), 1, [&](int64_t begin, int64_t end) {
    for (int64_t head = begin; head < end; ++head) table_gradient(args, head);
  });
}

// In double: many distances may share a row, whose sums nearly cancel.
void write_bias(const GradientSums& sums, const DistanceColumns& columns, const Array& out) {
  const int64_t num_heads = out.size(1);
  std::vector<double> dbias(static_cast<size_t>(out.numel()));
  for (int64_t group = 0; group < sums.memory.size(0); ++group) {
    for (int64_t head = 0; head < num_heads; ++head) {
      const float* from = sums.of(group, head);
      for (size_t i = 0; i < columns.rows.size(); ++i) {
        dbias[static_cast<size_t>(columns.rows[i] * num_heads + head)] += from[i];
      }
    }
  }
  std::transform(dbias.begin(), dbias.end(), out.data<float>(), [](double x) { return static_cast<float>(x); });
}

// `stats` is undefined where it is not wanted.
void run_forward(const Operands& operands, const RelativeInputs& relative, const Array& out, const Array& stats) {
  const PreparedTerms prepared = prepare(relative, operands, false);
  const int64_t end = operands.offsets.back(), padding_rows = operands.total_tokens - end;
  zero(out.narrow(0, end, padding_rows));
  if (stats.defined()) zero(stats.narrow(2, end, padding_rows));
  for_dtype(out.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const AttentionFwd<T> args{inputs<T>(operands), head_rows<T>(out), stats.defined() ? stats.data<float>() : nullptr,
                               operands.total_tokens};
    run_plan(make_plan(operands.offsets, operands.seen, operands.num_heads, 1, false),
             [&](const AttentionTask& task) { attention_relative_fwd(args, prepared.terms, task); });
  });
}

}  // namespace

void attention_relative_rows(const Array& q, const Array& k, const Array& v, const Array& cu_seqlens,
                             const AttentionOptions& options, const RelativeInputs& relative, const Array& out) {
  run_forward(checked_operands(q, k, v, cu_seqlens, options, {0.0, 0, 0}), relative, out, {});
}

std::tuple<Array, Array> attention_relative_fwd_cpu(const Array& q, const Array& k, const Array& v,
                                                    const Array& cu_seqlens, const OptionalArray& philox,
                                                    const AttentionOptions& options, const RelativeInputs& relative,
                                                    double dropout_p, bool return_stats) {
  const Operands operands = checked_operands(q, k, v, cu_seqlens, options, make_dropout(dropout_p, philox));
  const Array out = empty_like(q);
  const Array stats = empty({return_stats ? 2 : 0, q.size(1), q.size(0)}, ScalarType::Float);
  run_forward(operands, relative, out, return_stats ? stats : Array());
  return {out, stats};
}

RelativeGradients attention_relative_gradients(const Array& dout_, const Array& q, const Array& k, const Array& v,
                                               const Array& out_, const Array& softmax_stats, const Array& cu_seqlens,
                                               const OptionalArray& philox, const AttentionOptions& options,
                                               const RelativeInputs& relative, double dropout_p, const Array& dq,
                                               const Array& dk, const Array& dv) {
  const OptionalArray &key = relative.key, &query = relative.query, &bias = relative.bias;
  const Operands operands = checked_operands(q, k, v, cu_seqlens, options, make_dropout(dropout_p, philox));
  const int64_t total_tokens = operands.total_tokens, num_heads = operands.num_heads, end = operands.offsets.back();
  const Array out = with_rows("out", out_, q.sizes(), q), dout = with_rows("dout", dout_, q.sizes(), q);
  const Array stats = checked("softmax_stats", softmax_stats, {2, num_heads, total_tokens}, ScalarType::Float);
  const PreparedTerms prepared = prepare(relative, operands, true);
  const RelativeTerms& terms = prepared.terms;

  for (const Array& t : {dq, dk, dv}) zero(t.narrow(0, end, total_tokens - end));
  const auto like = [&](const Array& table) {
    return table.defined() ? empty_like(table) : empty({0}, q.scalar_type());
  };
  const Array dkey = like(key), dquery = like(query), dbias = like(bias);
  if (terms.reach == 0 || num_heads == 0) {
    for (const Array& t : {dkey, dquery, dbias}) zero(t);
    return {dkey, dquery, dbias};
  }

  // A group's sums are written, and read again, once for each distance; sums of the bias are a few numbers.
  constexpr int64_t kScoresOfDistance = 256, kLeastScores = 32768;
  const std::vector<size_t> ends =
      group_ends(operands.offsets, terms.has_tables() ? kScoresOfDistance * (2 * terms.reach - 1) : kLeastScores);
  const auto groups = static_cast<int64_t>(ends.size());
  std::vector<std::vector<AttentionTask>> tasks(ends.size());
  for (size_t group = 0, i = 0; group < ends.size(); ++group) {
    for (; i < ends[group]; ++i) {
      const int64_t first = operands.offsets[i], n = operands.offsets[i + 1] - first;
      if (n > 0) tasks[group].push_back({first, n, operands.seen.is_cut[i + 1] != 0, 0, num_heads, 0, n, 0, n});
    }
  }
  GradientSums of_key, of_query, of_bias;
  const auto floats = [&](int64_t panels) { return relative_sum_bytes(q.size(2), panels) / 4; };
  if (key.defined()) of_key = {groups, num_heads, floats(terms.key.panels)};
  if (query.defined()) of_query = {groups, num_heads, floats(terms.query.panels)};
  if (bias.defined()) of_bias = {groups, num_heads, terms.key.panels * kAttentionBlock};
  for_dtype(q.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const AttentionBwd<T> args{
        inputs<T>(operands), head_rows<const T>(out), head_rows<const T>(dout), stats.data<const float>(),
        head_rows<T>(dq),    head_rows<T>(dk),        head_rows<T>(dv),         total_tokens};
    run_tasks(groups * num_heads, [&](int64_t task) {
      const int64_t group = task / num_heads, head = task % num_heads;
      const auto& of_group = tasks[static_cast<size_t>(group)];
      const RelativeSums sums{reinterpret_cast<char*>(of_key.of(group, head)),
                              reinterpret_cast<char*>(of_query.of(group, head)), of_bias.of(group, head)};
      attention_relative_bwd(args, terms, sums, head, of_group.data(), static_cast<int64_t>(of_group.size()));
    });
    const Distances& distances = prepared.distances;
    if (key.defined()) write_table<T>(of_key, distances.ahead, options.softmax_scale, dkey);
    if (query.defined()) write_table<T>(of_query, distances.behind, options.softmax_scale, dquery);
  });
  if (bias.defined()) write_bias(of_bias, prepared.distances.ahead, dbias);
  return {dkey, dquery, dbias};
}

std::tuple<Array, Array> attention_relative_fwd_operator(
    const Array& q, const Array& k, const Array& v, const Array& cu_seqlens, const OptionalArray& philox,
    const OptionalArray& window_positions, const OptionalArray& num_keys, const Array& rows, const OptionalArray& key,
    const OptionalArray& query, const OptionalArray& bias, const OptionalArray& positions, double softmax_scale,
    double dropout_p, int64_t window_left, int64_t window_right, bool return_stats) {
  return attention_relative_fwd_cpu(q, k, v, cu_seqlens, philox,
                                    {softmax_scale, window_left, window_right, window_positions, num_keys},
                                    {rows, key, query, bias, positions}, dropout_p, return_stats);
}

std::tuple<Array, Array, Array, Array, Array, Array> attention_relative_bwd_operator(
    const Array& dout, const Array& q, const Array& k, const Array& v, const Array& out, const Array& softmax_stats,
    const Array& cu_seqlens, const OptionalArray& philox, const OptionalArray& window_positions,
    const OptionalArray& num_keys, const Array& rows, const OptionalArray& key, const OptionalArray& query,
    const OptionalArray& bias, const OptionalArray& positions, double softmax_scale, double dropout_p,
    int64_t window_left, int64_t window_right) {
  const Array dq = empty_like(q), dk = empty_like(k), dv = empty_like(v);
  const RelativeGradients of_terms =
      attention_relative_gradients(dout, q, k, v, out, softmax_stats, cu_seqlens, philox,
                                   {softmax_scale, window_left, window_right, window_positions, num_keys},
                                   {rows, key, query, bias, positions}, dropout_p, dq, dk, dv);
  return {dq, dk, dv, of_terms.key, of_terms.query, of_terms.bias};
}

}  // namespace fastbert
