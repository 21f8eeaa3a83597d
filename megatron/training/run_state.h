// The numbers of a run that affect what comes next, besides tensors: stored in a checkpoint's
// manifest.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "megatron/optimizer/optimizer_param_scheduler.h"

namespace megatron {

struct RunState {
  int64_t iteration = 0;
  int64_t consumed_train_samples = 0;
  std::vector<int64_t> consumed_valid_samples;  // per validation set
  // Training samples that the order of the data was built for
  int64_t data_target = 0;
  std::string data_fingerprint;  // of the training dataset; empty: none
  std::string data_description;  // JSON object
  std::string tokenizer_fingerprint;
  std::string task;
  // Absent when the checkpoint was saved without its optimizer.
  std::optional<StepState> step;
  std::optional<ParameterSchedule> schedule;
};

std::string run_state_to_json(const RunState& state);
// `name` is used in errors. Throws Error for text that is no such object, naming a missing key.
RunState run_state_from_json(const std::string& text, const std::string& name);

// The names of what differs between two descriptions of a dataset, with both values: "split is
// \"9,1\", was \"8,2\"; ...".
std::string describe_difference(const std::string& now, const std::string& stored);

}  // namespace megatron
