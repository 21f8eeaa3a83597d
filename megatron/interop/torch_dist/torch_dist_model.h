// GPT checkpoints of Megatron-LM (`torch_dist`) read as ours: a manifest of their tensors under our
// names is derived, so that they load through the same code as checkpoints. Also reads and writes
// their arguments.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "megatron/interop/import_weights.h"
#include "megatron/models/model_table.h"

namespace megatron {

// The model's configuration from `args` of a checkpoint; `otherwise` for what is absent there.
// Throws Error naming an argument of a model that is not built.
TransformerConfig read_torch_dist_arguments(const std::filesystem::path& directory,
                                            const TransformerConfig& otherwise = {});

// Accounts for every tensor: each of the model's is used exactly once (layers, and experts of a
// layer, that are stacked in one tensor, the names of local and of Transformer Engine layers), and
// the rest is waived by name. `vocab_size`: tokens; further rows of the embedding are padding and
// waived. None: all rows. `parameters`: if not given, those of a GPT of this configuration.
// Throws Error naming what is missing, left over, or of another shape.
ForeignModel open_torch_dist_model(const std::filesystem::path& directory,
                                   const TransformerConfig& transformer,
                                   std::optional<int64_t> vocab_size = {},
                                   const std::optional<ParameterShapes>& parameters = {});

// Pickled `args` of a model, which Megatron-LM reads with --use-checkpoint-args. Throws Error
// naming a setting that Megatron-LM does not have.
std::string pickled_arguments(const ModelConfig& config, DType dtype);

// Where a tensor of ours is in Megatron-LM's files.
struct TorchDistPlace {
  std::string key;               // without the indices along which tensors are stacked
  std::vector<int64_t> indices;  // in the stack: none, the layer, or the layer and the expert
};
TorchDistPlace torch_dist_place(const std::string& name);

}  // namespace megatron
