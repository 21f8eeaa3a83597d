#include "megatron/comm/thread_backend.h"

#include <atomic>
#include <cstddef>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/comm/detail/element_type.h"
#include "megatron/comm/detail/thread_core.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

// A send: buffered, so always complete.
class DoneWork final : public Work {
 public:
  void wait() override {}
};

std::shared_ptr<Work> done() {
  static const auto work = std::make_shared<DoneWork>();
  return work;
}

// Collectives have finished when they return, but the result becomes visible only in wait(), so
// that code which forgets to wait computes with stale data every time, not only where the network
// is slow.
class Collective final : public Work {
 public:
  // `target`: where the result belongs. The operation works on a separate buffer, a copy of the
  // target if it reads it, else uninitialised. The buffer belongs to the transport, so that
  // tensors' allocators count what they would count over a network.
  explicit Collective(at::Tensor target, bool reads_target)
      : target_(std::move(target)),
        result_(std::make_unique_for_overwrite<std::byte[]>(target_.nbytes())) {
    if (reads_target && target_.numel() > 0)
      std::memcpy(result_.get(), target_.const_data_ptr(), target_.nbytes());
  }

  void* data() { return result_.get(); }
  void wait() override {
    if (!result_) return;
    if (target_.numel() > 0) std::memcpy(target_.data_ptr(), result_.get(), target_.nbytes());
    result_.reset();
  }

 private:
  at::Tensor target_;
  std::unique_ptr<std::byte[]> result_;
};

// A receive takes its message in wait(), so that posting it early does not block. Messages of one
// sender are taken in the order in which the receives were posted, whatever the order of the waits.
class Receive final : public Work {
 public:
  // Of one sender.
  struct Queue {
    std::deque<std::shared_ptr<Receive>> waiting;
    std::shared_ptr<std::atomic<int64_t>> taken = std::make_shared<std::atomic<int64_t>>(0);
  };
  using Pending = std::map<int, Queue>;
  Receive(std::shared_ptr<Pending> pending, at::Tensor tensor, int peer, const ThreadCore& core)
      : pending_(std::move(pending)), tensor_(std::move(tensor)), peer_(peer), core_(core) {
    Queue& queue = (*pending_)[peer];
    arrived_ = std::make_shared<Arrived>(core, peer, *queue.taken + std::ssize(queue.waiting),
                                         queue.taken);
  }

  void wait() override {
    Queue& queue = (*pending_)[peer_];
    while (!taken_) {
      const std::shared_ptr<Receive> next = queue.waiting.front();
      queue.waiting.pop_front();
      next->taken_ = true;
      core_.recv(next->tensor_.data_ptr(), next->tensor_.numel(),
                 to_dtype(next->tensor_.scalar_type()), peer_);
      ++*queue.taken;
    }
  }
  std::shared_ptr<const Progress> progress() const override { return arrived_; }

 private:
  // Whether the message is there: wait() does not block then.
  struct Arrived final : Progress {
    Arrived(const ThreadCore& core, int peer, int64_t index,
            std::shared_ptr<std::atomic<int64_t>> taken)
        : core(core), peer(peer), index(index), taken(std::move(taken)) {}
    bool finished() const override { return *taken + core.num_messages(peer) > index; }
    const ThreadCore core;
    const int peer;
    const int64_t index;  // among the receives from this peer
    const std::shared_ptr<std::atomic<int64_t>> taken;
  };

  std::shared_ptr<Pending> pending_;
  at::Tensor tensor_;
  int peer_;
  ThreadCore core_;
  bool taken_ = false;
  std::shared_ptr<Arrived> arrived_;
};

class ThreadBackend final : public Backend {
 public:
  explicit ThreadBackend(ThreadCore core) : core_(std::move(core)) {}

  int rank() const override { return core_.rank(); }
  int size() const override { return core_.size(); }

  std::shared_ptr<Work> all_reduce(at::Tensor tensor, ReduceOp op) override {
    const DType dtype = check_cpu_tensor("all_reduce", tensor);
    auto work = std::make_shared<Collective>(tensor, /*reads_target=*/true);
    core_.all_reduce(work->data(), tensor.numel(), dtype, op);
    return work;
  }

