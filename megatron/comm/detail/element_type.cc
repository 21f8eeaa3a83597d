#include "megatron/comm/detail/element_type.h"

#include "megatron/base/check.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {

std::string element_type_name(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
    case at::kFloat:
    case at::kBFloat16:
    case at::kHalf:
    case at::kLong:
    case at::kInt:
    case at::kShort:
    case at::kChar:
    case at::kByte:
    case at::kBool:
      return std::string(to_string(to_dtype(type)));
    default:
      return c10::toString(type);
  }
}

DType check_cpu_tensor(const char* what, const at::Tensor& tensor) {
  MEGATRON_CHECK(tensor.device().is_cpu(), what,
                 " between ranks on CPUs takes CPU tensors, got one on ", tensor.device().str());
  MEGATRON_CHECK(tensor.is_contiguous(), what, " takes contiguous tensors");
  return to_dtype(tensor.scalar_type());
}

}  // namespace megatron
