#include "megatron/distributed/shard_gather.h"

#include <utility>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"

namespace megatron {

ShardGather::ShardGather(const ProcessGroup& group, const at::Tensor& buffer, bool peer_copies)
    : group_(group), buffer_(buffer) {
  if (!peer_copies || group.size() == 1) return;
  SharedMemory shared = share_memory(buffer, group);
  peers_ = std::move(shared.peers);
  obstacle_ = std::move(shared.obstacle);
  token_ = at::zeros({1}, buffer.options().dtype(at::kFloat));
}

std::shared_ptr<Work> ShardGather::gather(const at::Tensor& whole, const ShardPlaces& places) {
  const int size = group_.size(), own = group_.rank();
  const int64_t count = whole.numel() / size;
  const at::Tensor part = buffer_.narrow(0, places.begin + own * places.stride, count);
  if (!peers_) return group_.all_gather(whole, part);
  reading_ = true;
  std::vector<PeerCopy> copies;
  for (int step = 0; step < size; ++step) {  // no two ranks read from the same peer at a time
    const int rank = (own + step) % size;
    const at::Tensor destination = whole.narrow(0, rank * count, count);
    if (rank == own && destination.const_data_ptr() == part.const_data_ptr()) continue;
    copies.push_back({rank, places.begin + rank * places.stride, destination});
  }
  return peers_->run([&] { peers_->read(std::move(copies)); });
}

void ShardGather::barrier() const { group_.all_reduce(token_)->wait(); }

void ShardGather::finish_reading() {
  if (std::exchange(reading_, false)) barrier();
}

void ShardGather::written() {
  if (!peers_) return;
  MEGATRON_ASSERT(
      !reading_,
      "values were written while peers may be reading them: call values_will_change() first");
  barrier();
}

}  // namespace megatron
