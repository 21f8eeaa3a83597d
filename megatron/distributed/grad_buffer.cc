#include "megatron/distributed/grad_buffer.h"

#include <numeric>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

int64_t num_elements(const Parameter& parameter) {
  return std::accumulate(parameter.local_shape.begin(), parameter.local_shape.end(), int64_t{1},
                         std::multiplies<>());
}

}  // namespace

GradBuffer::GradBuffer(std::vector<Parameter*> parameters, at::ScalarType dtype, at::Device device,
                       const BufferOptions& options)
    : parameters_(std::move(parameters)) {
  std::vector<BufferParameter> sizes;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const Parameter& parameter = *parameters_[i];
    const bool tied = parameter.role == ParameterRole::kEmbedding && parameter.uses > 1;
    sizes.push_back({num_elements(parameter), tied});
    const bool inserted = index_.emplace(&parameter, static_cast<int>(i)).second;
    MEGATRON_ASSERT(inserted, "parameter ", parameter.name, " is listed twice");
  }
  layout_ = plan_buffer(sizes, options);
  const auto grad_dtype = dtype == at::kDouble ? at::kDouble : at::kFloat;
  grads_ = at::zeros({layout_.num_elements}, at::TensorOptions().dtype(grad_dtype).device(device));
  values_ = at::zeros({layout_.num_elements}, at::TensorOptions().dtype(dtype).device(device));
}

int GradBuffer::index_of(const Parameter& parameter) const {
  const auto found = index_.find(&parameter);
  return found == index_.end() ? -1 : found->second;
}

at::Tensor GradBuffer::bucket_grads(int bucket) const {
  const BufferBucket& range = layout_.buckets.at(bucket);
  return grads_.narrow(0, range.begin, range.end - range.begin);
}

at::Tensor GradBuffer::view(const at::Tensor& flat, int index) const {
  const BufferSlot& slot = layout_.slots.at(index);
  return flat.narrow(0, slot.begin, slot.end - slot.begin).view(parameters_.at(index)->local_shape);
}

}  // namespace megatron
