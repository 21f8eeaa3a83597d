// Where the neighbours of the chunks of a text come from: looked up in a project of retrieval, or
// given in a file.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "megatron/base/fields.h"
#include "megatron/inference/retrieval/retro_generator.h"
#include "megatron/interop/load_model.h"
#include "megatron/runtime/device_choice.h"

namespace megatron {

struct ProjectLookupConfig : Config {
  std::string retro_project_dir, retro_embedder;
  std::vector<std::string> data_path;
  int64_t retro_query_nprobe = 65536;
  int64_t retro_query_ef_search = 256;
  void fields(FieldVisitor& visitor) override;
  void validate(Violations& violations) const override;
};

struct NeighborLookupConfig : ProjectLookupConfig {
  std::string neighbors;
  bool given() const { return !neighbors.empty() || !retro_project_dir.empty(); }
  void fields(FieldVisitor& visitor) override;
  void validate(Violations& violations) const override;
};

// Finds in the project; without one nothing.
FindNeighbors open_project(const ProjectLookupConfig& config, const LoadedModel& model,
                           DeviceChoice device);

// Throws Error if the model reads no neighbours, if the project is of another tokenizer, chunk
// length, embedder or data, or for a line of the file that is none, by its number. Of the file line
// i is of text i.
FindNeighbors open_neighbors(const NeighborLookupConfig& config, const LoadedModel& model,
                             DeviceChoice device);

}  // namespace megatron
