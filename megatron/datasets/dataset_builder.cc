#include "megatron/datasets/dataset_builder.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <numeric>

#include "megatron/base/check.h"
#include "megatron/base/log.h"
#include "megatron/base/threads.h"
#include "megatron/datasets/blend.h"
#include "megatron/datasets/blended_dataset.h"
#include "megatron/datasets/gpt/mock_dataset.h"

namespace megatron {
namespace {

using DatasetPtr = std::shared_ptr<const Dataset>;
using Target = std::optional<int64_t>;

bool wanted(const Target& target) { return !target || *target > 0; }

class Builder {
 public:
  Builder(const DataConfig& config, const DatasetRequest& request);
  TrainValidTestDatasets build();
  void note_undescribed() const;

 private:
  Target target(Split split) const;
  std::shared_ptr<const IndexedDataset> open(const std::string& prefix);
  // Sequences of one file that belong to `bounds`, as a dataset.
  DatasetPtr member(const std::string& prefix, Split split, std::pair<double, double> bounds,
                    const Target& samples, int threads);
  std::vector<DatasetPtr> members(const Blend& blend, Split split, std::pair<double, double> bounds,
                                  const std::vector<Target>& samples);
  // `lone_weight_counts`: a single prefix with a weight is still a blend (for --data-path, not for
  // per-split paths).
  DatasetPtr blended(const Blend& blend, Split split, std::pair<double, double> bounds,
                     bool lone_weight_counts);
  void build_mock(TrainValidTestDatasets& out);
  void build_split(TrainValidTestDatasets& out, Split split, const Blend& blend,
                   std::pair<double, double> bounds, bool lone_weight_counts);
  void build_validation_sets(TrainValidTestDatasets& out, const Blend& blend);
  std::array<std::optional<Blend>, kNumSplits> per_split_blends() const;

