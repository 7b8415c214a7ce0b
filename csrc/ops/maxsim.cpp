#include "maxsim.h"

#include <algorithm>
#include <vector>

#include "../cpu/maxsim.h"
#include "offsets.h"
#include "packed_weights.h"
#include "tensors.h"

namespace fastbert {
namespace {

constexpr int64_t kProductsOfTask = 1 << 21;  // multiplications that a thread is worth waking for

// The queries' tokens in panels: side by side where all are scored together, else each query in panels of its own.
struct PackedQueries {
  Array memory, row_offsets;
  std::vector<int32_t> begins;  // of the residuals of each column, where panels are split
  std::vector<Residual> values;
  std::vector<int64_t> columns;
  DType format;

  PackedQueries(const Array& queries, const int32_t* offsets, int64_t count, DType format, bool apart)
      : columns(static_cast<size_t>(count)), format(format) {
    const int64_t width = queries.size(1), size = panel_bytes(format, width);
    int64_t panels = 0;
    for (int64_t q = 0; q < count; ++q) {
      columns[q] = apart ? panels * kPanel : offsets[q];
      if (apart) panels += num_panels(offsets[q + 1] - offsets[q]);
    }
    if (!apart) panels = num_panels(offsets[count]);
    memory = empty({panels * size}, ScalarType::Char);
    if (format == DType::kInt8) row_offsets = empty({panels * kPanel}, ScalarType::Int);
    if (format == DType::kInt8 && splits_bytes()) begins.resize(static_cast<size_t>(panels * kPanel + 1));
    if (!apart) pack(queries, 0, offsets[count], 0);
    for (int64_t q = 0; apart && q < count; ++q) pack(queries, offsets[q], offsets[q + 1], columns[q] / kPanel);
  }

  const char* panels() const { return memory.data<const char>(); }
  Residuals residuals() const { return begins.empty() ? Residuals{} : Residuals{begins.data(), values.data()}; }

 private:
  void pack(const Array& queries, int64_t begin, int64_t end, int64_t first_panel) {
    const int64_t width = queries.size(1);
    PackArgs args{};
    args.weight = queries.data<const char>() + begin * width * queries.element_size();
    args.dtype = format == DType::kInt8 ? DType::kInt8 : dtype_of(queries);
    args.out_features = end - begin;
    args.in_features = width;
    args.out_stride = width;
    args.in_stride = 1;
    args.format = format;
    args.packed = memory.data<char>() + first_panel * panel_bytes(format, width);
    if (row_offsets.defined()) args.channel_offset = row_offsets.data<int32_t>() + first_panel * kPanel;
    const int64_t count = num_panels(end - begin), steps = panel_bytes(format, width) / (kPanel * 4);
    pack_panels(args, 0, count);
    if (!begins.empty()) {
      const size_t first = values.size();
      int32_t* of_these = begins.data() + first_panel * kPanel;
      count_residuals(args, of_these);
      for (int64_t c = 0; c <= count * kPanel; ++c) of_these[c] += static_cast<int32_t>(first);
      values.resize(static_cast<size_t>(of_these[count * kPanel]));
      split_panels(args.packed, steps, 0, count, of_these, values.data());
    }
    maxsim_strips(args.packed, count, steps);
  }
};

// Pairs, checked; or all of them, document by document.
struct Pairs {
  Array memory;
  const int64_t *query = nullptr, *document = nullptr;
  int64_t count = 0;

