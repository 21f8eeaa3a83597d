// Flags of speculative decoding.
#pragma once

#include <cstdint>
#include <string>

#include "megatron/base/fields.h"
#include "megatron/models/model.h"
#include "megatron/scheduling/scheduler.h"

namespace megatron {

struct SpeculationConfig : Config {
  int64_t num_speculative_tokens = 0;
  std::string speculative_model;
  int64_t ngram_prompt_lookup_min = 2;
  int64_t ngram_prompt_lookup_max = 8;

  void fields(FieldVisitor& visitor) override;
  void validate(Violations& violations) const override;
  // Throws Error for a model that gets none.
  void check(const ModelConfig& model) const;
  // All but the drafts of a model, whose source is not there yet.
  void apply(SchedulerConfig& scheduler) const;
};

}  // namespace megatron
