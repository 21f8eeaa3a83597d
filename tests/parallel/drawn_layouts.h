// Random configurations of random models for layouts of several ranks.
#pragma once

#include <cstdint>
#include <string>

namespace megatron {

constexpr int kMaxRanks = 8;
// Seeds from which on experts, encoder-decoders and so on are drawn.
constexpr int64_t kFirstOfExperts = 1'000'001, kFirstOfStacks = 2'000'001,
                  kFirstOfBlocks = 3'000'001, kFirstOfEncoders = 4'000'001,
                  kFirstOfHybrids = 5'000'001, kFirstOfRetro = 6'000'001, kFirstOfMimo = 7'000'001;

struct DrawnLayout {
  int world_size;
  std::string flags;
  std::string precision;  // flags of the proof besides
};

// The first attempt that the rules accept, determined by the seed. Throws Error if none is.
DrawnLayout legal_configuration(uint64_t seed, int64_t max_ranks);

}  // namespace megatron
