// Data sets of tasks that read their files whole, as rows: files, their splits, mock data.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "megatron/datasets/blend.h"
#include "megatron/datasets/data_config.h"
#include "megatron/datasets/dataset_builder.h"

namespace megatron {

template <class Row>
struct RowSource {
  std::function<std::vector<Row>(const std::string& path)> read;
  std::function<std::vector<Row>(Split split, int64_t num_samples)> mock;
  // Of rows of these files; `num_samples` 0: one epoch in the order given.
  std::function<std::shared_ptr<const Dataset>(
      std::vector<Row> rows, const std::vector<std::string>& files, int64_t num_samples)>
      make;
  int64_t group = 1;  // rows that stay together in every split
};

namespace detail {

template <class Row>
class RowSets {
 public:
  RowSets(const DataConfig& data, const SplitTargets& targets, const RowSource<Row>& source)
      : data_(data), targets_(targets), source_(source) {}

  TrainValidTestDatasets build() const {
    TrainValidTestDatasets sets;
    if (!data_.data_path.empty()) {
      const std::vector<Row> all = read(data_.data_path);
      const SplitMatrix split = parse_split(data_.split.empty() ? "969, 30, 1" : data_.split);
      const auto part = [&](Split which, std::optional<int64_t> target) {
        const auto& bounds = split[static_cast<size_t>(which)];
        std::pair<int64_t, int64_t> range;
        if (bounds) range = split_range(*bounds, std::ssize(all) / source_.group);
        return make(
            {all.begin() + range.first * source_.group, all.begin() + range.second * source_.group},
            data_.data_path, target);
      };
      sets.train = part(Split::kTrain, targets_.train);
      add_valid(part(Split::kValid, targets_.valid), sets);
      sets.test = part(Split::kTest, targets_.test);
      return sets;
    }
    sets.train = make(read(data_.train_data_path), data_.train_data_path, targets_.train);
    add_valid(make(read(data_.valid_data_path), data_.valid_data_path, targets_.valid), sets);
    sets.test = make(read(data_.test_data_path), data_.test_data_path, targets_.test);
    return sets;
  }

 private:
  static void add_valid(std::shared_ptr<const Dataset> set, TrainValidTestDatasets& sets) {
    if (!set) return;
    sets.valid.push_back(std::move(set));
    sets.valid_names.emplace_back();
  }

  std::vector<Row> read(const std::vector<std::string>& files) const {
    std::vector<Row> all;
    for (const std::string& path : files)
      for (Row& row : source_.read(path)) all.push_back(std::move(row));
    return all;
  }

  std::shared_ptr<const Dataset> make(std::vector<Row> rows, const std::vector<std::string>& files,
                                      std::optional<int64_t> target) const {
    if (rows.empty() || target == 0) return nullptr;
    return source_.make(std::move(rows), files, target.value_or(0));
  }

  const DataConfig& data_;
  const SplitTargets& targets_;
  const RowSource<Row>& source_;
};

}  // namespace detail

// From --data-path and --split, from the three paths of splits, or from --mock-data.
template <class Row>
TrainValidTestDatasets build_row_sets(const DataConfig& data, const DatasetRequest& given,
                                      const RowSource<Row>& source) {
  if (!data.mock_data) return detail::RowSets<Row>(data, given.targets, source).build();
  DatasetRequest request = given;
  request.make_mock = [&](Split split, int64_t num_samples) {
    return source.make(source.mock(split, num_samples), {}, num_samples);
  };
  return build_train_valid_test_datasets(data, request);
}

}  // namespace megatron
