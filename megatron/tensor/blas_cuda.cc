#include <ATen/cuda/CUDAContext.h>

#include <map>

#include "megatron/base/check.h"
#include "megatron/kernels/fp8/fp8.h"
#include "megatron/tensor/batch_invariant/mode.h"
#include "megatron/tensor/detail/blas.h"
#include "megatron/tensor/detail/blas_product.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

// The largest power of two up to 256 that divides every address.
uint32_t common_alignment(std::initializer_list<const void*> pointers) {
  uintptr_t bits = 256;
  for (const void* pointer : pointers) bits |= reinterpret_cast<uintptr_t>(pointer);
  return static_cast<uint32_t>(bits & (~bits + 1));
}

bool is_row_major(const at::Tensor& t) { return t.stride(1) == 1 && t.stride(0) >= t.size(1); }

// Non-empty row-major half-precision operands on a GPU.
bool fits(const at::Tensor& x, const at::Tensor& y) {
  const bool half = x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kHalf;
  return half && x.is_cuda() && y.scalar_type() == x.scalar_type() && is_row_major(x) &&
         is_row_major(y) && x.numel() > 0 && y.numel() > 0;
}

cudaDataType_t cuda_type(const at::Tensor& t) {
  if (t.scalar_type() == at::kFloat) return CUDA_R_32F;
  return t.scalar_type() == at::kBFloat16 ? CUDA_R_16BF : CUDA_R_16F;
}

cudaDataType_t fp8_cuda_type(const at::Tensor& codes) {
  return codes.scalar_type() == at::kFloat8_e4m3fn ? CUDA_R_8F_E4M3 : CUDA_R_8F_E5M2;
}

BlasScale blas_scale(ScaleLayout layout) {
  switch (layout) {
    case ScaleLayout::kTensor:
      return BlasScale::kTensor;
    case ScaleLayout::kRow:
      return BlasScale::kRow;
    case ScaleLayout::kVector128:
      return BlasScale::kVector128;
    case ScaleLayout::kBlock128:
      return BlasScale::kBlock128;
  }
  return BlasScale::kNone;
}

const float* inverse_scale(const QuantizedMatrix& matrix) {
  return matrix.scale.const_data_ptr<float>() +
         (matrix.layout == ScaleLayout::kTensor ? kFp8InverseAt : 0);
}

// A row-major matrix [r, c] is a column-major c x r one: D^T = B^T A^T.
BlasProduct product_of(const at::Tensor& a, const at::Tensor& b, const at::Tensor& d) {
  BlasProduct product;
  product.device = a.get_device();
  product.type = cuda_type(a);
  product.output_type = cuda_type(d);
  product.m = d.size(1);
  product.n = d.size(0);
  product.lda = a.stride(0);
  product.ldb = b.stride(0);
  product.ldd = d.stride(0);
  return product;
}

bool is_like(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && a.strides() == b.strides();
}

// Adds the product to `addend` if it is defined.
void add_to(const at::Tensor& addend, BlasOperands& operands) {
  if (!addend.defined()) return;
  operands.c = addend.const_data_ptr();
  operands.beta = 1.0f;
}

void multiply(BlasProduct product, BlasOperands operands, const at::Tensor& like) {
  product.alignment = common_alignment(
      {operands.a, operands.b, operands.d, operands.bias, operands.c, operands.gelu_input});
  struct Known {
    explicit Known(const BlasProduct& p) : plan(p), algorithm(choose_algorithm(p)) {}
    BlasPlan plan;
    cublasLtMatmulAlgo_t algorithm;
  };
  // Images of their own sizes bring new numbers of rows without end.
  constexpr size_t kMostKnown = 8192;
  thread_local std::map<BlasProduct, std::unique_ptr<Known>> all;
  if (all.size() >= kMostKnown && !all.contains(product)) all.clear();
  std::unique_ptr<Known>& known = all[product];
  if (!known) known = std::make_unique<Known>(product);
  // From the caching allocator: the stream orders its reuse.
  const at::Tensor workspace =
      at::empty({static_cast<int64_t>(kBlasWorkspaceBytes)}, like.options().dtype(at::kByte));
  check_blas(known->plan.run(known->algorithm, operands, workspace.data_ptr(),
                             at::cuda::getCurrentCUDAStream()),
             "cublasLtMatmul");
}

}  // namespace

