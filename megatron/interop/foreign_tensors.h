// Tensors in files of other programs, described as a checkpoint of ours, so that whatever loads
// checkpoints loads them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/dist_checkpointing/checkpoint.h"
#include "megatron/dist_checkpointing/safetensors.h"

namespace megatron {

inline constexpr const char* kHfSafetensors = "model.safetensors";
inline constexpr const char* kHfIndex = "model.safetensors.index.json";

// The member of a checkpoint's state that says it holds weights and no run to go on with.
inline constexpr const char* kWeightsOnlyState = R"({"weights_only":true})";
bool is_weights_only(const Checkpoint& checkpoint);

// `*` stands for any run of characters; at most one counts.
bool matches_pattern(std::string_view pattern, std::string_view name);

// The safetensors files of a model and where each tensor lies.
class TensorFiles {
 public:
  struct Place {
    int file = 0;
    const SafetensorsEntry* entry = nullptr;
  };

  // Those of a folder of Hugging Face: model.safetensors, or what model.safetensors.index.json
  // names, which must be what they hold. Throws Error.
  static TensorFiles of_hf_folder(const std::filesystem::path& folder);
  // One file, or all *.safetensors of a folder; by its index where it has one. Throws Error.
  static TensorFiles of_path(const std::filesystem::path& path);

  const std::filesystem::path& folder() const { return folder_; }
  const std::map<std::string, Place>& places() const { return places_; }  // by name
  const std::vector<SafetensorsFile>& files() const { return files_; }
  std::vector<std::byte> read(const Place& place) const;

 private:
  explicit TensorFiles(std::filesystem::path folder) : folder_(std::move(folder)) {}
  void open(const std::string& name);
  void read_index();
  std::string name_of(int file) const;

  std::filesystem::path folder_;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, Place> places_;
};

// `count` rows from `theirs` on, of their tensor as we would store it, are our rows from `ours` on.
struct RowRun {
  int64_t theirs = 0, ours = 0, count = 0;
};

// A matrix inside of a stored tensor: element (r, c) lies first + r * row_stride + c *
// column_stride elements behind its beginning. One of the strides is 1. A vector has one column.
struct TensorView {
  int64_t first = 0, rows = 0, columns = 1, row_stride = 1, column_stride = 1;
};

// Gathers what a manifest says of such files, and everything that is wrong with them.
class ForeignManifest {
 public:
  // `name` is used in errors.
  explicit ForeignManifest(std::string name);

  void add_file(const SafetensorsFile& file);
  void set_files(std::vector<StoredFile> files) { manifest_.files = std::move(files); }
  void set_iteration(int64_t iteration) { manifest_.iteration = iteration; }

  void add_problem(std::string problem) { problems_.push_back(std::move(problem)); }

  // The tensor of ours that `theirs` is (a part of). Null, and a problem, when its other parts have
  // another element type.
  StoredTensor* tensor(const std::string& ours, const std::vector<int64_t>& our_shape,
                       const std::string& theirs, DType dtype);
  bool contains(const std::string& ours) const { return manifest_.tensors.contains(ours); }

  // Rows of `place`, seen as `view`, are rows of a tensor of ours, from `first_column` on.
  void add_rows(const std::string& ours, const std::vector<int64_t>& our_shape,
                const TensorFiles::Place& place, const TensorView& view,
                std::span<const RowRun> runs, int64_t first_column = 0);

  // Throws Error "<name>: <problem>", with further ones as details, when there are any.
  Checkpoint open(const std::filesystem::path& folder) &&;

 private:
  std::string name_;
  Manifest manifest_;
  std::vector<std::string> problems_;
};

}  // namespace megatron
