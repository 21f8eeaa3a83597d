// How the ranks of a group get one another's shards of the values: by copies out of the peers'
// memory, which occupy no SM, or by all-gathers.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

#include "megatron/comm/peer_memory.h"
#include "megatron/comm/process_group.h"

namespace megatron {

// Where the shards of one bucket lie in the ranks' buffers: rank r's at begin + r * stride.
struct ShardPlaces {
  int64_t begin = 0;
  int64_t stride = 0;
};

// Note [Peer copies]
//
// A copy out of a peer's memory does not synchronise with the peer, so two orders must be ensured:
//   1. what is read has been written;
//   2. what is overwritten is no longer read.
// The shards in a buffer change at few points (an optimizer step, a loaded checkpoint, an edit),
// each of which is
//   finish_reading()   each rank waits, on its stream, for the copies it has started; barrier
//   ... every rank writes its shards ...
//   written()          barrier
// where the barrier is an all-reduce of one number: it comes after everything on a rank's current
// stream, and no stream passes it before all ranks have reached it. A copy comes after everything
// that was on the current stream when it was started.
//   1 holds because a copy started after written() runs after the barrier, which runs after every
//     rank's writes.
//   2 holds because a rank's writes come after its finish_reading(), and so after every copy that
//     any rank has started before its own.
// No gather may be started between the two calls (asserted). What one rank asserts holds for all,
// because gathers are collective: all ranks start the same ones in the same order. An evaluation
// between two steps gathers after written(), and the next finish_reading() waits for it. A skipped
// step writes nothing; its barriers are not needed but cost nothing.
// DistributedDataParallel::finish_grad_sync() is the finish_reading() of an optimizer step. If a
// rank fails, its peers wait in the barrier as in any other collective until the failure monitor
// ends the job; copies themselves wait for no rank. Collectives need none of this: without peers
// both calls do nothing.
class ShardGather {
 public:
  // `buffer` holds this rank's shards. Collective.
  ShardGather(const ProcessGroup& group, const at::Tensor& buffer, bool peer_copies);

  // whole [s * n]: receives the shards of all ranks, in rank order. This rank's is read from the
  // buffer, at `places`, unless it already is in `whole`. Keeps `whole` alive until the work is
  // waited for.
  std::shared_ptr<Work> gather(const at::Tensor& whole, const ShardPlaces& places);
  // See the note. Every gather must have been waited for. Collective; does nothing if there was no
  // gather since the last call.
  void finish_reading();
  void written();

  bool copies() const { return peers_ != nullptr; }
  // Why peer copies were asked for but are not used
  const std::string& obstacle() const { return obstacle_; }

 private:
  void barrier() const;

  const ProcessGroup& group_;
  at::Tensor buffer_;
  at::Tensor token_;
  std::shared_ptr<PeerMemory> peers_;
  std::string obstacle_;
  bool reading_ = false;  // peers may be reading this rank's shards
};

}  // namespace megatron
