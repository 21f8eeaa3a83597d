// Which offloaded bytes are on the device while a chunk of the model runs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "megatron/transformer/layer/layer_cost.h"

namespace megatron {

// Groups that are offloaded together, in the order of the forward: half layers that are recorded,
// and inputs of recomputed units; also those that offload nothing. Bytes.
class OffloadedHalves {
 public:
  // `in_flight`: groups that may be in transfer to the host besides the running one.
  explicit OffloadedHalves(int64_t in_flight) : in_flight_(in_flight) {}

  void add(const OffloadedBytes& half) {
    given_.push_back(half.given.total());
    taken_.push_back(half.taken);
  }
  int64_t count() const { return static_cast<int64_t>(given_.size()); }
  // What the group frees on the device.
  int64_t given(int64_t half) const { return given_[static_cast<size_t>(half)]; }

  // In transfer to the host while group `half` runs, without those of the same layer, which begins
  // with `first`.
  int64_t leaving(int64_t half, int64_t first) const { return given(half - in_flight_, first); }
  // On the device before group `group` begins: the group that has just ended besides those.
  int64_t held_before(int64_t group) const { return given(group - 1 - in_flight_, group); }
  int64_t leaving_at_the_end() const { return given(count() - in_flight_, count()); }
  // While the output layer runs
  int64_t leaving_at_the_head() const { return given(count() - 1 - in_flight_, count() - 1); }
  // Being reloaded while group `half` runs backward: those of the nearest group before it that
  // offloads. The first half of an offloaded layer is counted with its layer.
  int64_t reloading(int64_t half) const {
    for (int64_t before = half - 1; before >= 0; --before)
      if (taken_[static_cast<size_t>(before)] > 0) return taken_[static_cast<size_t>(before)];
    return 0;
  }
  // While what is behind the last group runs backward
  int64_t reloading_at_the_end() const { return reloading(count()); }
  // Whether transfers to the host may still be in flight when group `half` runs backward: each use
  // of a reloaded group waits for one of them and frees its bytes.
  bool may_be_leaving(int64_t half) const {
    return std::count_if(taken_.begin() + half, taken_.end(),
                         [](int64_t bytes) { return bytes > 0; }) <= in_flight_;
  }

 private:
  int64_t given(int64_t first, int64_t last) const {
    int64_t bytes = 0;
    for (int64_t half = std::max<int64_t>(0, first); half < last; ++half) bytes += given(half);
    return bytes;
  }

  const int64_t in_flight_;
  std::vector<int64_t> given_, taken_;
};

}  // namespace megatron
