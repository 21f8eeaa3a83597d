#include "megatron/training/replicated_state.h"

#include <algorithm>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"

namespace megatron {

namespace {

constexpr int64_t kMaxBroadcastBytes = int64_t{256} << 20;

bool has_replicas(const StateTensor& tensor) {
  return tensor.replicas != nullptr && tensor.replicas->size() > 1;
}

StateTensor narrowed(const StateTensor& tensor, const ReplicaPart& part) {
  StateTensor out = tensor;
  out.description.flat_end = tensor.description.flat_begin + part.end;
  out.description.flat_begin += part.begin;
  out.data = tensor.data.narrow(0, part.begin, part.end - part.begin);
  return out;
}

// The parts of those replicated tensors that `counts` accepts. Tensors of one replica group are
// divided together, so that the parts are even.
template <class Counts>
std::vector<ReplicaPart> divide(const std::vector<StateTensor>& tensors, const Counts& counts) {
  // In order of first use, the same on all replicas
  std::vector<std::pair<const ProcessGroup*, std::vector<size_t>>> groups;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!has_replicas(tensors[i]) || !counts(tensors[i])) continue;
    const auto same = [&](const auto& group) { return group.first == tensors[i].replicas; };
    auto group = std::find_if(groups.begin(), groups.end(), same);
    if (group == groups.end()) group = groups.insert(groups.end(), {tensors[i].replicas, {}});
    group->second.push_back(i);
  }
  std::vector<ReplicaPart> parts;
  for (const auto& [replicas, members] : groups) {
    std::vector<TensorSize> sizes;
    for (size_t i : members)
      sizes.push_back(
          {tensors[i].data.numel(), static_cast<int64_t>(tensors[i].data.element_size())});
    for (ReplicaPart part : divide_among_replicas(sizes, replicas->size())) {
      part.tensor = members[part.tensor];
      parts.push_back(part);
    }
  }
  return parts;
}

// Broadcasts `bytes` of rank `owner`. Host tensors are copied through the device of the group.
void broadcast(const ProcessGroup& replicas, const at::Tensor& bytes, int owner,
               at::Device device) {
  for (int64_t at = 0; at < bytes.numel(); at += kMaxBroadcastBytes) {
    const at::Tensor piece = bytes.narrow(0, at, std::min(kMaxBroadcastBytes, bytes.numel() - at));
    const bool direct = piece.device() == device;
    const at::Tensor passed = direct ? piece : piece.to(device);
    replicas.broadcast(passed, owner)->wait();
    if (!direct && replicas.rank() != owner) piece.copy_(passed);
  }
}

}  // namespace

std::vector<StateTensor> parts_to_write(const std::vector<StateTensor>& tensors) {
  std::vector<StateTensor> out;
  for (const StateTensor& tensor : tensors)
    if (!has_replicas(tensor) && tensor.description.replica_id == 0) out.push_back(tensor);
  for (const ReplicaPart& part :
       divide(tensors, [](const StateTensor& tensor) { return tensor.copy == 0; })) {
    if (part.replica != tensors[part.tensor].replicas->rank()) continue;
    out.push_back(narrowed(tensors[part.tensor], part));
    out.back().description.replica_id = 0;
  }
  return out;
}

ReplicatedRead::ReplicatedRead(std::vector<StateTensor> tensors) : tensors_(std::move(tensors)) {
  plan_ = divide(tensors_, [](const StateTensor&) { return true; });
  for (const StateTensor& tensor : tensors_)
    if (!has_replicas(tensor)) parts_.push_back(tensor);
  for (const ReplicaPart& part : plan_)
    if (part.replica == tensors_[part.tensor].replicas->rank())
      parts_.push_back(narrowed(tensors_[part.tensor], part));
}

void ReplicatedRead::share() const {
  for (const ReplicaPart& part : plan_) {
    if (part.begin == part.end) continue;
    const StateTensor& tensor = tensors_[part.tensor];
    const at::Tensor elements = tensor.data.narrow(0, part.begin, part.end - part.begin);
    MEGATRON_ASSERT(elements.is_contiguous(), tensor.description.key, " is not contiguous");
    broadcast(*tensor.replicas, elements.view(at::kByte), part.replica, tensor.device);
  }
}

}  // namespace megatron
