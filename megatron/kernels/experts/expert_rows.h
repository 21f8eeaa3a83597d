// Rows of tokens in the order of the experts that were chosen for them: the order itself, rows
// taken into it, and sums over the choices of a token. Nothing depends on how work is divided over
// threads: results are the same in every run.
#pragma once

#include <cstdint>

#include "megatron/base/dtype.h"

namespace megatron {

// A stable sort of choices by expert. Choice i counts for expert e = experts[i] - first_expert if
// 0 <= e < num_experts; all others are dropped.
struct ExpertOrderArgs {
  int64_t choices = 0;
  int64_t first_expert = 0;
  int64_t num_experts = 0;
  const int32_t* experts = nullptr;  // [choices]
  int32_t* counts = nullptr;         // [num_experts]: choices of each expert
  int64_t* order = nullptr;   // [choices]: choice of each row; rows of dropped ones come last
  int64_t* rows = nullptr;    // [choices]: row of each choice; -1: dropped
  void* workspace = nullptr;  // CUDA: expert_order_workspace() bytes
};
constexpr int64_t kExpertOrderChunk = 1024;  // choices that a block of threads sorts
int64_t expert_order_workspace(int64_t choices, int64_t num_experts);
void expert_order_cpu(const ExpertOrderArgs& args);
void expert_order_cuda(const ExpertOrderArgs& args, void* stream);

// parts[i, p] = p if one of token i's choices is an expert of part p, else -1. Part p has the
// experts from p * experts_of_part on; negative choices are dropped.
struct PartsOfChoices {
  int64_t tokens = 0;
  int64_t choices = 0;  // of a token
  int64_t num_parts = 0;
  int64_t experts_of_part = 1;
  const int32_t* experts = nullptr;  // [tokens, choices]
  int32_t* parts = nullptr;          // [tokens, num_parts]
};
void parts_of_choices_cpu(const PartsOfChoices& args, int64_t token_begin, int64_t token_end);
void parts_of_choices_cuda(const PartsOfChoices& args, void* stream);

// to[i] = token_rows[t, p] + shift[p] for choice order[i], which is token t's of an expert of part
// p; none may be dropped.
struct RowsInParts {
  int64_t rows = 0;
  int64_t choices = 0;  // of a token
  int64_t num_parts = 0;
  int64_t experts_of_part = 1;
  const int64_t* order = nullptr;       // [rows]: token * choices + place in its choices
  const int32_t* experts = nullptr;     // [tokens, choices]
  const int64_t* token_rows = nullptr;  // [tokens, num_parts]
  const int64_t* shift = nullptr;       // [num_parts]
  int64_t* to = nullptr;                // [rows]
};
void rows_in_parts_cpu(const RowsInParts& args, int64_t row_begin, int64_t row_end);
void rows_in_parts_cuda(const RowsInParts& args, void* stream);

// to[i] = from[index[i] / divisor], rows of `row_bytes` bytes; zeros where index[i] is negative.
struct GatherRows {
  int64_t rows = 0;  // of `to`
  int64_t row_bytes = 0;
  const void* from = nullptr;
  const int64_t* index = nullptr;  // [rows]
  int64_t divisor = 1;
  void* to = nullptr;
};
void gather_rows_cpu(const GatherRows& args, int64_t row_begin, int64_t row_end);
void gather_rows_cuda(const GatherRows& args, void* stream);

// to[places[i, j]] = from[i], rows of `row_bytes` bytes: each is read once. Negative places are
// skipped.
struct SpreadRows {
  int64_t tokens = 0;
  int64_t choices = 0;  // of a token
  int64_t row_bytes = 0;
  const void* from = nullptr;       // [tokens] rows
  const int64_t* places = nullptr;  // [tokens, choices], at most once each
  void* to = nullptr;
};
void spread_rows_cpu(const SpreadRows& args, int64_t token_begin, int64_t token_end);
void spread_rows_cuda(const SpreadRows& args, void* stream);

// sums[i] = base[i] + rows[places[i, 0]] + rows[places[i, 1]] + ..., one after the other in fp32
// (fp64), rounded once; negative places are skipped.
struct SumOfRows {
  DType dtype = DType::kFloat32;      // of rows
  DType sum_dtype = DType::kFloat32;  // that type, or fp32 (fp64 for fp64 rows)
  int64_t tokens = 0;
  int64_t choices = 0;  // of a token
  int64_t columns = 0;
  const void* rows = nullptr;       // [any, columns]
  const int64_t* places = nullptr;  // [tokens, choices]
  const void* base = nullptr;       // [tokens, columns] in sum_dtype, may be sums; null: zeros
  void* sums = nullptr;             // [tokens, columns]
};
void sum_of_rows_cpu(const SumOfRows& args, int64_t token_begin, int64_t token_end);
void sum_of_rows_cuda(const SumOfRows& args, void* stream);

}  // namespace megatron
