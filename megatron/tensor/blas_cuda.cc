#include <ATen/cuda/CUDAContext.h>
#include <cublasLt.h>

#include <map>

#include "megatron/base/check.h"
#include "megatron/tensor/detail/blas.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

constexpr size_t kWorkspaceBytes = size_t{32} << 20;

void check_blas(cublasStatus_t status, const char* call) {
  MEGATRON_CHECK(status == CUBLAS_STATUS_SUCCESS, call, " failed: ", cublasLtGetStatusName(status), ", ",
                 cublasLtGetStatusString(status),
                 "\nhint: CUBLASLT_LOG_LEVEL=5 makes cuBLASLt print its calls");
}

// Destroys a descriptor of cuBLASLt when it goes out of scope.
template <class Handle, cublasStatus_t (*Destroy)(Handle)>
struct Descriptor {
  Handle value = nullptr;
  Descriptor() = default;
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (value != nullptr) Destroy(value);
  }
};
using Operation = Descriptor<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using Layout = Descriptor<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Preference = Descriptor<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

// What the choice of an algorithm depends on.
struct ProblemKey {
  int device;
  cudaDataType_t type;
  int64_t rows, n, k, dy_stride, x_stride;
  uint32_t alignment;
  auto operator<=>(const ProblemKey&) const = default;
};

// The largest power of two up to 256 that divides every address.
uint32_t common_alignment(std::initializer_list<const void*> pointers) {
  uintptr_t bits = 256;
  for (const void* pointer : pointers) bits |= reinterpret_cast<uintptr_t>(pointer);
  return static_cast<uint32_t>(bits & (~bits + 1));
}

cublasLtMatmulAlgo_t choose_algorithm(cublasLtHandle_t handle, const Operation& operation, const Layout& a,
                                      const Layout& b, const Layout& d, const ProblemKey& key) {
  thread_local std::map<ProblemKey, cublasLtMatmulAlgo_t> known;
  if (const auto found = known.find(key); found != known.end()) return found->second;
  Preference preference;
  check_blas(cublasLtMatmulPreferenceCreate(&preference.value), "cublasLtMatmulPreferenceCreate");
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    check_blas(cublasLtMatmulPreferenceSetAttribute(preference.value, attribute, &value, sizeof value),
               "cublasLtMatmulPreferenceSetAttribute");
  };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspaceBytes);
  for (const auto attribute :
       {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
    set(attribute, key.alignment);
  }
  cublasLtMatmulHeuristicResult_t result = {};
  int found = 0;
  check_blas(cublasLtMatmulAlgoGetHeuristic(handle, operation.value, a.value, b.value, d.value, d.value,
                                            preference.value, 1, &result, &found),
             "cublasLtMatmulAlgoGetHeuristic");
  MEGATRON_CHECK(found > 0, "cuBLASLt knows no algorithm for a weight gradient of [", key.n, ", ", key.k, "] over ",
                 key.rows, " rows");
  return known.emplace(key, result.algo).first->second;
}

bool is_row_major(const at::Tensor& t) { return t.stride(1) == 1 && t.stride(0) >= t.size(1); }

}  // namespace

// In cuBLAS's column-major words: D (k x n) = A (k x rows) B^T, with A = x, B = dy (n x rows), D = target.
bool blas_wide_weight_grad(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& target, double beta) {
  const at::ScalarType type = dy.scalar_type();
  if (target.scalar_type() != at::kFloat || (type != at::kBFloat16 && type != at::kHalf)) return false;
  if (!is_row_major(dy) || !is_row_major(x) || !target.is_contiguous() || dy.numel() == 0) return false;
  const ProblemKey key = {
      dy.get_device(), type == at::kBFloat16 ? CUDA_R_16BF : CUDA_R_16F, dy.size(0), dy.size(1), x.size(1),
      dy.stride(0), x.stride(0), common_alignment({dy.const_data_ptr(), x.const_data_ptr(), target.data_ptr()})};

  Operation operation;
  check_blas(cublasLtMatmulDescCreate(&operation.value, CUBLAS_COMPUTE_32F, CUDA_R_32F),
             "cublasLtMatmulDescCreate");
  const cublasOperation_t transpose = CUBLAS_OP_T;
  check_blas(cublasLtMatmulDescSetAttribute(operation.value, CUBLASLT_MATMUL_DESC_TRANSB, &transpose,
                                            sizeof transpose),
             "cublasLtMatmulDescSetAttribute");
  Layout a, b, d;
  check_blas(cublasLtMatrixLayoutCreate(&a.value, key.type, key.k, key.rows, key.x_stride), "layout of x");
  check_blas(cublasLtMatrixLayoutCreate(&b.value, key.type, key.n, key.rows, key.dy_stride), "layout of dy");
  check_blas(cublasLtMatrixLayoutCreate(&d.value, CUDA_R_32F, key.k, key.n, key.k), "layout of the target");

  const cublasLtHandle_t handle = at::cuda::getCurrentCUDABlasLtHandle();
  const cublasLtMatmulAlgo_t algorithm = choose_algorithm(handle, operation, a, b, d, key);
  // From the caching allocator: the stream orders its reuse.
  const at::Tensor workspace = at::empty({static_cast<int64_t>(kWorkspaceBytes)}, dy.options().dtype(at::kByte));
  const float alpha = 1.0f, scale = static_cast<float>(beta);
  check_blas(cublasLtMatmul(handle, operation.value, &alpha, x.const_data_ptr(), a.value, dy.const_data_ptr(),
                            b.value, &scale, target.data_ptr(), d.value, target.data_ptr(), d.value, &algorithm,
                            workspace.data_ptr(), kWorkspaceBytes, at::cuda::getCurrentCUDAStream()),
             "cublasLtMatmul");
  return true;
}

void use_wide_blas_reductions() {
  static const bool done = [] {
    at::globalContext().setAllowBF16ReductionCuBLAS(false);
    at::globalContext().setAllowFP16ReductionCuBLAS(false);
    return true;
  }();
  static_cast<void>(done);
}

}  // namespace megatron
