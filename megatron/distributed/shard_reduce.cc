#include "megatron/distributed/shard_reduce.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "megatron/kernels/sum_parts.h"
#include "megatron/tensor/sum_parts.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

constexpr int64_t kAlignment = 128;    // elements
constexpr int64_t kSignalBytes = 256;  // a word from each rank
static_assert(kSignalBytes >= kMaxSumParts * static_cast<int64_t>(sizeof(uint32_t)));

// Elements of a shard in one piece.
int64_t piece_elements(int64_t peers, int64_t largest_part, int64_t staged) {
  return std::min(largest_part, std::max(staged / peers / kAlignment, int64_t{1}) * kAlignment);
}

// A reduce-scatter of `whole`; wait() adds this rank's shard of the sum to the target.
class ScatteredSum final : public Work {
 public:
  ScatteredSum(const ProcessGroup& group, const at::Tensor& whole, const at::Tensor& target,
               bool accumulate)
      : sum_(whole.narrow(0, group.rank() * target.numel(), target.numel())),
        target_(target),
        accumulate_(accumulate),
        work_(group.reduce_scatter(sum_, whole)) {}
  void wait() override {
    if (!work_) return;
    work_->wait();
    if (accumulate_ || sum_.const_data_ptr() != target_.const_data_ptr())
      sum_parts({sum_}, target_, accumulate_);
    work_.reset();
    sum_.reset();
  }

 private:
  at::Tensor sum_, target_;  // sum_ keeps the memory of `whole` alive
  bool accumulate_;
  std::shared_ptr<Work> work_;
};

}  // namespace

int64_t staging_elements(int64_t group_size, int64_t largest_part, int64_t staged) {
  if (group_size == 1 || group_size > kMaxSumParts) return 0;
  return 2 * (group_size - 1) * piece_elements(group_size - 1, largest_part, staged);
}

ShardReduce::ShardReduce(const ProcessGroup& group, int64_t largest_part,
                         const at::TensorOptions& options, bool peer_copies, int64_t staged)
    : group_(group) {
  if (!peer_copies || staging_elements(group.size(), largest_part, staged) == 0) return;
  const int64_t peers = group.size() - 1;
  piece_ = piece_elements(peers, largest_part, staged);
  const int64_t signals = kSignalBytes / static_cast<int64_t>(options.dtype().itemsize());
  memory_ = at::empty({signals + 2 * peers * piece_}, options);
  memory_.narrow(0, 0, signals).zero_();
  staging_ = memory_.narrow(0, signals, 2 * peers * piece_).view({2, peers, piece_});
  peers_ = share_memory(memory_, group).peers;
  if (!peers_) memory_ = staging_ = at::Tensor();
}

std::shared_ptr<Work> ShardReduce::start(const at::Tensor& whole, const at::Tensor& target,
                                         bool accumulate) {
  if (!peers_) return std::make_shared<ScatteredSum>(group_, whole, target, accumulate);
  const int64_t count = target.numel();
  return peers_->run([&] {
    for (int64_t begin = 0; begin < count; begin += piece_) {
      const int64_t of_piece = std::min(piece_, count - begin);
      write_piece(whole, begin, of_piece);
      barrier();
      add_piece(whole, target, accumulate, begin, of_piece);
    }
  });
}

void ShardReduce::write_piece(const at::Tensor& whole, int64_t begin, int64_t count) {
  const int size = group_.size(), own = group_.rank();
  half_ = 1 - half_;
  std::vector<PeerCopy> copies;
  for (int step = 1; step < size; ++step) {  // no two ranks write to the same peer at a time
    const int to = (own + step) % size;
    const int place = own < to ? own : own - 1;  // index among the peers of `to`
    copies.push_back({to,
                      staging_.storage_offset() - memory_.storage_offset() +
                          (half_ * (size - 1) + place) * piece_,
                      whole.narrow(0, to * (whole.numel() / size) + begin, count)});
  }
  peers_->write(std::move(copies));
}

void ShardReduce::barrier() {
  const int size = group_.size(), own = group_.rank();
  ++barriers_;
  for (int step = 1; step < size; ++step) peers_->signal((own + step) % size, own, barriers_);
  for (int step = 1; step < size; ++step) {
    const int from = (own + size - step) % size;
    peers_->await(from, from, barriers_);
  }
}

void ShardReduce::add_piece(const at::Tensor& whole, const at::Tensor& target, bool accumulate,
                            int64_t begin, int64_t count) {
  const int own = group_.rank();
  std::vector<at::Tensor> parts;
  for (int rank = 0; rank < group_.size(); ++rank) {
    parts.push_back(rank == own ? whole.narrow(0, own * target.numel() + begin, count)
                                : staging_.select(0, half_)
                                      .select(0, rank < own ? rank : rank - 1)
                                      .narrow(0, 0, count));
  }
  sum_parts(parts, target.narrow(0, begin, count), accumulate);
}

}  // namespace megatron
