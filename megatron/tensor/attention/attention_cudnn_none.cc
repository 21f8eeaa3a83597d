#include "megatron/base/check.h"
#include "megatron/tensor/detail/attention_cudnn.h"
#include "megatron/tensor/torch.h"

namespace megatron {

std::string why_not_cudnn(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                          const AttentionOptions&) {
  return "this build has no CUDA";
}

at::Tensor cudnn_attention_forward(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                   const at::Tensor&, const AttentionOptions&) {
  throw_error("internal error: cuDNN attention in a build without CUDA");
}

void cudnn_attention_backward(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                              const at::Tensor&, const at::Tensor&, const at::Tensor&,
                              const at::Tensor&, const at::Tensor&, const at::Tensor&,
                              const AttentionOptions&) {
  throw_error("internal error: cuDNN attention in a build without CUDA");
}

std::string why_not_cudnn_ranges(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                 const QueryKeyRanges&, const AttentionOptions&) {
  return "this build has no CUDA";
}

bool cudnn_has_ranges_forward(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                              const at::Tensor&, const QueryKeyRanges&, const AttentionOptions&) {
  return false;
}

at::Tensor cudnn_ranges_forward(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                const at::Tensor&, const QueryKeyRanges&, const AttentionOptions&) {
  throw_error("internal error: cuDNN attention in a build without CUDA");
}

void cudnn_ranges_backward(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                           const at::Tensor&, const at::Tensor&, const at::Tensor&,
                           const at::Tensor&, const at::Tensor&, const at::Tensor&,
                           const QueryKeyRanges&, const AttentionOptions&) {
  throw_error("internal error: cuDNN attention in a build without CUDA");
}

}  // namespace megatron
