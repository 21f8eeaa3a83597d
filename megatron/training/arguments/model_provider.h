// The model that arguments describe, segment by segment: what ranks train, and what plans count.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "megatron/models/model.h"
#include "megatron/training/arguments/arguments.h"

namespace megatron {

// Vocabulary sizes, determined by the tokenizer.
struct Vocabulary {
  int64_t size = 0;
  int64_t padded_size = 0;
};

// As flags say, without the tokenizer's files: 32000 if they give no size.
Vocabulary likely_vocabulary(const Arguments& arguments);

// Declares the parameters of one segment; `groups` outlives the model. `chunks` are those of this
// rank that exist already.
using ModelProvider = std::function<std::unique_ptr<Model>(
    const Arguments& arguments, const Vocabulary& vocabulary, const ParallelGroups& groups,
    const StageSlice& slice, const std::vector<Model*>& chunks)>;

// All segments as one, over groups of one rank.
std::unique_ptr<Model> whole_model(const ModelProvider& provider, const Arguments& arguments,
                                   const Vocabulary& vocabulary);

// The provider of models of a type, a row of models/model_table.h.
ModelProvider provide_model(std::string type = ModelConfig().type);

// Freezes what --freeze and --freeze-except name.
void freeze_parameters(const TrainingConfig& config, Module& module);
// Sets Parameter::lr_factor as --lr-factors says: by the longest name that matches, and of equally
// long patterns by the last.
void set_lr_factors(const OptimizerConfig& config, Module& module);
// Throws UsageError for a name of --lr-factors that matches none of `names`, or only frozen ones.
void check_lr_factors(const OptimizerConfig& config, const StartConfig& start,
                      const std::vector<std::string>& names);

}  // namespace megatron
