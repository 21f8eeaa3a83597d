// Helpers of the dataset tests: temporary folders, goldens, small datasets.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "megatron/base/check.h"
#include "tests/unit/error_of.h"

namespace megatron::testing_datasets {

// A temporary folder, removed by the destructor.
class TempFolder {
 public:
  TempFolder();
  ~TempFolder();
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }
  // Names of all files in it, sorted.
  std::vector<std::string> files() const;

 private:
  std::string path_;
};

// tests/golden/datasets/goldens.json.
const nlohmann::json& goldens();

// Compares with an entry of the goldens: all values, or length, digest, first and last values.
void expect_entry(const std::vector<int64_t>& values, const nlohmann::json& entry);
std::string digest(const std::vector<int64_t>& values);

// The lengths of a golden case.
std::vector<int32_t> golden_lengths(const nlohmann::json& spec);

// Writes a dataset with one document for each sequence; token t of sequence i is token(i, t).
void write_dataset(const std::string& prefix, const std::vector<int32_t>& lengths,
                   const std::function<int64_t(int64_t, int64_t)>& token);

}  // namespace megatron::testing_datasets
