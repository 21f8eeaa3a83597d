// Which documents a run trains on: those that a retrieval database is made of.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <vector>

#include "megatron/datasets/data_config.h"
#include "megatron/datasets/dataset_builder.h"
#include "megatron/datasets/retro/chunk_database.h"

namespace megatron {

// Of each file of the training blend, in its order, the part that the training split has. Throws
// UsageError if no indexed data is given.
std::vector<DocumentRange> training_documents(const DataConfig& config);

// What a project knows of them: a list of files with the hash of their index and the range.
nlohmann::json facts_of_documents(const std::vector<DocumentRange>& documents);
// What it knows of the run that trains with it.
nlohmann::json facts_of_run(const DatasetRequest& request, int64_t chunk_length,
                            const std::vector<DocumentRange>& documents);

}  // namespace megatron
