// Builds the datasets of a run from flags: which files, which part of them for training, validation
// and test, how blended.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "megatron/datasets/data_config.h"
#include "megatron/datasets/dataset.h"
#include "megatron/datasets/gpt/gpt_dataset.h"
#include "megatron/tokenizers/tokenizer.h"

namespace megatron {

// Number of samples that each split must provide. 0: the split is not built. Nullopt: one epoch.
struct SplitTargets {
  std::optional<int64_t> train, valid, test;
};

// The targets of a training run (valid: one epoch when `full_validation`). `train_samples` =
// iterations x global batch size.
struct TargetInputs {
  int64_t train_samples = 0;
  int64_t train_iters = 0;
  int64_t eval_interval = 0;  // 0: no evaluation
  int64_t eval_iters = 0;
  int64_t start_eval_at_iter = 0;
  int64_t eval_global_batch_size = 0;
  bool full_validation = false;
};
SplitTargets split_targets(const TargetInputs& inputs);

TokenizerFacts facts_of(const Tokenizer& tokenizer, const std::string& type);

// A dataset that the builder needs: the part of one path that belongs to a split.
struct MemberRequest {
  std::string path;
  Split split = Split::kTrain;
  std::pair<double, double> bounds;    // fractions of the path's sequences
  std::optional<int64_t> num_samples;  // nullopt: one epoch
  int threads = 0;                     // for index building; 0: all cores
  // Opens an indexed dataset and compares its tokenizer with the run's; once, however many splits
  // read it.
  std::function<std::shared_ptr<const IndexedDataset>(const std::string& prefix)> open;
};

struct DatasetRequest {
  int64_t sequence_length = 0;
  int64_t seed = 1234;
  SplitTargets targets;
  TokenizerFacts tokenizer;
  const Tokenizer* text_tokenizer = nullptr;  // for data that is text
  // Makes the dataset of a member; called from several threads. Default: GPTDataset.
  std::function<std::shared_ptr<const Dataset>(const MemberRequest& member)> make_member;
  // For --mock-data. Default: MockGPTDataset.
  std::function<std::shared_ptr<const Dataset>(Split split, int64_t num_samples)> make_mock;
};

// What the flags say about samples of consecutive tokens.
GPTDatasetConfig gpt_dataset_config(const DataConfig& config, const DatasetRequest& request);

// Splits that are not built are null.
struct TrainValidTestDatasets {
  std::shared_ptr<const Dataset> train;
  std::vector<std::shared_ptr<const Dataset>> valid;  // several with --multiple-validation-sets
  std::vector<std::string> valid_names;               // parallel to `valid`; {""} for a single one
  std::shared_ptr<const Dataset> test;
};
TrainValidTestDatasets build_train_valid_test_datasets(const DataConfig& config,
                                                       const DatasetRequest& request);

}  // namespace megatron
