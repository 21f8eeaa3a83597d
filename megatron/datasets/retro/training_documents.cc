#include "megatron/datasets/retro/training_documents.h"

#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/datasets/blend.h"

namespace megatron {
namespace {

struct TrainingBlend {
  Blend blend;
  std::pair<double, double> bounds = {0.0, 1.0};
};

TrainingBlend training_blend(const DataConfig& config) {
  if (!config.data_path.empty() || !config.data_args_path.empty()) {
    const Blend blend = config.data_path.empty()
                            ? read_blend_file(config.data_args_path, "--data-args-path")
                            : parse_blend(config.data_path, "--data-path");
    const auto bounds = parse_split(config.split.empty() ? "969, 30, 1" : config.split)[0];
    MEGATRON_CHECK(bounds, "--split ", config.split,
                   " has no training documents, of which the database is made");
    return {blend, *bounds};
  }
  if (!config.train_data_path.empty())
    return {parse_blend(config.train_data_path, "--train-data-path")};
  if (!config.per_split_data_args_path.empty())
    if (const auto blend = read_per_split_blend_file(config.per_split_data_args_path,
                                                     "--per-split-data-args-path")[0])
      return {*blend};
  throw UsageError(
      "a retrieval database is made of training documents, and none are given\nhint: --data-path "
      "PREFIX");
}

}  // namespace

std::vector<DocumentRange> training_documents(const DataConfig& config) {
  const TrainingBlend training = training_blend(config);
  std::vector<DocumentRange> all;
  for (const std::string& prefix : training.blend.prefixes) {
    const auto data = std::make_shared<const IndexedDataset>(
        prefix,
        IndexedDatasetOptions{.mmap = config.mmap_bin_files,
                              .check_folders = index_folders(prefix, config.data_cache_path)});
    const auto [first, last] = split_range(training.bounds, data->num_sequences());
    all.push_back({data, first, last});
  }
  return all;
}

nlohmann::json facts_of_documents(const std::vector<DocumentRange>& documents) {
  nlohmann::json facts = nlohmann::json::array();
  for (const DocumentRange& range : documents)
    facts.push_back({{"file", std::filesystem::path(range.data->prefix()).filename().string()},
                     {"index_hash", range.data->index_hash()},
                     {"first_document", range.first},
                     {"last_document", range.last}});
  return facts;
}

nlohmann::json facts_of_run(const DatasetRequest& request, int64_t chunk_length,
                            const std::vector<DocumentRange>& documents) {
  return {{"chunk_length", chunk_length},
          {"seed", request.seed},
          {"tokenizer", request.tokenizer.identity.fingerprint},
          {"data_sets", facts_of_documents(documents)}};
}

}  // namespace megatron
