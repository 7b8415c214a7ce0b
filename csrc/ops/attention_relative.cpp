#include "attention_relative.h"

#include <algorithm>
#include <vector>

#include "../cpu/attention_relative.h"
#include "attention_distances.h"
#include "attention_operands.h"
#include "workspace.h"

namespace fastbert {
namespace {

// As fastbert.ops.Relative has them.
struct RelativeForm {
  Array rows;
  OptionalArray key, query, bias, positions;
};

// Relative terms as the kernels read them, and the memory of what they point to.
struct PreparedTerms {
  RelativeTerms terms{};
  Distances distances;
  Array places, columns_of_key, columns_of_query, bias;
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
  const Array made = workspace({2, num_heads, terms.bias_stride}, ScalarType::Float);
  auto *ahead = made.data<float>(), *behind = ahead + num_heads * terms.bias_stride;
  const auto* from = bias.data<const float>();
  for (int64_t head = 0; head < num_heads; ++head, ahead += terms.bias_stride, behind += terms.bias_stride) {
    for (int64_t i = 0; i < distances; ++i) {
      const int32_t row = rows[longest - terms.reach + i];  // of a query's place less a key's
      behind[i] = ahead[distances - 1 - i] = from[row * bias.stride(0) + head * bias.stride(1)];
    }
    std::fill_n(ahead + distances, kRead, 0.0f);
    std::fill_n(behind + distances, kRead, 0.0f);
  }
  terms.bias = made.data<const float>();
  terms.bias_turned = terms.bias + num_heads * terms.bias_stride;
  return made;
}

template <typename T>
PackTable<T> table_to_pack(const Array& table, const DistanceColumns& columns, Array& memory, DistanceTable& packed) {
  const int64_t num_heads = table.size(1), head_dim = table.size(2);
  const int64_t bytes = num_heads * table_column_bytes(static_cast<const T*>(nullptr), head_dim, columns.panels);
  memory = workspace({(bytes + kPackedSlack) / 4}, ScalarType::Float);
  packed = {memory.data<const char>(), nullptr, columns.first, columns.panels};
  return {table.data<const T>(), table.stride(0), table.stride(1),     head_dim,
          columns.rows.data(),   columns.panels,  memory.data<char>(), nullptr};
}

// Throws where the terms do not fit q or the sequences.
PreparedTerms prepare(const RelativeForm& form, const Operands& operands) {
  const Array& q = operands.q;
  check(operands.group() == 1, "relative terms are of as many heads as q has, ", operands.num_heads, "; k has ",
        operands.num_kv_heads);
  check(form.rows.dim() == 1 && form.rows.size(0) % 2 == 1, "relative.rows has shape ", form.rows.sizes(),
        ", expected (2 * longest - 1,)");
  const Array rows = checked("relative.rows", form.rows, form.rows.sizes(), ScalarType::Int);
  const auto* row = rows.data<const int32_t>();
  const int64_t longest = (rows.size(0) + 1) / 2;
  int64_t num_rows = -1;
  for (const Array& table : {form.key, form.query, form.bias}) {
    if (num_rows < 0 && table.defined()) num_rows = table.size(0);
  }
  check(num_rows >= 0, "relative has neither key nor query nor bias");
  for (int64_t i = 0; i < rows.size(0); ++i) {
    check(row[i] >= 0 && row[i] < num_rows, "relative.rows[", i, "] is ", row[i], "; the tables have ", num_rows,
          " rows");
  }
  PreparedTerms prepared;
  RelativeTerms& terms = prepared.terms;
  if (form.positions.defined()) {
    prepared.places = checked("relative.positions", form.positions, {operands.total_tokens}, ScalarType::Int);
    terms.places = prepared.places.data<const int32_t>();
  }
  terms.reach = checked_reach(operands.offsets, terms.places, longest);
  const Shape of_table{num_rows, operands.num_heads, q.size(2)};
  const auto checked_table = [&](const char* name, const Array& table) {
    return table.defined() ? with_rows(name, table, of_table, q) : Array();
  };
  const Array key = checked_table("relative.key", form.key), query = checked_table("relative.query", form.query);
  const Array bias =
      checked_if_defined("relative.bias", form.bias, {num_rows, operands.num_heads}, ScalarType::Float, cpu());
  if (terms.reach == 0 || operands.num_heads == 0) return prepared;

  prepared.distances = Distances::of(row, longest, terms.reach);
  terms.far_left = prepared.distances.far_left, terms.far_right = prepared.distances.far_right;
  if (bias.defined()) prepared.bias = expanded_bias(bias, row, longest, terms);
  for_dtype(q.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    std::vector<PackTable<T>> tables;
    if (key.defined()) {
      tables.push_back(table_to_pack<T>(key, prepared.distances.ahead, prepared.columns_of_key, terms.key));
    }
    if (query.defined()) {
      tables.push_back(table_to_pack<T>(query, prepared.distances.behind, prepared.columns_of_query, terms.query));
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

}  // namespace

std::tuple<Array, Array> attention_relative_fwd_cpu(const Array& q, const Array& k, const Array& v,
                                                    const Array& cu_seqlens, const OptionalArray& philox,
                                                    const OptionalArray& window_positions, const Array& rows,
                                                    const OptionalArray& key, const OptionalArray& query,
                                                    const OptionalArray& bias, const OptionalArray& positions,
                                                    double softmax_scale, double dropout_p, int64_t window_left,
                                                    int64_t window_right, bool return_stats) {
  const AttentionForm form{softmax_scale, window_left, window_right, window_positions};
  const Operands operands = checked_operands(q, k, v, cu_seqlens, form, make_dropout(dropout_p, philox));
  const PreparedTerms prepared = prepare({rows, key, query, bias, positions}, operands);
  const Array out = empty_like(q);
  const Array stats = empty({return_stats ? 2 : 0, q.size(1), q.size(0)}, ScalarType::Float);
  const int64_t end = operands.offsets.back(), slack = operands.total_tokens - end;
  zero(out.narrow(0, end, slack));
  if (return_stats) zero(stats.narrow(2, end, slack));
  for_dtype(out.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const AttentionFwd<T> args{inputs<T>(operands), head_rows<T>(out), return_stats ? stats.data<float>() : nullptr,
                               operands.total_tokens};
    run_plan(make_plan(operands.offsets, operands.seen, operands.num_heads, 1, false),
             [&](const AttentionTask& task) { attention_relative_fwd(args, prepared.terms, task); });
  });
  return {out, stats};
}

}  // namespace fastbert
