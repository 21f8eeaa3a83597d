// Products of many pairs of matrices in one launch, whose sizes lie on the device. CUDA alone, bf16
// with fp32 sums; elsewhere a loop of ATen's products takes its place
// (tensor/experts/grouped_gemm.h).
#pragma once

#include <cstdint>

namespace megatron {

enum class GroupedProduct : uint8_t {
  kForward,     // d [rows, n] = a [rows, k] b_e [n, k]^T
  kInputGrad,   // d [rows, k] = a [rows, n] b_e [n, k]
  kWeightGrad,  // d_e [n, k] = beta d_e + a [rows, n]^T b [rows, k]
};

// Rows of an expert e are the counts[e] ones behind those of the experts before it. n and k are
// multiples of 8, addresses of 16 bytes; all matrices are row-major without gaps.
struct GroupedGemm {
  GroupedProduct product = GroupedProduct::kForward;
  int64_t experts = 0;
  int64_t rows = 0;  // of a; at least the sum of the counts, and never exceeded
  int64_t n = 0;
  int64_t k = 0;
  const void* counts = nullptr;  // [experts] on the device
  bool wide_counts = false;      // int64 instead of int32
  const void* a = nullptr;       // bf16
  const void* b = nullptr;       // bf16
  void* d = nullptr;             // bf16; of weight gradients fp32
  float beta = 0.0f;             // weight gradients only; with 0 the old d is not read
  void* workspace = nullptr;     // grouped_gemm_workspace() bytes
};

// Whether the current device has the kernels: compute capability 9.0.
bool has_grouped_gemm();

// Deterministic: an element is one sum in the order of its terms.
int64_t grouped_gemm_workspace(int64_t experts);
void grouped_gemm_cuda(const GroupedGemm& gemm, void* stream);

}  // namespace megatron
