#include "megatron/training/tasks/labelled_sets.h"

#include <optional>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/datasets/blend.h"

namespace megatron {
namespace {

class LabelledSets {
 public:
  LabelledSets(const DataConfig& data, const DatasetRequest& request, const LabelledSource& source)
      : data_(data), request_(request), source_(source) {}

  TrainValidTestDatasets build() const {
    TrainValidTestDatasets sets;
    const SplitTargets& targets = request_.targets;
    if (!data_.data_path.empty()) {
      const std::vector<LabelledTokens> all = read(data_.data_path);
      const SplitMatrix split = parse_split(data_.split.empty() ? "969, 30, 1" : data_.split);
      const auto part = [&](Split which, std::optional<int64_t> target) {
        const auto& bounds = split[static_cast<size_t>(which)];
        std::pair<int64_t, int64_t> range;
        if (bounds) range = split_range(*bounds, std::ssize(all) / source_.group);
        return make(
            {all.begin() + range.first * source_.group, all.begin() + range.second * source_.group},
            data_.data_path, target);
      };
      sets.train = part(Split::kTrain, targets.train);
      add_valid(part(Split::kValid, targets.valid), sets);
      sets.test = part(Split::kTest, targets.test);
      return sets;
    }
    sets.train = make(read(data_.train_data_path), data_.train_data_path, targets.train);
    add_valid(make(read(data_.valid_data_path), data_.valid_data_path, targets.valid), sets);
    sets.test = make(read(data_.test_data_path), data_.test_data_path, targets.test);
    return sets;
  }

  std::shared_ptr<const Dataset> mock(Split split, int64_t num_samples) const {
    return make(source_.mock(split, num_samples), {}, num_samples);
  }

 private:
  static void add_valid(std::shared_ptr<const Dataset> set, TrainValidTestDatasets& sets) {
    if (!set) return;
    sets.valid.push_back(std::move(set));
    sets.valid_names.emplace_back();
  }

  std::vector<LabelledTokens> read(const std::vector<std::string>& files) const {
    std::vector<LabelledTokens> all;
    for (const std::string& path : files)
      for (LabelledTokens& row : source_.read(path)) all.push_back(std::move(row));
    return all;
  }

  std::shared_ptr<const Dataset> make(std::vector<LabelledTokens> rows,
                                      const std::vector<std::string>& files,
                                      std::optional<int64_t> target) const {
    if (rows.empty() || target == 0) return nullptr;
    LabelledDatasetConfig config = labelled_dataset_config(request_);
    config.group = source_.group;
    JsonWriter description;
    description.begin_object().member("files", files);
    source_.describe(description);
    description.member("tokenizer", request_.tokenizer.identity.fingerprint).end_object();
    config.description = description.text();
    return std::make_shared<LabelledTextDataset>(std::move(rows), target.value_or(0),
                                                 std::move(config));
  }

  const DataConfig& data_;
  const DatasetRequest& request_;
  const LabelledSource& source_;
};

}  // namespace

TrainValidTestDatasets build_labelled_sets(const Arguments& arguments, const DatasetRequest& given,
                                           const LabelledSource& source) {
  const LabelledSets sets(arguments.data, given, source);
  if (!arguments.data.mock_data) return sets.build();
  DatasetRequest request = given;
  request.make_mock = [&](Split split, int64_t num_samples) {
    return sets.mock(split, num_samples);
  };
  return build_train_valid_test_datasets(arguments.data, request);
}

std::vector<LabelledTokens> encode_file(const std::string& path,
                                        const std::vector<LabelledText>& texts,
                                        const DatasetRequest& request) {
  try {
    return encode_labelled(*request.text_tokenizer, texts, request.sequence_length);
  } catch (const Error& error) {
    throw Error(cat(path, ": ", error.what()));
  }
}

}  // namespace megatron
