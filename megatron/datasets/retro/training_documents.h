// Which documents a run trains on: those that a retrieval database is made of.
#pragma once

#include <vector>

#include "megatron/datasets/data_config.h"
#include "megatron/datasets/retro/chunk_database.h"

namespace megatron {

// Of each file of the training blend, in its order, the part that the training split has. Throws
// UsageError if no indexed data is given.
std::vector<DocumentRange> training_documents(const DataConfig& config);

}  // namespace megatron
