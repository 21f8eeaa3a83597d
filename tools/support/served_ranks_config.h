// The flags for the ranks of a served model.
#pragma once

#include <cstdint>

#include "megatron/base/fields.h"
#include "megatron/base/value_checks.h"

namespace megatron {

struct ServedRanksConfig : Config {
  int64_t tensor_model_parallel_size = 1, pipeline_model_parallel_size = 1;

  void fields(FieldVisitor& v) override {
    v.group("ranks");
    v.field("tensor_model_parallel_size", tensor_model_parallel_size,
            "ranks that share the layers; a launcher such as torchrun starts them");
    v.field("pipeline_model_parallel_size", pipeline_model_parallel_size,
            "stages that the layers are divided over");
  }
  void validate(Violations& violations) const override {
    at_least(violations, "--tensor-model-parallel-size", tensor_model_parallel_size, 1);
    at_least(violations, "--pipeline-model-parallel-size", pipeline_model_parallel_size, 1);
  }
  int64_t ranks() const { return tensor_model_parallel_size * pipeline_model_parallel_size; }
};

}  // namespace megatron
