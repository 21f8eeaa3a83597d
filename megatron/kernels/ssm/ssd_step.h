// One token of Mamba-2's recurrence for each of several sequences, as decoding needs it. CUDA
// alone; transformer/ssm/ssd_scan.h computes the same by tensor operations.
//
//   S' = exp(dt A) S + dt x B^T,   y = S' C + D x           per head
//
// x, B, C, y are bf16; time steps fp32, all computed in fp32.
#pragma once

#include "megatron/base/dtype.h"
#include "megatron/kernels/ssm/scan_rows.h"

namespace megatron {

struct SsdStepArgs {
  int64_t rows = 0;  // sequences
  int64_t heads = 1, groups = 1, head_size = 64, state_size = 128;
  // Elements from row to row; what a row holds is contiguous and 16-byte aligned.
  const void* x = nullptr;  // [H, P]
  int64_t x_row = 0;
  const void* b = nullptr;  // [G, N]
  int64_t b_row = 0;
  const void* c = nullptr;
  int64_t c_row = 0;
  const float* dt = nullptr;  // [H]
  int64_t dt_row = 0;
  void* y = nullptr;  // [H, P]
  int64_t y_row = 0;
  const float* a = nullptr;             // [H], negative
  const float* d = nullptr;             // [H], or null: 0
  DType state_dtype = DType::kFloat32;  // or bf16
  const void* states = nullptr;         // [slots, H, P, N]
  void* next_states = nullptr;          // likewise; may be `states`
  // [rows]: the row's slot; negative: no sequence, whose y is zeros. Null: row i has slot i.
  const int64_t* slots = nullptr;
};

constexpr bool ssd_step_supports(int64_t head_size, int64_t state_size) {
  return head_size % 8 == 0 && (state_size == 64 || state_size == 128 || state_size == 256);
}
void ssd_step_cuda(const SsdStepArgs& args, void* stream);

}  // namespace megatron
