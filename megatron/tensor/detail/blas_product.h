// One cuBLASLt product, in column-major terms, and the choice of an algorithm for it.
#pragma once

#include <cublasLt.h>

#include <compare>
#include <cstdint>
#include <string>

namespace megatron {

constexpr size_t kBlasWorkspaceBytes = size_t{32} << 20;

void check_blas(cublasStatus_t status, const char* call);

// How an FP8 operand is scaled; kNone: the operand is bf16 or fp16.
enum class BlasScale : uint8_t { kNone, kTensor, kVector128, kBlock128, kRow };

// D (m x n) = beta C + op(A) (m x k) op(B) (k x n) (+ bias [m] to every column), fp32 accumulation;
// C is D or another matrix of the same layout. With gelu_grad: times the derivative of the tanh
// GELU at another matrix laid out like D.
struct BlasProduct {
  int device = 0;
  cudaDataType_t type = CUDA_R_16BF;         // type of A; without scales also of B and the bias
  cudaDataType_t output_type = CUDA_R_16BF;  // type of D
  bool transpose_a = false, transpose_b = false, bias = false, gelu_grad = false;
  int64_t m = 0, n = 0, k = 0;
  int64_t lda = 0, ldb = 0, ldd = 0;
  uint32_t alignment = 16;  // the largest power of two up to 256 that divides all addresses
  // FP8: type of B, scales of both, and whether the tensor cores' reduced-precision accumulation is
  // allowed.
  cudaDataType_t type_b = CUDA_R_16BF;
  BlasScale scale_a = BlasScale::kNone, scale_b = BlasScale::kNone;
  bool fast = false;
  // The order of additions of an element of D depends on k alone: see Note [Products in one order].
  bool one_order = false;
  auto operator<=>(const BlasProduct&) const = default;

  bool scaled() const { return scale_a != BlasScale::kNone; }
  int64_t element_bytes() const { return scaled() ? 1 : 2; }  // of A and B
  std::string text() const;                                   // key in the file of choices
  int64_t elements_of_a() const { return lda * (transpose_a ? m : k); }
  int64_t elements_of_b() const { return ldb * (transpose_b ? k : n); }
  int64_t elements_of_d() const { return ldd * n; }
};

struct BlasOperands {
  const void* a = nullptr;
  const void* b = nullptr;
  void* d = nullptr;
  const void* bias = nullptr;
  float beta = 0.0f;
  const float* scale_a = nullptr;  // inverse scales, on the device
  const float* scale_b = nullptr;
  const void* c = nullptr;           // laid out like d, multiplied by beta instead of d; null: d
  const void* gelu_input = nullptr;  // laid out like d
};

// cuBLASLt descriptors of one product.
class BlasPlan {
 public:
  explicit BlasPlan(const BlasProduct& product);
  ~BlasPlan();
  BlasPlan(const BlasPlan&) = delete;
  BlasPlan& operator=(const BlasPlan&) = delete;

  // At most `count` candidates, the best according to the library's heuristic first.
  std::vector<cublasLtMatmulAlgo_t> candidates(int count) const;
  cublasStatus_t run(const cublasLtMatmulAlgo_t& algorithm, const BlasOperands& operands,
                     void* workspace, cudaStream_t stream);

 private:
  const BlasProduct product_;
  cublasLtMatmulDesc_t operation_ = nullptr;
  cublasLtMatrixLayout_t a_ = nullptr, b_ = nullptr, d_ = nullptr;
};

// Chooses the algorithm that all threads use for a product. See Note [Choice of algorithms].
cublasLtMatmulAlgo_t choose_algorithm(const BlasProduct& product);

}  // namespace megatron
