#include <algorithm>
#include <cstring>
#include <vector>

#include "megatron/kernels/detail/block_io.h"
#include "megatron/kernels/experts/expert_rows.h"

namespace megatron {
namespace {

constexpr int64_t kRun = 512;

template <class Acc>
void sum_run(const SumOfRows& args, int64_t token, int64_t column, int64_t n) {
  Acc total[kRun] = {}, scratch[kRun];
  const int64_t at = token * args.columns + column;
  if (args.base != nullptr)
    std::copy_n(load_run(args.sum_dtype, args.base, at, n, scratch), n, total);
  for (int64_t j = 0; j < args.choices; ++j) {
    const int64_t place = args.places[token * args.choices + j];
    if (place < 0) continue;
    const Acc* row = load_run(args.dtype, args.rows, place * args.columns + column, n, scratch);
    for (int64_t i = 0; i < n; ++i) total[i] += row[i];
  }
  Acc* to = output_run(args.sum_dtype, args.sums, at, scratch);
  std::copy_n(total, n, to);
  store_run(args.sum_dtype, args.sums, at, n, to);
}

}  // namespace

int64_t expert_order_workspace(int64_t choices, int64_t num_experts) {
  const int64_t chunks = (choices + kExpertOrderChunk - 1) / kExpertOrderChunk;
  return (num_experts + 1) * chunks * static_cast<int64_t>(sizeof(int32_t));
}

void expert_order_cpu(const ExpertOrderArgs& args) {
  const int64_t dropped = args.num_experts;
  const auto expert_of = [&](int64_t choice) {
    const int64_t expert = args.experts[choice] - args.first_expert;
    return expert >= 0 && expert < args.num_experts ? expert : dropped;
  };
  std::vector<int64_t> next(dropped + 1, 0);  // row of each expert's next choice
  for (int64_t i = 0; i < args.choices; ++i) ++next[expert_of(i)];
  int64_t before = 0;
  for (int64_t e = 0; e <= dropped; ++e) {
    const int64_t count = next[e];
    if (e < dropped) args.counts[e] = static_cast<int32_t>(count);
    next[e] = before;
    before += count;
  }
  for (int64_t i = 0; i < args.choices; ++i) {
    const int64_t expert = expert_of(i), row = next[expert]++;
    args.order[row] = i;
    args.rows[i] = expert < dropped ? row : -1;
  }
}

void parts_of_choices_cpu(const PartsOfChoices& args, int64_t token_begin, int64_t token_end) {
  for (int64_t token = token_begin; token < token_end; ++token) {
    int32_t* const parts = args.parts + token * args.num_parts;
    std::fill_n(parts, args.num_parts, -1);
    for (int64_t j = 0; j < args.choices; ++j) {
      const int32_t expert = args.experts[token * args.choices + j];
      if (expert < 0) continue;
      const int64_t part = expert / args.experts_of_part;
      parts[part] = static_cast<int32_t>(part);
    }
  }
}

void rows_in_parts_cpu(const RowsInParts& args, int64_t row_begin, int64_t row_end) {
  for (int64_t i = row_begin; i < row_end; ++i) {
    const int64_t choice = args.order[i], part = args.experts[choice] / args.experts_of_part;
    args.to[i] = args.token_rows[choice / args.choices * args.num_parts + part] + args.shift[part];
  }
}

void gather_rows_cpu(const GatherRows& args, int64_t row_begin, int64_t row_end) {
  const auto* from = static_cast<const char*>(args.from);
  auto* to = static_cast<char*>(args.to);
  for (int64_t i = row_begin; i < row_end; ++i) {
    char* row = to + i * args.row_bytes;
    if (args.index[i] < 0) {
      std::memset(row, 0, args.row_bytes);
    } else {
      std::memcpy(row, from + args.index[i] / args.divisor * args.row_bytes, args.row_bytes);
    }
  }
}

void spread_rows_cpu(const SpreadRows& args, int64_t token_begin, int64_t token_end) {
  const auto* from = static_cast<const char*>(args.from);
  auto* to = static_cast<char*>(args.to);
  for (int64_t i = token_begin; i < token_end; ++i)
    for (int64_t j = 0; j < args.choices; ++j)
      if (const int64_t place = args.places[i * args.choices + j]; place >= 0)
        std::memcpy(to + place * args.row_bytes, from + i * args.row_bytes, args.row_bytes);
}

void sum_of_rows_cpu(const SumOfRows& args, int64_t token_begin, int64_t token_end) {
  with_accumulator(args.dtype, [&](auto acc) {
    for (int64_t token = token_begin; token < token_end; ++token)
      for (int64_t column = 0; column < args.columns; column += kRun)
        sum_run<decltype(acc)>(args, token, column, std::min(kRun, args.columns - column));
  });
}

}  // namespace megatron
