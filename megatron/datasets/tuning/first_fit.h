// Which samples share a sequence: each goes into the first open sequence with room.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace megatron {

// What a sample takes of a sequence: positions, and a second capacity (patches of images).
using SequenceLoad = std::array<int64_t, 2>;

class PackedSequences {
 public:
  // Appends the sequences of `samples`. At most 64 are open: the oldest one is closed when another
  // one is needed, a full one at once, and the rest at the end. Every sample fits into `room`.
  void pack(std::span<const int64_t> samples,
            const std::function<SequenceLoad(int64_t sample)>& load, SequenceLoad room);
  int64_t size() const;
  std::span<const int64_t> operator[](int64_t sequence) const;  // its samples in order

 private:
  std::vector<int64_t> members_;  // of all sequences, one after the other
  std::vector<int64_t> ends_;     // by sequence: its end in members_
};

}  // namespace megatron
