// Tensors in files of other programs, described by a manifest as a checkpoint of ours, so that they
// load through the same code as checkpoints.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "megatron/dist_checkpointing/checkpoint.h"
#include "megatron/dist_checkpointing/safetensors.h"

namespace megatron {

inline constexpr const char* kHfSafetensors = "model.safetensors";
inline constexpr const char* kHfIndex = "model.safetensors.index.json";

// State of a checkpoint that holds weights only, so that no run can resume from it.
inline constexpr const char* kWeightsOnlyState = R"({"weights_only":true})";
bool is_weights_only(const Checkpoint& checkpoint);

// Throws Error "WHERE: FIRST PROBLEM" with some of the others as details, unless there are none.
void throw_problems(const std::string& where, const std::vector<std::string>& problems);

// A file of a manifest that is these bytes in memory.
StoredFile text_file(std::string name, std::string text);

// The files of a model, safetensors or others that are read through a source, and where each tensor
// lies.
class TensorFiles {
 public:
  struct Place {
    int file = 0;
    const SafetensorsEntry* entry = nullptr;
  };

  // The files of a Hugging Face folder: model.safetensors, or those that
  // model.safetensors.index.json names. Throws Error if files and index disagree.
  static TensorFiles of_hf_folder(const std::filesystem::path& folder);
  // One file, or all *.safetensors of a folder (those of its index, if there is one). Throws Error.
  static TensorFiles of_path(const std::filesystem::path& path);

  // Tensors that file.source holds; their begin and end are offsets in it. Names differ.
  static TensorFiles of_source(const std::filesystem::path& path, StoredFile file,
                               std::vector<SafetensorsEntry> tensors);

  // Removes tensors, and adds those that file.source holds; their begin and end are offsets in it.
  // At most once.
  void replace(const std::set<std::string>& removed, StoredFile file,
               std::vector<SafetensorsEntry> tensors);

  const std::filesystem::path& folder() const { return folder_; }
  const std::map<std::string, Place>& places() const { return places_; }  // by name
  std::string name_of(int file) const;
  std::vector<StoredFile> stored() const;  // as a manifest lists them
  std::vector<std::byte> read(const Place& place) const;
  // The bytes from `offset` in the tensor.
  void read(const Place& place, uint64_t offset, std::span<std::byte> out) const;

 private:
  explicit TensorFiles(std::filesystem::path folder) : folder_(std::move(folder)) {}
  void open(const std::string& name);
  void read_index();

  std::filesystem::path folder_;
  std::vector<SafetensorsFile> files_;
  std::optional<StoredFile> source_;  // after files_
  std::vector<SafetensorsEntry> entries_;
  std::map<std::string, Place> places_;
};

// Rows [theirs, theirs + count) of the foreign tensor (in our orientation) are rows [ours, ours +
// count) of ours.
struct RowRun {
  int64_t theirs = 0, ours = 0, count = 0;
};

// A matrix inside a stored tensor: element (r, c) is at element offset first + r * row_stride + c *
// column_stride. The smaller stride is the step between the elements of a run. A vector has one
// column.
struct TensorView {
  int64_t first = 0, rows = 0, columns = 1, row_stride = 1, column_stride = 1;
};

// Builds the manifest of such files, and collects all problems.
class ForeignManifest {
 public:
  // `name` is used in errors.
  explicit ForeignManifest(std::string name);

  void add_file(const SafetensorsFile& file);
  void set_files(std::vector<StoredFile> files) { manifest_.files = std::move(files); }
  // A text that is in no file, which the checkpoint has under this name.
  void add_text(std::string name, std::string text);
  void set_iteration(int64_t iteration) { manifest_.iteration = iteration; }

  void add_problem(std::string problem) { problems_.push_back(std::move(problem)); }

  // The tensor of ours that `theirs` is (a part of). Null, with a problem noted, if its other parts
  // have another element type, or if that is one of codes.
  StoredTensor* tensor(const std::string& ours, const std::vector<int64_t>& our_shape,
                       const std::string& theirs, DType dtype);
  bool contains(const std::string& ours) const { return manifest_.tensors.contains(ours); }
  void replace(const std::string& ours, StoredTensor tensor) {
    manifest_.tensors.at(ours) = std::move(tensor);
  }

  // Maps rows of the tensor at `place`, seen as `view`, to rows of a tensor of ours, from
  // `first_column` on; of its part `expert` along the first dimension, if that is not -1.
  void add_rows(const std::string& ours, const std::vector<int64_t>& our_shape,
                const TensorFiles::Place& place, const TensorView& view,
                std::span<const RowRun> runs, int64_t first_column = 0, int64_t expert = -1);

  // These rows of a vector of ours, which no file holds, are zero.
  void add_zeros(const std::string& ours, const std::vector<int64_t>& our_shape, DType dtype,
                 std::span<const RowRun> runs);

  // Throws Error "<name>: <problem>" if there are problems; further ones are its details.
  Checkpoint open(const std::filesystem::path& folder) &&;

 private:
  std::string name_;
  Manifest manifest_;
  std::vector<std::string> problems_;
};

}  // namespace megatron
