// Samples of several folders of Megatron-Energon that have the same keys.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "megatron/datasets/multimodal/energon/energon_blend.h"

namespace megatron {

// A sample of a folder; no shard: the folder lacks it.
struct EnergonPlace {
  int64_t shard = -1, sample = 0;
};

struct EnergonJoin {
  size_t folders = 0;
  std::vector<EnergonPlace> places;  // of each row one in every folder
  std::vector<size_t> ends;          // of the rows of each shard of the first folder
};

using EnergonFolders = std::vector<std::shared_ptr<const EnergonFolder>>;

// Throws Error naming the file if the joiner has no field of a folder's type, or lacks one.
void check_join(const EnergonEntry& entry, const EnergonFolders& folders);

// Reads the keys of all shards. The rows are in the order of the first folder, those outside of the
// entry's subset left out. Throws Error naming shards and key: a key twice in a folder, one that a
// folder lacks.
EnergonJoin join_keys(const EnergonEntry& entry, const EnergonFolders& folders);

}  // namespace megatron