  Pairs(const OptionalArray& pairs, int64_t queries, int64_t documents) {
    if (!pairs.defined()) return;
    count = pairs.size(1);
    memory = checked("pairs", pairs, {2, count}, ScalarType::Long);
    query = memory.data<const int64_t>();
    document = query + count;
    for (int64_t p = 0; p < count; ++p) {
      check_index(query[p] >= 0 && query[p] < queries, "pairs have query ", query[p], ", there are ", queries);
      check_index(document[p] >= 0 && document[p] < documents, "pairs have document ", document[p], ", there are ",
                  documents);
    }
  }
};

// Where each pair's winners begin among all of them.
std::vector<int64_t> winner_offsets(const Pairs& pairs, const int32_t* offsets) {
  std::vector<int64_t> begin(static_cast<size_t>(pairs.count) + 1);
  for (int64_t p = 0; p < pairs.count; ++p) {
    begin[p + 1] = begin[p] + offsets[pairs.query[p] + 1] - offsets[pairs.query[p]];
  }
  return begin;
}

}  // namespace

std::tuple<Array, Array> maxsim_fwd_cpu(const Array& queries_, const Array& cu_seqlens_q, const Array& documents_,
                                        const Array& cu_seqlens_d, const OptionalArray& query_scales_,
                                        const OptionalArray& scales_, const OptionalArray& pairs_,
                                        bool return_winners) {
  const Array queries = contiguous(queries_), documents = contiguous(documents_);
  check(queries.dim() == 2 && documents.dim() == 2 && queries.size(1) == documents.size(1), "queries have shape ",
        queries.sizes(), ", documents ", documents.sizes(), ", expected (tokens, width) of one width");
  const Array offsets_q = checked_offsets(cu_seqlens_q, queries.size(0)),
              offsets_d = checked_offsets(cu_seqlens_d, documents.size(0));
  const auto *cu_q = offsets_q.data<const int32_t>(), *cu_d = offsets_d.data<const int32_t>();
  const int64_t num_queries = offsets_q.size(0) - 1, num_documents = offsets_d.size(0) - 1, width = queries.size(1);
  const Pairs pairs(pairs_, num_queries, num_documents);
  const bool apart = pairs_.defined(), is_int8 = documents.scalar_type() == ScalarType::Char;
  Array scales, query_scales;
  if (is_int8) {
    check(queries.scalar_type() == ScalarType::Char, "queries are ", queries.scalar_type(), ", documents int8");
    check(width <= kMostInt8Columns, "int8 vectors have width ", width, "; sums of more than ", kMostInt8Columns,
          " products do not fit into int32: score float32 or bfloat16 vectors");
    scales = checked("scales", scales_, {documents.size(0)}, ScalarType::Float);
    query_scales = checked("query_scales", query_scales_, {queries.size(0)}, ScalarType::Float);
  }
  const bool halves = queries.scalar_type() == ScalarType::BFloat16 && documents.scalar_type() != ScalarType::Float;
  const DType format = is_int8 ? DType::kInt8 : halves && has_bf16_dot() ? DType::kBFloat16 : DType::kFloat32;
  const PackedQueries packed(queries, cu_q, num_queries, format, apart);
  const DType dtype = is_int8 ? DType::kInt8 : dtype_of(documents);
  const int32_t* offsets = is_int8 ? packed.row_offsets.data<const int32_t>() : nullptr;
  const float* of_queries = is_int8 ? query_scales.data<const float>() : nullptr;
  const RowsArg rows{documents.data(), dtype, width, is_int8 ? scales.data<const float>() : nullptr};
  const MaxSimFwd args{packed.panels(),    format, width, packed.columns.data(), offsets, of_queries, cu_q,
                       packed.residuals(), rows,   cu_d};
  if (apart) {
    const std::vector<int64_t> begin = winner_offsets(pairs, cu_q);
    const Array scores = empty({pairs.count}, ScalarType::Float),
                winners = empty({return_winners ? begin.back() : 0}, ScalarType::Int);
    parallel_for(0, pairs.count, 1, [&](int64_t first, int64_t last) {
      for (int64_t p = first; p < last; ++p) {
        const int64_t q = pairs.query[p], d = pairs.document[p];
        int32_t* won = return_winners ? winners.data<int32_t>() + begin[p] : nullptr;
        maxsim_fwd(args, d, d + 1, q, q + 1, scores.data<float>() + p, 0, won, 0);
      }
    });
    return {scores, winners};
  }
  const int64_t tokens = cu_q[num_queries];
  const Array scores = empty({num_queries, num_documents}, ScalarType::Float),
              winners = empty({return_winners ? num_documents : 0, queries.size(0)}, ScalarType::Int);
  if (num_queries == 0) return {scores, winners};
  const int64_t of_one = std::max<int64_t>(
      1, documents.size(0) * std::max<int64_t>(1, tokens) * width / std::max<int64_t>(1, num_documents));
  parallel_for(0, num_documents, std::max<int64_t>(1, kProductsOfTask / of_one), [&](int64_t first, int64_t last) {
    int32_t* won = return_winners ? winners.data<int32_t>() + first * queries.size(0) : nullptr;
    maxsim_fwd(args, first, last, 0, num_queries, scores.data<float>() + first, num_documents, won, queries.size(0));
  });
  return {scores, winners};
}

std::tuple<Array, Array> maxsim_bwd_cpu(const Array& dscores_, const Array& queries_, const Array& cu_seqlens_q,
                                        const Array& documents_, const Array& cu_seqlens_d, const OptionalArray& pairs_,
                                        const Array& winners_, bool needs_dqueries, bool needs_ddocuments) {
  const Array queries = contiguous(queries_), documents = contiguous(documents_), winners = contiguous(winners_);
  const Array offsets_q = checked_offsets(cu_seqlens_q, queries.size(0)),
              offsets_d = checked_offsets(cu_seqlens_d, documents.size(0));
  const auto *cu_q = offsets_q.data<const int32_t>(), *cu_d = offsets_d.data<const int32_t>();
  const int64_t num_queries = offsets_q.size(0) - 1, num_documents = offsets_d.size(0) - 1, width = queries.size(1);
  const Pairs pairs(pairs_, num_queries, num_documents);
  const bool apart = pairs_.defined();
  const Array dscores =
      checked("dscores", dscores_, apart ? Shape{pairs.count} : Shape{num_queries, num_documents}, ScalarType::Float);
  const std::vector<int64_t> begin = winner_offsets(pairs, cu_q);
  check(winners.scalar_type() == ScalarType::Int &&
            winners.sizes() == (apart ? Shape{begin.back()} : Shape{num_documents, queries.size(0)}),
        "winners have shape ", winners.sizes(), ", which is not forward's");
  const auto* won = winners.data<const int32_t>();
  const auto* d = dscores.data<const float>();
  // The pairs of each query, and of each document.
  std::vector<std::vector<MaxSimPair>> of_query(static_cast<size_t>(num_queries)),
      of_document(static_cast<size_t>(num_documents));
  const auto add = [&](const MaxSimPair& pair) {
    if (needs_dqueries) of_query[pair.query].push_back(pair);
    if (needs_ddocuments) of_document[pair.document].push_back(pair);
  };
  for (int64_t p = 0; p < pairs.count; ++p) add({pairs.query[p], pairs.document[p], d[p], won + begin[p]});
  for (int64_t q = 0; !apart && q < num_queries; ++q) {
    for (int64_t i = 0; i < num_documents; ++i) {
      add({q, i, d[q * num_documents + i], won + i * queries.size(0) + cu_q[q]});
    }
  }
  const Array dqueries = empty({needs_dqueries ? queries.size(0) : 0, width}, queries);
  const Array ddocuments = empty({needs_ddocuments ? documents.size(0) : 0, width}, documents);
  for_dtype(queries.scalar_type(), [&](auto zero_of_dtype) {
    using T = decltype(zero_of_dtype);
    const MaxSimBwd<T> args{queries.data<const T>(), documents.data<const T>(), width, cu_q, cu_d,
                            dqueries.data<T>(),      ddocuments.data<T>()};
    if (needs_dqueries) {
      zero(dqueries.narrow(0, cu_q[num_queries], queries.size(0) - cu_q[num_queries]));
      parallel_for(0, num_queries, 1, [&](int64_t first, int64_t last) {
        for (int64_t q = first; q < last; ++q) {
          maxsim_dquery(args, q, of_query[q].data(), static_cast<int64_t>(of_query[q].size()));
        }
      });
    }
    if (needs_ddocuments) {
      zero(ddocuments.narrow(0, cu_d[num_documents], documents.size(0) - cu_d[num_documents]));
      parallel_for(0, num_documents, 1, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
          maxsim_ddocument(args, i, of_document[i].data(), static_cast<int64_t>(of_document[i].size()));
        }
      });
    }
  });
  return {dqueries, ddocuments};
}

}  // namespace fastbert