  std::shared_ptr<Work> all_gather(at::Tensor output, at::Tensor input) override {
    const DType dtype = same_type("all_gather", output, input);
    MEGATRON_CHECK(output.numel() == size() * input.numel(), "all_gather of ", input.numel(),
                   " elements over ", size(), " ranks into ", output.numel(), " elements");
    auto work = std::make_shared<Collective>(output, /*reads_target=*/false);
    core_.all_gather(work->data(), input.data_ptr(), input.numel(), dtype);
    return work;
  }

  std::shared_ptr<Work> reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op) override {
    const DType dtype = same_type("reduce_scatter", output, input);
    MEGATRON_CHECK(input.numel() == size() * output.numel(), "reduce_scatter of ", input.numel(),
                   " elements over ", size(), " ranks into ", output.numel(), " elements");
    auto work = std::make_shared<Collective>(output, /*reads_target=*/false);
    core_.reduce_scatter(work->data(), input.data_ptr(), output.numel(), dtype, op);
    return work;
  }

  // Sizes count rows: entries of the first dimension.
  std::shared_ptr<Work> all_to_all(at::Tensor output, std::vector<int64_t> output_sizes,
                                   at::Tensor input, std::vector<int64_t> input_sizes) override {
    const DType dtype = same_type("all_to_all", output, input);
    scale_to_elements("all_to_all output", output, output_sizes);
    scale_to_elements("all_to_all input", input, input_sizes);
    auto work = std::make_shared<Collective>(output, /*reads_target=*/false);
    core_.all_to_all(work->data(), output_sizes, input.data_ptr(), input_sizes, dtype);
    return work;
  }

  std::shared_ptr<Work> broadcast(at::Tensor tensor, int root) override {
    const DType dtype = check_cpu_tensor("broadcast", tensor);
    auto work = std::make_shared<Collective>(tensor, /*reads_target=*/true);
    core_.broadcast(work->data(), tensor.numel(), dtype, root);
    return work;
  }

  std::shared_ptr<Work> send(at::Tensor tensor, int peer) override {
    const DType dtype = check_cpu_tensor("send", tensor);
    core_.send(tensor.data_ptr(), tensor.numel(), dtype, peer);
    return done();
  }

  std::shared_ptr<Work> recv(at::Tensor tensor, int peer) override {
    check_cpu_tensor("recv", tensor);
    auto work = std::make_shared<Receive>(pending_, tensor, peer, core_);
    (*pending_)[peer].waiting.push_back(work);
    return work;
  }

  void barrier() override { core_.barrier(); }

  std::shared_ptr<Backend> subgroup(const std::vector<int>& ranks, const std::string& name,
                                    CommunicatorUse) override {
    return std::make_shared<ThreadBackend>(core_.subgroup(ranks, name));
  }

 private:
  static DType same_type(const char* what, const at::Tensor& output, const at::Tensor& input) {
    const DType dtype = check_cpu_tensor(what, output);
    MEGATRON_CHECK(check_cpu_tensor(what, input) == dtype, what, " from ",
                   to_string(to_dtype(input.scalar_type())), " to ", to_string(dtype));
    return dtype;
  }

  static void scale_to_elements(const char* what, const at::Tensor& tensor,
                                std::vector<int64_t>& sizes) {
    const int64_t rows = tensor.size(0);
    int64_t sum = 0;
    for (int64_t size : sizes) sum += size;
    MEGATRON_CHECK(sum == rows, what, " has ", rows, " rows, its sizes sum to ", sum);
    const int64_t width = rows > 0 ? tensor.numel() / rows : 0;
    for (int64_t& size : sizes) size *= width;
  }

  ThreadCore core_;
  std::shared_ptr<Receive::Pending> pending_ = std::make_shared<Receive::Pending>();
};

}  // namespace

void run_ranks(int size, const std::function<void(const std::shared_ptr<Backend>&)>& body,
               double timeout_seconds) {
  // Each rank computes on its own thread only (no intra-op parallelism).
  const int threads_before = at::get_num_threads();
  const auto restore = [&] { at::set_num_threads(threads_before); };
  try {
    run_threads(
        size,
        [&](ThreadCore& core) {
          at::set_num_threads(1);
          body(std::make_shared<ThreadBackend>(core));
        },
        timeout_seconds);
  } catch (...) {
    restore();
    throw;
  }
  restore();
}

}  // namespace megatron
