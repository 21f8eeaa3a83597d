#include "megatron/comm/process_group.h"

#include <algorithm>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/comm/one_shot/peer_collectives.h"
#include "megatron/comm/peer_mailbox.h"
#include "megatron/comm/peer_rows.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

class NoWork final : public Work {
 public:
  void wait() override {}
};

std::shared_ptr<Work> no_work() {
  static const auto work = std::make_shared<NoWork>();
  return work;
}

// The object that others hold already, or a new one.
template <class T>
std::shared_ptr<T> shared_by_holders(std::weak_ptr<T>& held, const ProcessGroup& group) {
  std::shared_ptr<T> object = held.lock();
  if (object == nullptr) held = object = std::make_shared<T>(group);
  return object;
}

void copy_flat(const char* what, at::Tensor& output, const at::Tensor& input) {
  MEGATRON_CHECK(output.numel() == input.numel(), what, " over 1 rank takes equal sizes, got ",
                 input.numel(), " elements into ", output.numel());
  output.view({-1}).copy_(input.reshape({-1}));
}

}  // namespace

ProcessGroup::ProcessGroup(std::shared_ptr<Backend> backend, std::string name)
    : backend_(std::move(backend)), name_(std::move(name)) {}

std::shared_ptr<Work> ProcessGroup::all_reduce(at::Tensor tensor, ReduceOp op) const {
  if (size() == 1) return no_work();
  if (const auto peers = held_peer_collectives(); peers && peers->takes_reduction(tensor)) {
    peers->all_reduce(tensor, op);
    return no_work();
  }
  return backend_->all_reduce(std::move(tensor), op);
}

std::shared_ptr<Work> ProcessGroup::all_gather(at::Tensor output, at::Tensor input) const {
  if (const auto peers = held_peer_collectives(); peers && peers->takes_gather(input)) {
    peers->all_gather(output, input);
    return no_work();
  }
  if (size() > 1) return backend_->all_gather(std::move(output), std::move(input));
  copy_flat("all_gather", output, input);
  return no_work();
}

std::shared_ptr<Work> ProcessGroup::reduce_scatter(at::Tensor output, at::Tensor input,
                                                   ReduceOp op) const {
  if (const auto peers = held_peer_collectives(); peers && peers->takes_scatter(input)) {
    const at::Tensor sum = input.clone();
    peers->all_reduce(sum, op);
    output.view({-1}).copy_(sum.view({size(), -1})[rank()]);
    return no_work();
  }
  if (size() > 1) return backend_->reduce_scatter(std::move(output), std::move(input), op);
  copy_flat("reduce_scatter", output, input);
  return no_work();
}

std::shared_ptr<Work> ProcessGroup::all_to_all(at::Tensor output, std::vector<int64_t> output_sizes,
                                               at::Tensor input,
                                               std::vector<int64_t> input_sizes) const {
  if (size() > 1) {
    return backend_->all_to_all(std::move(output), std::move(output_sizes), std::move(input),
                                std::move(input_sizes));
  }
  copy_flat("all_to_all", output, input);
  return no_work();
}

std::shared_ptr<Work> ProcessGroup::broadcast(at::Tensor tensor, int root) const {
  MEGATRON_CHECK(root >= 0 && root < size(), "broadcast from rank ", root, " of group ", name_,
                 ", which has ", size(), " ranks");
  if (size() == 1) return no_work();
  return backend_->broadcast(std::move(tensor), root);
}

std::shared_ptr<Work> ProcessGroup::send(at::Tensor tensor, int peer) const {
  MEGATRON_CHECK(peer >= 0 && peer < size() && peer != rank(), "send from rank ", rank(),
                 " to rank ", peer, " of group ", name_, ", which has ", size(), " ranks");
  return backend_->send(std::move(tensor), peer);
}

std::shared_ptr<Work> ProcessGroup::recv(at::Tensor tensor, int peer) const {
  MEGATRON_CHECK(peer >= 0 && peer < size() && peer != rank(), "recv on rank ", rank(),
                 " from rank ", peer, " of group ", name_, ", which has ", size(), " ranks");
  return backend_->recv(std::move(tensor), peer);
}

void ProcessGroup::barrier() const {
  if (size() > 1) backend_->barrier();
}

ProcessGroup ProcessGroup::subgroup(const std::vector<int>& ranks, const std::string& name,
                                    CommunicatorUse use) const {
  MEGATRON_ASSERT(std::find(ranks.begin(), ranks.end(), rank()) != ranks.end(), "rank ", rank(),
                  " is no member of the group ", name);
  if (ranks.size() == 1) return {};
  return {backend_->subgroup(ranks, name, use), name};
}

std::shared_ptr<PeerMailbox> ProcessGroup::mailbox() const {
  return size() == 1 ? nullptr : shared_by_holders(backend_->mailbox_, *this);
}

std::shared_ptr<PeerRows> ProcessGroup::peer_rows() const {
  return size() == 1 ? nullptr : shared_by_holders(backend_->peer_rows_, *this);
}

std::shared_ptr<PeerCollectives> ProcessGroup::peer_collectives() const {
  return size() == 1 ? nullptr : shared_by_holders(backend_->peer_collectives_, *this);
}

std::shared_ptr<PeerCollectives> ProcessGroup::held_peer_collectives() const {
  return size() == 1 ? nullptr : backend_->peer_collectives_.lock();
}

}  // namespace megatron
