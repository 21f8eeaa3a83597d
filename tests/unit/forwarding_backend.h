// Backends for tests that observe or modify some calls of a rank.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/comm/process_group.h"

namespace megatron {

// Forwards every call.
class ForwardingBackend : public Backend {
 public:
  explicit ForwardingBackend(std::shared_ptr<Backend> inner) : inner_(std::move(inner)) {}
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  std::shared_ptr<Work> all_reduce(at::Tensor tensor, ReduceOp op) override {
    return inner_->all_reduce(tensor, op);
  }
  std::shared_ptr<Work> all_gather(at::Tensor output, at::Tensor input) override {
    return inner_->all_gather(output, input);
  }
  std::shared_ptr<Work> reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op) override {
    return inner_->reduce_scatter(output, input, op);
  }
  std::shared_ptr<Work> all_to_all(at::Tensor output, std::vector<int64_t> output_sizes,
                                   at::Tensor input, std::vector<int64_t> input_sizes) override {
    return inner_->all_to_all(output, output_sizes, input, input_sizes);
  }
  std::shared_ptr<Work> broadcast(at::Tensor tensor, int root) override {
    return inner_->broadcast(tensor, root);
  }
  std::shared_ptr<Work> send(at::Tensor tensor, int peer) override {
    return inner_->send(tensor, peer);
  }
  std::shared_ptr<Work> recv(at::Tensor tensor, int peer) override {
    return inner_->recv(tensor, peer);
  }
  void barrier() override { inner_->barrier(); }
  std::shared_ptr<Backend> subgroup(const std::vector<int>& ranks, const std::string& name,
                                    CommunicatorUse use) override {
    return inner_->subgroup(ranks, name, use);
  }

 protected:
  std::shared_ptr<Backend> inner_;
};

// Forwards collectives only: messages and exchanges are not expected.
class CollectivesOnlyBackend : public ForwardingBackend {
 public:
  using ForwardingBackend::ForwardingBackend;
  std::shared_ptr<Work> all_to_all(at::Tensor, std::vector<int64_t>, at::Tensor,
                                   std::vector<int64_t>) override {
    throw_error("unexpected");
  }
  std::shared_ptr<Work> broadcast(at::Tensor, int) override { throw_error("unexpected"); }
  std::shared_ptr<Work> send(at::Tensor, int) override { throw_error("unexpected"); }
  std::shared_ptr<Work> recv(at::Tensor, int) override { throw_error("unexpected"); }
};

}  // namespace megatron
