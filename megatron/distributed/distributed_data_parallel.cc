#include "megatron/distributed/distributed_data_parallel.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

// Megatron's default: large enough for the bandwidth of the collective, and more so over more ranks.
int64_t bucket_size(const DistributedDataParallelConfig& config, int data_ranks) {
  if (config.bucket_size > 0) return config.bucket_size;
  if (data_ranks == 1) return 0;
  return std::max<int64_t>(40'000'000, int64_t{1'000'000} * data_ranks);
}

}  // namespace

DistributedDataParallel::DistributedDataParallel(Module& module, const ParallelGroups& groups,
                                                 at::ScalarType dtype, at::Device device,
                                                 const DistributedDataParallelConfig& config)
    : groups_(groups), dtype_(dtype) {
  std::vector<Parameter*> parameters;
  module.visit([&](const std::string& name, Parameter& parameter) {
    if (parameter.name.empty()) parameter.name = name;
    MEGATRON_CHECK(!parameter.placement.expert, "parameter ", parameter.name,
                   " belongs to an expert, which data parallelism does not support yet");
    parameters.push_back(&parameter);
  });
  BufferOptions options;
  options.bucket_size = bucket_size(config, groups.dp_cp.size());
  buffer_ = std::make_unique<GradBuffer>(std::move(parameters), dtype, device, options);
  const std::vector<Parameter*>& all = buffer_->parameters();
  for (size_t i = 0; i < all.size(); ++i) {
    all[i]->value = buffer_->view(buffer_->values(), static_cast<int>(i));
    all[i]->store = this;
    grad_views_.push_back(buffer_->view(buffer_->grads(), static_cast<int>(i)));
  }
}

DistributedDataParallel::~DistributedDataParallel() {
  for (Parameter* parameter : buffer_->parameters()) {
    if (parameter->store == this) parameter->store = nullptr;
  }
}

std::vector<StateView> DistributedDataParallel::grad_views() const {
  std::vector<StateView> out;
  for (Parameter* p : buffer_->parameters()) out.push_back({p, 0, grad(*p)});
  return out;
}
std::vector<StateView> DistributedDataParallel::value_views() const {
  std::vector<StateView> out;
  for (Parameter* p : buffer_->parameters()) out.push_back({p, 0, p->value});
  return out;
}
at::Device DistributedDataParallel::device() const { return buffer_->values().device(); }

GradTarget DistributedDataParallel::grad_target(Parameter& parameter) { return {grad(parameter), 1.0}; }

at::Tensor DistributedDataParallel::grad(const Parameter& parameter) const {
  const int index = buffer_->index_of(parameter);
  MEGATRON_ASSERT(index >= 0, "parameter ", parameter.name, " is not in this buffer");
  return grad_views_[index];
}

void DistributedDataParallel::grad_ready(Parameter& parameter) {
  if (!in_last_pass_) return;
  const int index = buffer_->index_of(parameter);
  MEGATRON_ASSERT(index >= 0, "parameter ", parameter.name, " is not in this buffer");
  MEGATRON_ASSERT(uses_left_[index] > 0, "gradient of ", parameter.name, " was reported more than ",
                  parameter.uses, " times in one pass");
  if (--uses_left_[index] > 0) return;
  --parameters_left_[buffer_->layout().slots[index].bucket];
  launch_ready_buckets(/*all=*/false);
}

void DistributedDataParallel::zero_grad() {
  buffer_->grads().zero_();
  in_last_pass_ = false;
  next_bucket_ = 0;
  work_.clear();
}

void DistributedDataParallel::last_pass() {
  in_last_pass_ = true;
  uses_left_.clear();
  parameters_left_.clear();
  for (const Parameter* parameter : buffer_->parameters()) uses_left_.push_back(parameter->uses);
  for (const BufferBucket& bucket : buffer_->layout().buckets) {
    parameters_left_.push_back(static_cast<int>(bucket.parameters.size()));
  }
}

// Launches buckets in their fixed order, up to the first that is not complete, or every one with `all`. Sums over the tensor
// ranks come before the sum over data ranks, at the end; a model that has any waits with all its buckets.
void DistributedDataParallel::launch_ready_buckets(bool all) {
  if (groups_.dp_cp.size() == 1 || (groups_.tp.size() > 1 && !all)) return;
  const size_t num_buckets = buffer_->layout().buckets.size();
  while (next_bucket_ < num_buckets && (all || parameters_left_[next_bucket_] == 0)) {
    work_.push_back(groups_.dp_cp.all_reduce(buffer_->bucket_grads(static_cast<int>(next_bucket_))));
    ++next_bucket_;
  }
}

void DistributedDataParallel::sum_partial_gradients() {
  if (groups_.tp.size() == 1) return;
  const std::vector<Parameter*>& all = buffer_->parameters();
  for (size_t i = 0; i < all.size(); ++i) {
    if (!all[i]->placement.partial_grad.contains(Axis::kTensor)) continue;
    groups_.tp.all_reduce(grad_views_[i])->wait();
  }
}

void DistributedDataParallel::finish_grad_sync() {
  sum_partial_gradients();
  launch_ready_buckets(/*all=*/true);
  for (const std::shared_ptr<Work>& work : work_) work->wait();
  work_.clear();
  next_bucket_ = 0;
  in_last_pass_ = false;
}

}  // namespace megatron
