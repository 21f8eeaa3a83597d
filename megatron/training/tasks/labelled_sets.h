// Data sets of tasks that tell something of labelled texts: files, their splits, mock data.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "megatron/base/json_writer.h"
#include "megatron/datasets/dataset_builder.h"
#include "megatron/datasets/tuning/labelled_texts.h"
#include "megatron/training/arguments/arguments.h"

namespace megatron {

struct LabelledSource {
  std::function<std::vector<LabelledTokens>(const std::string& path)> read;
  std::function<std::vector<LabelledTokens>(Split split, int64_t num_samples)> mock;
  int64_t group = 1;  // rows that stay together in every split and order
  // Adds members to the description: what the labels mean
  std::function<void(JsonWriter& json)> describe;
};

// From --data-path and --split, from the three paths of splits, or from --mock-data.
TrainValidTestDatasets build_labelled_sets(const Arguments& arguments,
                                           const DatasetRequest& request,
                                           const LabelledSource& source);

// encode_labelled() of the texts of a file, which its errors name.
std::vector<LabelledTokens> encode_file(const std::string& path,
                                        const std::vector<LabelledText>& texts,
                                        const DatasetRequest& request);

}  // namespace megatron
