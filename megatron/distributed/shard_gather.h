// How the ranks of a group get one another's parts of the values: by copies out of the peers'
// memory, which take no multiprocessor, or by all-gathers.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

#include "megatron/comm/peer_memory.h"
#include "megatron/comm/process_group.h"

namespace megatron {

// Where the parts of one bucket lie in the ranks' buffers: that of rank r at begin + r * stride.
struct ShardPlaces {
  int64_t begin = 0;
  int64_t stride = 0;
};

// Note [Peer copies]
//
// A copy out of a peer's memory asks nobody, so two orders have to come from elsewhere:
//   1. what is read has been written;
//   2. what is written is no longer read.
// The parts of a buffer change at few places (an optimizer step, a loaded checkpoint, an edit),
// each of which is
//   finish_reading()   each rank waits, on its stream, for the copies it has started; then all
//                      ranks meet
//   ... every rank writes its parts ...
//   written()          all ranks meet
// where "meet" is an all-reduce of one number, ordered after what a rank's current stream holds,
// and which no stream passes before every rank's has come. A copy is ordered after what the current
// stream held when it was started.
//   1 holds since a copy that is started after written() runs after the meeting, which runs after
//     every rank's writes.
//   2 holds since a rank's writes follow its finish_reading(), which follows every copy that any
//     rank has started before its own.
// Between the two calls nobody gathers (asserted), so that no copy falls between them; and what one
// rank asserts holds for all, because gathers are collective: all ranks start the same ones in the
// same order. An evaluation between two steps gathers after written() and is waited for by the next
// finish_reading(). A step that is skipped writes nothing; its meetings order nothing and cost
// nothing. DistributedDataParallel::finish_grad_sync() is the finish_reading() of an optimizer
// step; a rank that fails comes to no meeting, where its peers wait as in any other collective,
// under the eyes of the failure monitor; a copy itself waits for nobody. Collectives need none of
// this and are ordered by themselves: without peers both calls do nothing.
class ShardGather {
 public:
  // `buffer` holds this rank's parts. Collective.
  ShardGather(const ProcessGroup& group, const at::Tensor& buffer, bool peer_copies);

  // whole [s * n]: the parts of all ranks, in rank order. This rank's lies in the buffer, as
  // `places` says, or is in its place in `whole` already. Keeps `whole` until the work is waited
  // for.
  std::shared_ptr<Work> gather(const at::Tensor& whole, const ShardPlaces& places);
  // See the note. Every gather has been waited for. Collective; nothing when there was no gather
  // since the last call.
  void finish_reading();
  void written();

  bool copies() const { return peers_ != nullptr; }
  // Why it does not copy although it was asked to
  const std::string& obstacle() const { return obstacle_; }

 private:
  void barrier() const;

  const ProcessGroup& group_;
  at::Tensor buffer_;
  at::Tensor token_;
  std::shared_ptr<PeerMemory> peers_;
  std::string obstacle_;
  bool reading_ = false;  // peers may read this rank's parts
};

}  // namespace megatron
