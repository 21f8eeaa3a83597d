// Pretraining of a GPT that reads neighbours of its chunks.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/datasets/gpt/mock_dataset.h"
#include "megatron/datasets/retro/mock_retro_dataset.h"
#include "megatron/datasets/retro/retro_dataset.h"
#include "megatron/datasets/retro/training_documents.h"
#include "megatron/models/retro/retro_config.h"
#include "megatron/reporting/flops.h"
#include "megatron/training/arguments/retro_rules.h"
#include "megatron/training/tasks/tasks.h"

namespace megatron {
namespace {

std::shared_ptr<const ChunkDatabase> open_database(const RetroProject& project, const Arguments& a,
                                                   const DatasetRequest& request) {
  std::vector<std::shared_ptr<const IndexedDataset>> data;
  for (const DocumentRange& range : training_documents(a.data)) data.push_back(range.data);
  return std::make_shared<const ChunkDatabase>(project.chunks_file(), std::move(data),
                                               own_config<RetroConfig>(a.own).retro_chunk_length,
                                               std::max<int64_t>(request.tokenizer.eod, 0));
}

TrainValidTestDatasets mock_datasets(const Arguments& a, DatasetRequest request) {
  const auto& own = own_config<RetroConfig>(a.own);
  const GPTDatasetConfig gpt = gpt_dataset_config(a.data, request);
  request.make_mock = [&own, gpt](Split split, int64_t count) {
    return std::make_shared<const MockRetroDataset>(
        std::make_shared<const MockGPTDataset>(split, count, gpt), own.retro_chunk_length,
        own.retro_num_neighbors, gpt);
  };
  return build_train_valid_test_datasets(a.data, request);
}

// The facts of the project that are known without its embedder.
void check_project(RetroProject& project, const Arguments& a, const DatasetRequest& request) {
  project.agree(facts_of_run(request, own_config<RetroConfig>(a.own).retro_chunk_length,
                             training_documents(a.data)));
}

TrainValidTestDatasets datasets(const Arguments& a, const DatasetRequest& request) {
  if (a.data.mock_data) return mock_datasets(a, request);
  const auto& own = own_config<RetroConfig>(a.own);
  RetroProject project(own_config<RetroDataConfig>(a.own).retro_project_dir);
  project.require("db-build");
  check_project(project, a, request);
  const auto database = open_database(project, a, request);
  TrainValidTestDatasets sets = build_train_valid_test_datasets(a.data, request);
  const auto wrap = [&](std::shared_ptr<const Dataset>& set, const std::string& split) {
    if (set == nullptr) return;
    Neighbors neighbors(project, split, *set, own.retro_chunk_length);
    set = std::make_shared<const RetroDataset>(set, database, std::move(neighbors),
                                               own.retro_num_neighbors);
  };
  wrap(sets.train, "train");
  for (size_t i = 0; i < sets.valid.size(); ++i)
    wrap(sets.valid[i], sets.valid.size() == 1 ? "valid" : cat("valid", i));
  wrap(sets.test, "test");
  return sets;
}

PretrainTask retro_task(const Arguments& arguments) {
  PretrainTask task = gpt_task(arguments);
  task.name = "retro";
  task.model_provider = provide_model("retro");
  task.datasets_provider = datasets;
  task.flops_per_token = [provide = task.model_provider](const Arguments& a,
                                                         const Vocabulary& vocabulary) {
    return model_flops_per_token(provide, a, vocabulary) +
           training_flops(retrieval_products(whole_model(provide, a, vocabulary)->config()));
  };
  return task;
}

}  // namespace

const TaskType& retro_task_type() {
  static const TaskType type = {.name = "retro",
                                .make = retro_task,
                                .config = OwnConfig(RetroDataConfig()),
                                .validate = validate_retro,
                                .shrink = shrink_retro};
  return type;
}

}  // namespace megatron
