// The state of a run besides tensors; stored in a checkpoint's manifest.
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
  // Number of training samples that the data order was built for
  int64_t data_target = 0;
  std::string data_fingerprint;  // fingerprint of the training dataset; empty: none
  std::string data_description;  // JSON object, Dataset::details()
  std::string tokenizer_fingerprint;
  std::string task;
  // None if the checkpoint was saved without its optimizer.
  std::optional<StepState> step;
  std::optional<ParameterSchedule> schedule;
};

std::string run_state_to_json(const RunState& state);
// `name` is used in errors. Throws Error for malformed text, naming a missing key.
RunState run_state_from_json(const std::string& text, const std::string& name);

// The differences between two details of a dataset, by the path of their keys:
// "split is \"9,1\", was \"8,2\"; index.files[1] is ..., was ...".
std::string describe_difference(const std::string& now, const std::string& stored);

}  // namespace megatron
