// GPT checkpoints of Megatron-LM (`torch_dist`) read as ours: a manifest of their tensors under our
// names is derived, so that they load through the same code as checkpoints.
#pragma once

#include <filesystem>
#include <optional>

#include "megatron/interop/import_weights.h"
#include "megatron/models/model_table.h"

namespace megatron {

// Accounts for every tensor: each of the model's is used exactly once, whatever its files hold in
// one tensor (torch_dist_names.h), and the rest is waived by name. `vocab_size`: tokens; further
// rows of the embedding are padding and waived. None: all rows. `parameters`: if not given, those
// of a GPT of this configuration. Throws Error naming what is missing, left over, or of another
// shape.
ForeignModel open_torch_dist_model(const std::filesystem::path& directory,
                                   const TransformerConfig& transformer,
                                   std::optional<int64_t> vocab_size = {},
                                   const std::optional<ParameterShapes>& parameters = {});

}  // namespace megatron
