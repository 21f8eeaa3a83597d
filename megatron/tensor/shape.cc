#include "megatron/tensor/shape.h"

#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

std::string shape_text(at::IntArrayRef sizes) {
  std::string text = "[";
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (i > 0) text += ", ";
    text += sizes[i] < 0 ? "*" : std::to_string(sizes[i]);
  }
  return text + "]";
}

}  // namespace

void check_shape(std::string_view what, const at::Tensor& tensor,
                 std::initializer_list<int64_t> expected) {
  bool same = tensor.defined() && tensor.dim() == static_cast<int64_t>(expected.size());
  size_t dim = 0;
  for (int64_t size : expected) {
    if (!same) break;
    same = size < 0 || tensor.size(static_cast<int64_t>(dim)) == size;
    ++dim;
  }
  if (same) return;
  throw InternalError(cat("internal error: ", what, " has shape ",
                          tensor.defined() ? shape_text(tensor.sizes()) : "(undefined)",
                          ", expected ",
                          shape_text(at::IntArrayRef(expected.begin(), expected.size()))));
}

at::ScalarType to_scalar_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return at::kDouble;
    case DType::kFloat32:
      return at::kFloat;
    case DType::kBFloat16:
      return at::kBFloat16;
    case DType::kFloat16:
      return at::kHalf;
    case DType::kInt64:
      return at::kLong;
    case DType::kInt32:
      return at::kInt;
    case DType::kInt16:
      return at::kShort;
    case DType::kInt8:
      return at::kChar;
    case DType::kUInt8:
      return at::kByte;
    case DType::kBool:
      return at::kBool;
    case DType::kFloat8E4M3:
      return at::kFloat8_e4m3fn;
  }
  throw InternalError(
      cat("internal error: element type ", static_cast<int>(dtype), " has no torch counterpart"));
}

DType to_dtype(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return DType::kFloat64;
    case at::kFloat:
      return DType::kFloat32;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kHalf:
      return DType::kFloat16;
    case at::kLong:
      return DType::kInt64;
    case at::kInt:
      return DType::kInt32;
    case at::kShort:
      return DType::kInt16;
    case at::kChar:
      return DType::kInt8;
    case at::kByte:
      return DType::kUInt8;
    case at::kBool:
      return DType::kBool;
    case at::kFloat8_e4m3fn:
      return DType::kFloat8E4M3;
    default:
      throw InternalError(
          cat("internal error: element type ", c10::toString(type), " is not one that we store"));
  }
}

at::ScalarType accumulate_type(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace megatron
