// Flags of the run itself: length, batches, evaluation, logging, saving, and what it starts from.
#pragma once

#include "megatron/base/topic_list.h"
#include "megatron/training/arguments/config/evaluation.h"
#include "megatron/training/arguments/config/execution.h"
#include "megatron/training/arguments/config/exit.h"
#include "megatron/training/arguments/config/folders.h"
#include "megatron/training/arguments/config/logging.h"
#include "megatron/training/arguments/config/routing_files.h"
#include "megatron/training/arguments/config/saving.h"
#include "megatron/training/arguments/config/start.h"
#include "megatron/training/arguments/config/steps.h"
#include "megatron/training/arguments/config/upcycling.h"

namespace megatron {

// A new topic is a header, a source and a line here. Topics check their values one by one.
using TrainingTopics =
    TopicList<StepsConfig, ExecutionConfig, ExitConfig, EvaluationConfig, LoggingConfig,
              FoldersConfig, SavingConfig, StartConfig, RoutingFilesConfig, UpcyclingConfig>;

struct TrainingConfig : Config, TrainingTopics {
  void fields(FieldVisitor& visitor) override { visit_topics(visitor); }
  // The values of all topics, then the rules between fields.
  void validate(Violations& v) const override;
};

}  // namespace megatron
