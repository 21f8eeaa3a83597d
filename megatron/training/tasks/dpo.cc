// Direct preference optimisation: pairs of responses, the loss of dpo_loss.h, a reference model.
#include <algorithm>
#include <optional>

#include "megatron/base/check.h"
#include "megatron/base/json_writer.h"
#include "megatron/base/log.h"
#include "megatron/chat/chat_template.h"
#include "megatron/datasets/blend.h"
#include "megatron/datasets/index_cache.h"
#include "megatron/datasets/sources/conversation.h"
#include "megatron/training/arguments/dpo_config.h"
#include "megatron/training/tasks/dpo_loss.h"
#include "megatron/training/tasks/preference_data.h"
#include "megatron/training/tasks/tasks.h"

namespace megatron {

namespace {

std::vector<PreferencePair> read_files(const std::vector<std::string>& files,
                                       const Tokenizer& tokenizer,
                                       const PreferenceOptions& options) {
  std::vector<PreferencePair> pairs;
  for (const std::string& path : files) {
    PreferenceFile file = read_preferences(path, tokenizer, options);
    if (file.num_long > 0)
      log_warning(cat(path, ": ", file.num_long, " of ",
                      file.pairs.size() + static_cast<size_t>(file.num_long),
                      " pairs are skipped: they have more tokens than --seq-length ",
                      options.sequence_length, " plus one"));
    std::move(file.pairs.begin(), file.pairs.end(), std::back_inserter(pairs));
  }
  return pairs;
}

class PreferenceSets {
 public:
  PreferenceSets(const Arguments& arguments, const DatasetRequest& request)
      : arguments_(arguments),
        data_(arguments.data),
        request_(request),
        tokenizer_(*request.text_tokenizer) {
    options_.sequence_length = request.sequence_length;
    options_.render = [this](const std::string& messages, bool add_generation_prompt) {
      if (!template_)
        template_ = load_chat_template(tokenizer_folder(arguments_.tokenizer),
                                       arguments_.sft.given_template());
      ChatInput input;
      input.messages = messages;
      input.add_generation_prompt = add_generation_prompt;
      return template_->render(input).text;
    };
  }

  TrainValidTestDatasets build() {
    TrainValidTestDatasets sets;
    const SplitTargets& targets = request_.targets;
    if (!data_.data_path.empty()) {
      const std::vector<PreferencePair> all = read_files(data_.data_path, tokenizer_, options_);
      const SplitMatrix split = parse_split(data_.split.empty() ? "969, 30, 1" : data_.split);
      const auto part = [&](Split which,
                            std::optional<int64_t> target) -> std::shared_ptr<const Dataset> {
        const auto& bounds = split[static_cast<size_t>(which)];
        if (!bounds) return nullptr;
        const auto [first, last] = split_range(*bounds, static_cast<int64_t>(all.size()));
        return make({all.begin() + first, all.begin() + last}, data_.data_path, target);
      };
      sets.train = part(Split::kTrain, targets.train);
      add_valid(part(Split::kValid, targets.valid), sets);
      sets.test = part(Split::kTest, targets.test);
      return sets;
    }
    sets.train = read(data_.train_data_path, targets.train);
    add_valid(read(data_.valid_data_path, targets.valid), sets);
    sets.test = read(data_.test_data_path, targets.test);
    return sets;
  }

 private:
  static void add_valid(std::shared_ptr<const Dataset> set, TrainValidTestDatasets& sets) {
    if (!set) return;
    sets.valid.push_back(std::move(set));
    sets.valid_names.emplace_back();
  }
  std::shared_ptr<const Dataset> read(const std::vector<std::string>& files,
                                      std::optional<int64_t> target) const {
    if (files.empty() || target == 0) return nullptr;
    return make(read_files(files, tokenizer_, options_), files, target);
  }
  std::shared_ptr<const Dataset> make(std::vector<PreferencePair> pairs,
                                      const std::vector<std::string>& files,
                                      std::optional<int64_t> target) const {
    if (pairs.empty() || target == 0) return nullptr;
    PreferenceDatasetConfig config;
    config.sequence_length = request_.sequence_length;
    config.seed = request_.seed;
    config.pad = std::max<int64_t>(
        0, request_.tokenizer.pad >= 0 ? request_.tokenizer.pad : request_.tokenizer.eod);
    JsonWriter source;
    source.begin_object()
        .member("files", files)
        .member("tokenizer", request_.tokenizer.identity.fingerprint);
    if (template_) source.member("chat_template", hash_text(template_->source()));
    source.end_object();
    config.description = source.text();
    const int64_t samples = (target.value_or(0) + 1) / 2 * 2;
    return std::make_shared<PreferenceDataset>(
        std::make_shared<const std::vector<PreferencePair>>(std::move(pairs)), samples,
        std::move(config));
  }

  const Arguments& arguments_;
  const DataConfig& data_;
  const DatasetRequest& request_;
  const Tokenizer& tokenizer_;
  PreferenceOptions options_;
  std::optional<ChatTemplate> template_;  // made for the first conversation
};

PretrainTask dpo_task(const Arguments& arguments) {
  const auto& config = own_config<DpoConfig>(arguments.own);
  const DpoOptions options{config.dpo_beta, config.dpo_label_smoothing, config.dpo_sft_weight};
  PretrainTask task = gpt_task(arguments);
  task.name = "dpo";
  task.loss_name = "dpo loss";
  task.loss_per_token = false;
  task.sequence_weights = halves_of_pairs;
  task.metrics.assign(std::begin(kDpoMetrics), std::end(kDpoMetrics));
  task.datasets_provider = [](const Arguments& arguments, const DatasetRequest& request) {
    // Neighbouring samples of synthetic text are pairs without prompts.
    if (arguments.data.mock_data) return build_train_valid_test_datasets(arguments.data, request);
    return PreferenceSets(arguments, request).build();
  };
  task.reference_step = [](Model& model, const Batch& batch, const StageTensors& input,
                           const ForwardContext& context) {
    StageTensors hidden = model.hidden(batch, input, context);
    if (!model.slice().head) return StageOutput{std::move(hidden), {}, {}};
    const at::Tensor losses = model.token_losses(hidden.front(), batch["labels"]);
    return StageOutput{
        {}, {sequence_log_probs(losses, batch["loss_mask"], model.groups().cp), {}}, {}};
  };
  task.forward_step = [options](Model& model, const Batch& batch, const StageTensors& input,
                                const ForwardContext& context) {
    StageTensors hidden = model.hidden(batch, input, context);
    if (!model.slice().head) return StageOutput{std::move(hidden), {}, {}};
    const at::Tensor losses = model.token_losses(hidden.front(), batch["labels"]);
    const DpoLoss dpo =
        dpo_loss(losses, batch["loss_mask"], batch.reference, options, model.groups().cp);
    return StageOutput{{}, dpo.loss, dpo.metrics};
  };
  return task;
}

}  // namespace

const TaskType& dpo_task_type() {
  static const TaskType type = {"dpo", dpo_task, OwnConfig(DpoConfig())};
  return type;
}

}  // namespace megatron