  const DataConfig& config_;
  const DatasetRequest& request_;
  const GPTDatasetConfig gpt_;  // of the default members
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<const IndexedDataset>> files_;
  std::vector<std::string> undescribed_;  // prefixes of files that do not name their tokenizer
};

Builder::Builder(const DataConfig& config, const DatasetRequest& request)
    : config_(config), request_(request), gpt_(gpt_dataset_config(config, request)) {}

Target Builder::target(Split split) const {
  const SplitTargets& targets = request_.targets;
  return split == Split::kTrain   ? targets.train
         : split == Split::kValid ? targets.valid
                                  : targets.test;
}

std::shared_ptr<const IndexedDataset> Builder::open(const std::string& prefix) {
  const std::lock_guard lock(mutex_);
  auto& file = files_[prefix];
  if (file) return file;
  file = std::make_shared<const IndexedDataset>(
      prefix,
      IndexedDatasetOptions{.mmap = config_.mmap_bin_files,
                            .check_folders = index_folders(prefix, config_.data_cache_path)});
  if (!check_tokenizer(*file, request_.tokenizer.identity)) undescribed_.push_back(prefix);
  return file;
}

DatasetPtr Builder::member(const std::string& prefix, Split split, std::pair<double, double> bounds,
                           const Target& samples, int threads) {
  if (request_.make_member)
    return request_.make_member({prefix, split, bounds, samples, threads,
                                 [this](const std::string& file) { return open(file); }});
  const auto file = open(prefix);
  const auto [first, last] = split_range(bounds, file->num_sequences());
  GPTDatasetConfig config = gpt_;
  config.threads = threads;
  return std::make_shared<const GPTDataset>(file, first, last, split, samples, config);
}

std::vector<DatasetPtr> Builder::members(const Blend& blend, Split split,
                                         std::pair<double, double> bounds,
                                         const std::vector<Target>& samples) {
  std::vector<DatasetPtr> out(blend.prefixes.size());
  const int at_once = static_cast<int>(config_.num_dataset_builder_threads);
  parallel_for(
      out.size(), 1,
      [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
          out[i] = member(blend.prefixes[i], split, bounds, samples[i], at_once > 1 ? 1 : 0);
      },
      at_once);
  return out;
}

DatasetPtr Builder::blended(const Blend& blend, Split split, std::pair<double, double> bounds,
                            bool lone_weight_counts) {
  const Target samples = target(split);
  if (blend.prefixes.size() == 1 && !(blend.weights && lone_weight_counts))
    return member(blend.prefixes[0], split, bounds, samples, 0);
  if (!blend.weights) {
    // Each member for one epoch, interleaved in proportion to its size.
    auto parts = members(blend, split, bounds, std::vector<Target>(blend.prefixes.size()));
    std::vector<double> sizes;
    int64_t total = 0;
    for (const DatasetPtr& part : parts)
      sizes.push_back(static_cast<double>(part->size())), total += part->size();
    return std::make_shared<const BlendedDataset>(
        std::move(parts), std::move(sizes), samples ? Target(std::min(*samples, total)) : samples,
        split, config_.data_cache_path);
  }
  MEGATRON_CHECK(samples, "the weights of the ", to_string(split),
                 " datasets have no effect when each is read once\nhint: leave the weights out "
                 "with --full-validation");
  const std::vector<double> weights = normalize_weights(*blend.weights);
  const auto buffer = member_sizes(weights, *samples, config_.mid_level_dataset_surplus);
  const auto exact = member_sizes(weights, *samples, 0);
  auto parts = members(blend, split, bounds, {buffer.begin(), buffer.end()});
  return std::make_shared<const BlendedDataset>(
      std::move(parts), weights, std::accumulate(exact.begin(), exact.end(), int64_t{0}), split,
      config_.data_cache_path);
}

void Builder::build_split(TrainValidTestDatasets& out, Split split, const Blend& blend,
                          std::pair<double, double> bounds, bool lone_weight_counts) {
  if (!wanted(target(split))) return;
  if (split == Split::kValid && config_.multiple_validation_sets)
    return build_validation_sets(out, blend);
  DatasetPtr dataset = blended(blend, split, bounds, lone_weight_counts);
  if (split == Split::kTrain) out.train = std::move(dataset);
  if (split == Split::kTest) out.test = std::move(dataset);
  if (split == Split::kValid) out.valid = {std::move(dataset)}, out.valid_names = {""};
}

void Builder::build_validation_sets(TrainValidTestDatasets& out, const Blend& blend) {
  MEGATRON_CHECK(
      !blend.weights,
      "--multiple-validation-sets evaluates each dataset separately, so weights have no effect",
      "\nhint: give only prefixes for validation");
  const auto& names = config_.validation_set_names;
  MEGATRON_CHECK(names.empty() || names.size() == blend.prefixes.size(),
                 "--validation-set-names gives ", names.size(), " names for ",
                 blend.prefixes.size(), " validation datasets");
  for (size_t i = 0; i < blend.prefixes.size(); ++i) {
    out.valid.push_back(
        member(blend.prefixes[i], Split::kValid, {0.0, 1.0}, target(Split::kValid), 0));
    out.valid_names.push_back(
        names.empty() ? std::filesystem::path(blend.prefixes[i]).filename().string() : names[i]);
  }
}

void Builder::build_mock(TrainValidTestDatasets& out) {
  // synthetic data is endless, so the size of an epoch is arbitrary
  constexpr int64_t kOneEpoch = 1024;
  const SplitMatrix matrix = parse_split(config_.split.empty() ? "1,1,1" : config_.split);
  for (int i = 0; i < kNumSplits; ++i) {
    const auto split = static_cast<Split>(i);
    const Target samples = target(split);
    if (!matrix[i] || !wanted(samples)) continue;
    const int64_t count = samples.value_or(kOneEpoch);
    const DatasetPtr dataset = request_.make_mock
                                   ? request_.make_mock(split, count)
                                   : std::make_shared<const MockGPTDataset>(split, count, gpt_);
    if (split == Split::kTrain) out.train = dataset;
    if (split == Split::kValid) out.valid = {dataset}, out.valid_names = {""};
    if (split == Split::kTest) out.test = dataset;
  }
}

std::array<std::optional<Blend>, kNumSplits> Builder::per_split_blends() const {
  if (!config_.per_split_data_args_path.empty())
    return read_per_split_blend_file(config_.per_split_data_args_path,
                                     "--per-split-data-args-path");
  std::array<std::optional<Blend>, kNumSplits> blends;
  if (!config_.train_data_path.empty())
    blends[0] = parse_blend(config_.train_data_path, "--train-data-path");
  if (!config_.valid_data_path.empty())
    blends[1] = parse_blend(config_.valid_data_path, "--valid-data-path");
  if (!config_.test_data_path.empty())
    blends[2] = parse_blend(config_.test_data_path, "--test-data-path");
  return blends;
}

void Builder::note_undescribed() const {
  if (undescribed_.empty() || request_.tokenizer.identity.fingerprint.empty()) return;
  const size_t more = undescribed_.size() - 1;
  log_info(cat(undescribed_.front(), more > 0 ? cat(" and ", more, " more data sets") : "",
               more > 0 ? " do" : ": does",
               " not say which tokenizer wrote the tokens (there is no ",
               description_path(undescribed_.front()).filename().string(),
               "), so that it cannot be compared with this run's"));
}

TrainValidTestDatasets Builder::build() {
  TrainValidTestDatasets out;
  if (config_.mock_data) {
    build_mock(out);
    return out;
  }
  if (!config_.data_path.empty() || !config_.data_args_path.empty()) {
    const Blend blend = config_.data_path.empty()
                            ? read_blend_file(config_.data_args_path, "--data-args-path")
                            : parse_blend(config_.data_path, "--data-path");
    MEGATRON_CHECK(!config_.multiple_validation_sets,
                   "--multiple-validation-sets needs separate validation datasets",
                   "\nhint: give them with --valid-data-path or --per-split-data-args-path");
    const SplitMatrix matrix = parse_split(config_.split.empty() ? "969, 30, 1" : config_.split);
    for (int i = 0; i < kNumSplits; ++i)
      if (matrix[i]) build_split(out, static_cast<Split>(i), blend, *matrix[i], true);
    return out;
  }
  const auto blends = per_split_blends();
  bool any = false;
  for (int i = 0; i < kNumSplits; ++i) {
    if (!blends[i]) continue;
    any = true;
    build_split(out, static_cast<Split>(i), *blends[i], {0.0, 1.0}, false);
  }
  if (!any) {
    throw UsageError(
        "no data is given\nhint: use one of --data-path, --data-args-path, --train-data-path, "
        "--per-split-data-args-path, --mock-data");
  }
  return out;
}

}  // namespace

TokenizerFacts facts_of(const Tokenizer& tokenizer, const std::string& type) {
  TokenizerFacts facts;
  facts.vocab_size = tokenizer.vocab_size();
  facts.eod = tokenizer.eod().value_or(-1);
  facts.bos = tokenizer.bos().value_or(-1);
  facts.pad = tokenizer.pad().value_or(-1);
  facts.identity = identity_of(tokenizer, type);
  return facts;
}

GPTDatasetConfig gpt_dataset_config(const DataConfig& config, const DatasetRequest& request) {
  GPTDatasetConfig out;
  out.sequence_length = request.sequence_length;
  out.seed = request.seed;
  out.tokenizer = request.tokenizer;
  out.reset_position_ids = config.reset_position_ids;
  out.reset_attention_mask = config.reset_attention_mask;
  out.inter_document_masking = config.dataloader_inter_document_masking;
  out.eod_mask_loss = config.eod_mask_loss;
  out.allow_ambiguous_pad_tokens = config.allow_ambiguous_pad_tokens;
  out.cache_path = config.data_cache_path;
  return out;
}

SplitTargets split_targets(const TargetInputs& in) {
  SplitTargets targets;
  targets.train = in.train_samples;
  const int64_t eval_samples = in.eval_iters * in.eval_global_batch_size;
  targets.test = eval_samples;
  if (in.full_validation) return targets;
  const int64_t evaluations = in.eval_interval > 0 ? in.train_iters / in.eval_interval + 1 -
                                                         in.start_eval_at_iter / in.eval_interval
                                                   : 0;
  targets.valid = evaluations * eval_samples;
  return targets;
}

TrainValidTestDatasets build_train_valid_test_datasets(const DataConfig& config,
                                                       const DatasetRequest& request) {
  Builder builder(config, request);
  TrainValidTestDatasets out = builder.build();
  builder.note_undescribed();
  return out;
}

}  // namespace megatron
