// What the flags of a run that trains a model with retrieval mean together. Columns of the table of
// tasks.
#pragma once

#include <string>

#include "megatron/training/arguments/arguments.h"
#include "megatron/transformer/config/proof/proof_size.h"

namespace megatron {

struct RetroDataConfig : Config {
  std::string retro_project_dir;
  void fields(FieldVisitor& visitor) override;
  void validate(Violations&) const override {}
};

// Of all runs: what only those with retrieval may ask for.
void validate_neighbor_modules(const Arguments& arguments, Violations& violations);

void validate_retro(const Arguments& arguments, Violations& violations);

// The tiny model keeps several chunks of a sample, one or several neighbours, one or several layers
// that read them, and whether layers come before the first of these.
void shrink_retro(Arguments& arguments, const Arguments& before, Shrinker& shrinker);

}  // namespace megatron
