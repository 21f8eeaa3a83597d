// Supervised fine-tuning: the model of task "gpt" on conversations.
#include <filesystem>
#include <map>
#include <mutex>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/base/log.h"
#include "megatron/datasets/tuning/sft_dataset.h"
#include "megatron/training/tasks/tasks.h"

namespace megatron {

namespace {

void report(const std::string& path, Split split, const SftCounts& counts,
            int64_t sequence_length) {
  const auto count = [](int64_t n) { return format_count(static_cast<uint64_t>(n)); };
  const auto percent = [](int64_t part, int64_t whole) {
    return (200 * part + whole) / (2 * whole);
  };
  std::string text = cat(to_string(split), " split of ", path, ": ", count(counts.conversations),
                         " conversations, ", count(counts.tokens), " tokens of which ",
                         percent(counts.counted, counts.tokens), "% count, ", count(counts.samples),
                         " samples an epoch, ",
                         percent(counts.tokens, counts.samples * sequence_length), "% full");
  if (counts.cut > 0) text += cat("; ", count(counts.cut), " cut at --seq-length");
  if (counts.dropped > 0)
    text += cat("; ", count(counts.dropped), " longer than --seq-length dropped");
  if (counts.silent > 0)
    text += cat("; ", count(counts.silent), " without a token that counts dropped");
  log_info(text);
}

// Reads files once, even if several splits use them.
class Files {
 public:
  Files(const Arguments& arguments, const Tokenizer& tokenizer)
      : cache_path_(arguments.data.data_cache_path),
        encoder_(tokenizer, tokenizer_folder(arguments.tokenizer), arguments.sft) {}

  std::shared_ptr<const SftTokens> open(const std::string& path) {
    const std::lock_guard lock(mutex_);
    std::shared_ptr<const SftTokens>& tokens = open_[path];
    if (!tokens) tokens = std::make_shared<const SftTokens>(path, encoder_, cache_path_);
    return tokens;
  }

 private:
  const std::string cache_path_;
  const ConversationEncoder encoder_;
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<const SftTokens>> open_;
};

TrainValidTestDatasets make_datasets(const Arguments& arguments, const DatasetRequest& given) {
  DatasetRequest request = given;
  request.make_mock = [config = gpt_dataset_config(arguments.data, given)](Split split,
                                                                           int64_t num_samples) {
    return make_mock_sft_dataset(split, num_samples, config);
  };
  if (!arguments.data.mock_data) {
    MEGATRON_ASSERT(given.text_tokenizer != nullptr);
    const auto files = std::make_shared<Files>(arguments, *given.text_tokenizer);
    const SftDatasetOptions options{given.sequence_length, given.seed,
                                    arguments.sft.sft_long_conversations};
    request.make_member = [files, options](const MemberRequest& member) {
      auto dataset = std::make_shared<const SftDataset>(files->open(member.path), member.bounds,
                                                        member.split, member.num_samples, options);
      report(member.path, member.split, dataset->counts(), options.sequence_length);
      return dataset;
    };
  }
  return build_train_valid_test_datasets(arguments.data, request);
}

}  // namespace

const TaskType& sft_task_type() {
  static const TaskType type = {"sft", [](const Arguments& arguments) {
                                  PretrainTask task = gpt_task(arguments);
                                  task.name = "sft";
                                  task.datasets_provider = make_datasets;
                                  return task;
                                }};
  return type;
}

}  // namespace megatron
