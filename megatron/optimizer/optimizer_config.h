// Flags of the optimizer, of its schedules and of mixed precision.
#pragma once

#include "megatron/base/topic_list.h"
#include "megatron/optimizer/config/learning_rate.h"
#include "megatron/optimizer/config/mixed_precision.h"
#include "megatron/optimizer/config/states.h"
#include "megatron/optimizer/config/update.h"

namespace megatron {

// A new topic is a header, a source and a line here.
using OptimizerTopics =
    TopicList<LearningRateConfig, UpdateConfig, MixedPrecisionConfig, StatesConfig>;

struct OptimizerConfig : Config, OptimizerTopics {
  void fields(FieldVisitor& visitor) override { visit_topics(visitor); }
  // The rules of each topic, then those that depend on the update rule, and of offloading.
  void validate(Violations& v) const override;
};

}  // namespace megatron