bool blas_forward(const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias,
                  const at::Tensor& addend, const at::Tensor& y) {
  if (!fits(x, w)) return false;
  if (addend.defined() && !is_like(addend, y)) return false;
  if (bias.defined() && (bias.scalar_type() != x.scalar_type() || !bias.is_contiguous()))
    return false;
  BlasProduct product = product_of(w, x, y);
  product.transpose_a = true;
  product.k = x.size(1);
  product.bias = bias.defined();
  product.one_order = is_batch_invariant();
  BlasOperands operands = {w.const_data_ptr(), x.const_data_ptr(), y.data_ptr(),
                           bias.defined() ? bias.const_data_ptr() : nullptr};
  add_to(addend, operands);
  multiply(product, operands, y);
  return true;
}

bool blas_input_grad(const at::Tensor& dy, const at::Tensor& w, const at::Tensor& gelu_input,
                     const at::Tensor& dx) {
  if (!fits(dy, w)) return false;
  BlasProduct product = product_of(w, dy, dx);
  product.k = dy.size(1);
  BlasOperands operands = {w.const_data_ptr(), dy.const_data_ptr(), dx.data_ptr()};
  if (gelu_input.defined()) {
    constexpr int kAlignment = 16;  // alignment of the epilogue's operand
    const bool aligned =
        reinterpret_cast<uintptr_t>(gelu_input.const_data_ptr()) % kAlignment == 0 &&
        dx.size(1) % 8 == 0;
    if (!aligned || !is_like(gelu_input, dx)) return false;
    product.gelu_grad = true;
    operands.gelu_input = gelu_input.const_data_ptr();
  }
  multiply(product, operands, dx);
  return true;
}

bool blas_wide_weight_grad(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& target,
                           double beta) {
  if (target.scalar_type() != at::kFloat || !target.is_contiguous() || !fits(dy, x)) return false;
  BlasProduct product = product_of(x, dy, target);
  product.transpose_b = true;
  product.k = dy.size(0);
  multiply(product,
           {x.const_data_ptr(), dy.const_data_ptr(), target.data_ptr(), nullptr,
            static_cast<float>(beta)},
           target);
  return true;
}

void blas_quantized(const QuantizedMatrix& a, const QuantizedMatrix& b, const at::Tensor& d,
                    const at::Tensor& bias, const at::Tensor& addend, double beta, bool fast) {
  const cudaDeviceProp* properties = at::cuda::getDeviceProperties(d.get_device());
  MEGATRON_CHECK(properties->major * 10 + properties->minor >= 89,
                 "FP8 products need a GPU of compute capability 8.9 or more, ", properties->name,
                 " has ", properties->major, ".", properties->minor,
                 "\nhint: leave --fp8-format out");
  MEGATRON_ASSERT(a.codes.is_contiguous() && b.codes.is_contiguous() && d.is_contiguous(),
                  "FP8 products take contiguous matrices");
  // D^T = B A^T in column-major terms: b comes first.
  BlasProduct product = product_of(b.codes, a.codes, d);
  product.type = fp8_cuda_type(b.codes);
  product.type_b = fp8_cuda_type(a.codes);
  product.scale_a = blas_scale(b.layout);
  product.scale_b = blas_scale(a.layout);
  product.fast = fast;
  product.transpose_a = true;
  product.k = a.codes.size(1);
  product.bias = bias.defined();
  product.one_order = is_batch_invariant() && product.scale_a == BlasScale::kBlock128 &&
                      product.output_type != CUDA_R_32F;
  BlasOperands operands;
  operands.a = b.codes.const_data_ptr();
  operands.b = a.codes.const_data_ptr();
  operands.d = d.data_ptr();
  operands.bias = bias.defined() ? bias.const_data_ptr() : nullptr;
  operands.beta = static_cast<float>(beta);
  MEGATRON_ASSERT(!addend.defined() || (beta == 0.0 && is_like(addend, d)),
                  "an FP8 product is added to another kind of matrix");
  add_to(addend, operands);
  operands.scale_a = inverse_scale(b);
  operands.scale_b = inverse_scale(a);
  multiply(product, operands, d);
}

bool scales_rows_of_products(int device) {
  const cudaDeviceProp* properties =
      at::cuda::getDeviceProperties(static_cast<c10::DeviceIndex>(device));
  return properties->major == 9 && properties->minor == 0;
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
