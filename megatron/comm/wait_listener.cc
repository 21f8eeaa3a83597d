#include "megatron/comm/wait_listener.h"

#include <optional>
#include <utility>

#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

class Waiting {
 public:
  explicit Waiting(WaitListener& listener) : listener_(listener) { listener_.begin_wait(); }
  ~Waiting() { listener_.end_wait(); }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

 private:
  WaitListener& listener_;
};

class WatchedWork final : public Work {
 public:
  WatchedWork(std::shared_ptr<Work> inner, std::shared_ptr<WaitListener> listener)
      : inner_(std::move(inner)), listener_(std::move(listener)) {}
  void wait() override {
    const Waiting waiting(*listener_);
    inner_->wait();
  }
  std::shared_ptr<const Progress> progress() const override { return inner_->progress(); }

 private:
  std::shared_ptr<Work> inner_;
  std::shared_ptr<WaitListener> listener_;
};

class WatchedBackend final : public Backend {
 public:
  WatchedBackend(std::shared_ptr<Backend> inner, std::shared_ptr<WaitListener> listener)
      : inner_(std::move(inner)), listener_(std::move(listener)) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  std::shared_ptr<Work> all_reduce(at::Tensor tensor, ReduceOp op) override {
    return watched(tensor, [&] { return inner_->all_reduce(tensor, op); });
  }
  std::shared_ptr<Work> all_gather(at::Tensor output, at::Tensor input) override {
    return watched(output, [&] { return inner_->all_gather(output, input); });
  }
  std::shared_ptr<Work> reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op) override {
    return watched(output, [&] { return inner_->reduce_scatter(output, input, op); });
  }
  std::shared_ptr<Work> all_to_all(at::Tensor output, std::vector<int64_t> output_sizes,
                                   at::Tensor input, std::vector<int64_t> input_sizes) override {
    return watched(output, [&] {
      return inner_->all_to_all(output, std::move(output_sizes), input, std::move(input_sizes));
    });
  }
  std::shared_ptr<Work> broadcast(at::Tensor tensor, int root) override {
    return watched(tensor, [&] { return inner_->broadcast(tensor, root); });
  }
  std::shared_ptr<Work> send(at::Tensor tensor, int peer) override {
    return watched(tensor, [&] { return inner_->send(tensor, peer); });
  }
  std::shared_ptr<Work> recv(at::Tensor tensor, int peer) override {
    return watched(tensor, [&] { return inner_->recv(tensor, peer); });
  }
  void barrier() override {
    const Waiting waiting(*listener_);
    inner_->barrier();
  }
  std::shared_ptr<Backend> subgroup(const std::vector<int>& ranks, const std::string& name,
                                    CommunicatorUse use) override {
    return std::make_shared<WatchedBackend>(inner_->subgroup(ranks, name, use), listener_);
  }

 private:
  template <class Call>
  std::shared_ptr<Work> watched(const at::Tensor& tensor, const Call& call) {
    std::optional<Waiting> waiting;
    if (tensor.is_cpu()) waiting.emplace(*listener_);
    return std::make_shared<WatchedWork>(call(), listener_);
  }

  std::shared_ptr<Backend> inner_;
  std::shared_ptr<WaitListener> listener_;
};

}  // namespace

std::shared_ptr<Backend> watch_waits(std::shared_ptr<Backend> world,
                                     std::shared_ptr<WaitListener> listener) {
  return std::make_shared<WatchedBackend>(std::move(world), std::move(listener));
}

}  // namespace megatron
