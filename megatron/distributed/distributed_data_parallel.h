// Owner of a model's weights and gradients under data parallelism: sums gradients over the ranks that hold different tokens.
#pragma once

#include <memory>
#include <vector>

#include "megatron/comm/parallel_groups.h"
#include "megatron/distributed/grad_buffer.h"
#include "megatron/nn/module.h"

namespace megatron {

struct DistributedDataParallelConfig {
  // Elements per bucket; 0: max(40,000,000, 1,000,000 * data ranks), or a single bucket at one data rank.
  int64_t bucket_size = 0;
};

struct StateView { Parameter* parameter; int64_t flat_begin; at::Tensor data; };

// Gradients are summed, never averaged: losses are (sum, weight) pairs and the optimizer divides once by the weight of the
// whole step.
//
// A step: zero_grad(); for each micro-batch a backward, before the last one of them last_pass(); finish_grad_sync();
// Optimizer::step(). Buckets are reduced in one fixed order, as they fill during the last pass or at the end, so that every
// rank issues the same collectives whatever it used.
//
// Communication: one all-reduce per bucket over dp_cp; one per parameter over tp where only a partial gradient is known.
// Not thread safe. Keeps references to module and groups, which must outlive it.
class DistributedDataParallel final : public ParameterStore {
 public:
  // Allocates values (zeros) and gradients of every parameter of `module`, names the parameters that have no name yet, and
  // attaches itself as their store. Throws Error for expert parameters, which are not built yet.
  DistributedDataParallel(Module& module, const ParallelGroups& groups, at::ScalarType dtype,
                          at::Device device, const DistributedDataParallelConfig& config = {});
  ~DistributedDataParallel() override;
  DistributedDataParallel(const DistributedDataParallel&) = delete;
  DistributedDataParallel& operator=(const DistributedDataParallel&) = delete;

  at::Tensor acquire(Parameter& parameter) override { return parameter.value; }
  void release(Parameter&) override {}
  GradTarget grad_target(Parameter& parameter) override;
  void grad_ready(Parameter& parameter) override;

  // Gradients become zero; counts start again.
  void zero_grad();
  // The next backward is the last of this step: buckets may be reduced as soon as they are complete.
  void last_pass();
  // Waits until every gradient is the sum over all ranks. Call once per step, after the last backward.
  void finish_grad_sync();

  at::Tensor grad(const Parameter& parameter) const;  // a view, shaped like the value
  const GradBuffer& buffer() const { return *buffer_; }
  const ParallelGroups& groups() const { return groups_; }
  at::ScalarType dtype() const { return dtype_; }
  at::Device device() const;
  bool defer(std::function<void()> weight_gradient) override {
    if (deferred_) deferred_->push_back(std::move(weight_gradient));
    return deferred_ != nullptr;
  }
  std::vector<StateView> grad_views() const;
  std::vector<StateView> value_views() const;
  void defer_to(std::vector<std::function<void()>>* queue) { deferred_ = queue; }

 private:
  void launch_ready_buckets(bool all);
  void sum_partial_gradients();

  const ParallelGroups& groups_;
  at::ScalarType dtype_;
  std::unique_ptr<GradBuffer> buffer_;
  std::vector<at::Tensor> grad_views_;      // by parameter
  std::vector<int> uses_left_;              // by parameter, in the last pass
  std::vector<int> parameters_left_;        // by bucket, in the last pass
  std::vector<std::shared_ptr<Work>> work_; // by launched bucket
  size_t next_bucket_ = 0;
  bool in_last_pass_ = false;
  std::vector<std::function<void()>>* deferred_ = nullptr;
};

}  // namespace megatron
