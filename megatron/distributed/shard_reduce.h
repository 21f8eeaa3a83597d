// How the ranks of a group get their shards of the summed gradient buckets: by copies into the
// peers' memory and one kernel that adds, or by reduce-scatters.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "megatron/comm/peer_memory.h"
#include "megatron/comm/process_group.h"

namespace megatron {

constexpr int64_t kStagedElements = int64_t{64} << 20;  // per piece, from all peers together

// Elements of the staging buffer; 0: groups of this size use collectives.
int64_t staging_elements(int64_t group_size, int64_t largest_part,
                         int64_t staged = kStagedElements);

// Note [Sums by peer copies]
//
// A bucket is summed in pieces, small enough to stage two at a time. For each piece, on a separate
// stream that follows the current one: every rank writes its summands into the staging memory of
// its peers, alternating between the two halves; all ranks synchronise, each by a signal to and
// from every other; each adds the summands in rank order, in one kernel. Buckets follow one another
// on that stream. What is added has been written: a signal follows its sender's writes. What is
// overwritten has been added: that half held the piece before the last one, which a rank adds
// before it sends its signals for the last one; and writes come after the signals of all ranks.
// Signals wait in stream order and, unlike a collective of one number, occupy no SM. If a rank
// fails, its peers' streams block on its signal and later collectives queue behind; the failure
// monitor ends the job at the timeout.
class ShardReduce {
 public:
  // `largest_part`: elements of a shard of the largest bucket; `options`: type and device of what
  // is communicated; memory for copies: staging_elements(). Collective.
  ShardReduce(const ProcessGroup& group, int64_t largest_part, const at::TensorOptions& options,
              bool peer_copies, int64_t staged = kStagedElements);

  // Sums `whole` [s * n], complete on the current stream, over the ranks; target [n] becomes this
  // rank's shard of the sum, or with `accumulate` target + shard, where the sum is first rounded to
  // the type of `whole`. The target may be this rank's part of `whole`. Neither may be touched
  // before the work is waited for, which keeps `whole` alive; wait for works in the order of their
  // start. Collective.
  std::shared_ptr<Work> start(const at::Tensor& whole, const at::Tensor& target, bool accumulate);

  bool copies() const { return peers_ != nullptr; }

 private:
  void barrier();
  // Elements of a shard from `begin` on.
  void write_piece(const at::Tensor& whole, int64_t begin, int64_t count);
  void add_piece(const at::Tensor& whole, const at::Tensor& target, bool accumulate, int64_t begin,
                 int64_t count);

  const ProcessGroup& group_;
  std::shared_ptr<PeerMemory> peers_;
  at::Tensor memory_;   // signals, by sender, then staging_
  at::Tensor staging_;  // [2, s - 1, piece]
  int64_t piece_ = 0;   // elements of a shard in a piece
  int half_ = 0;        // half of staging_ that the last piece used
  uint32_t barriers_ = 0;
};

}  // namespace megatron
