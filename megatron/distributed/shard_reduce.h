// How the ranks of a group get the sums of their parts of gradient buckets: by copies into the
// peers' memory and one pass that adds, or by reduce-scatters.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "megatron/comm/peer_memory.h"
#include "megatron/comm/process_group.h"

namespace megatron {

constexpr int64_t kStagedElements = int64_t{64} << 20;  // of a piece, from all peers together

// Elements that copies are staged in; 0: groups of this size do not copy.
int64_t staging_elements(int64_t group_size, int64_t largest_part,
                         int64_t staged = kStagedElements);

// Note [Sums by peer copies]
//
// A bucket is summed in pieces, small enough for two of them to be staged. For each piece, on a
// stream of its own behind the current one: every rank writes its peers' parts into their staging
// memory, the halves of which take turns; all ranks meet, each by a signal to and from every other;
// each adds the parts in rank order, in one kernel. Buckets follow one another on that stream. What
// is added has been written: a signal follows its sender's writes. What is overwritten has been
// added: the half held the piece before the last one, which a rank adds before its signals for the
// last one; and writes follow those of all ranks. Signals wait in the order of the stream and take
// no multiprocessor from the backward meanwhile, as a collective of one number would. A rank that
// fails lets its peers' streams wait, and with them the collectives behind, under the eyes of the
// failure monitor.
class ShardReduce {
 public:
  // `largest_part`: elements of one rank's part of the largest bucket; `options`: of what travels;
  // memory for copies: staging_elements(). Collective.
  ShardReduce(const ProcessGroup& group, int64_t largest_part, const at::TensorOptions& options,
              bool peer_copies, int64_t staged = kStagedElements);

  // `whole` [s * n], complete on the current stream, is summed over the ranks; target [n] becomes
  // this rank's part of that, or with `accumulate` target + that, rounded to the type of `whole`
  // before. The target may be this rank's part of `whole`. Neither may be touched before the work
  // is waited for, which keeps `whole`; works are waited for in the order of their start.
  // Collective.
  std::shared_ptr<Work> start(const at::Tensor& whole, const at::Tensor& target, bool accumulate);

  bool copies() const { return peers_ != nullptr; }

 private:
  void barrier();
  // Of a part, elements from `begin` on.
  void write_piece(const at::Tensor& whole, int64_t begin, int64_t count);
  void add_piece(const at::Tensor& whole, const at::Tensor& target, bool accumulate, int64_t begin,
                 int64_t count);

  const ProcessGroup& group_;
  std::shared_ptr<PeerMemory> peers_;
  at::Tensor memory_;   // signals, by sender; staging_
  at::Tensor staging_;  // [2, s - 1, piece]
  int64_t piece_ = 0;   // elements of a part
  int half_ = 0;        // that the last piece went to
  uint32_t barriers_ = 0;
};

}  // namespace megatron
