// Helpers of the tests in this folder: a scratch folder, tensors with known contents, error
// messages.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "megatron/dist_checkpointing/checkpoint.h"
#include "megatron/dist_checkpointing/save.h"
#include "megatron/dist_checkpointing/verify.h"
#include "tests/unit/error_of.h"

namespace megatron {

// A new empty folder, removed by the destructor.
class ScratchFolder {
 public:
  ScratchFolder();
  ~ScratchFolder();
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// A small model in which each element is a function of (seed, key, index), so that contents can be
// checked by the seed.
class TinyModel {
 public:
  explicit TinyModel(uint64_t seed, int64_t rows = 40);
  TinyModel(const TinyModel&) = delete;
  TinyModel& operator=(const TinyModel&) = delete;
  std::vector<ShardedTensor> tensors();
  bool equals(const TinyModel& other) const;
  void clear();

 private:
  std::vector<double> moments_;
  std::vector<float> weight_, bias_;
  std::vector<uint16_t> half_;
  std::vector<int64_t> step_;
  int64_t rows_;
};

SaveRequest request_for(TinyModel& model, const std::filesystem::path& root, int64_t iteration);

// Loads the checkpoint and compares with the model of `seed`.
bool holds_seed(const std::filesystem::path& directory, uint64_t seed, int64_t rows = 40);

void flip_bit(const std::filesystem::path& path, uint64_t bit);
std::string slurp(const std::filesystem::path& path);
void spill(const std::filesystem::path& path, const std::string& contents);
std::vector<std::filesystem::path> files_below(const std::filesystem::path& directory);
std::vector<std::string> names_in(const std::filesystem::path& directory);  // sorted

}  // namespace megatron
