#include "megatron/interop/foreign_tensors.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "megatron/base/check.h"
#include "megatron/base/files.h"

namespace megatron {

namespace fs = std::filesystem;

namespace {

StoredFile stored_file(const SafetensorsFile& file) {
  const SafetensorsHeader& header = file.header();
  StoredFile stored;
  stored.name = file.path().filename().string();
  stored.bytes = header.data_begin + header.data_bytes;
  stored.header_bytes = header.data_begin;
  stored.has_checksums = false;
  return stored;
}

class TextSource : public ComputedBytes {
 public:
  explicit TextSource(std::string text) : text_(std::move(text)) {}
  void read_at(uint64_t offset, void* out, size_t bytes) const override {
    MEGATRON_ASSERT(offset <= text_.size() && bytes <= text_.size() - offset);
    std::memcpy(out, text_.data() + offset, bytes);
  }

 private:
  std::string text_;
};

}  // namespace

bool is_weights_only(const Checkpoint& checkpoint) {
  const auto state = nlohmann::json::parse(checkpoint.state(), nullptr, /*allow_exceptions=*/false);
  return state.is_object() && state.contains("weights_only") && state["weights_only"] == true;
}

// -- TensorFiles

TensorFiles TensorFiles::of_hf_folder(const fs::path& folder) {
  TensorFiles files(folder);
  std::error_code ignored;
  if (fs::exists(folder / kHfIndex, ignored)) {
    files.read_index();
    return files;
  }
  MEGATRON_CHECK(fs::exists(folder / kHfSafetensors, ignored), folder.string(), ": holds neither ",
                 kHfSafetensors, " nor ", kHfIndex,
                 fs::exists(folder / "pytorch_model.bin", ignored) ||
                         fs::exists(folder / "pytorch_model.bin.index.json", ignored)
                     ? "\nhint: pytorch_model.bin is a pickle, which is never read; save the "
                       "model as safetensors"
                     : "");
  files.open(kHfSafetensors);
  return files;
}

TensorFiles TensorFiles::of_path(const fs::path& path) {
  std::error_code ignored;
  if (fs::is_regular_file(path, ignored)) {
    TensorFiles files(path.has_parent_path() ? path.parent_path() : fs::path("."));
    files.open(path.filename().string());
    return files;
  }
  MEGATRON_CHECK(fs::is_directory(path, ignored), path.string(),
                 ": there is no such file or folder");
  TensorFiles files(path);
  if (fs::exists(path / kHfIndex, ignored)) {
    files.read_index();
    return files;
  }
  std::set<std::string> names;
  for (const fs::directory_entry& item : fs::directory_iterator(path))
    if (item.is_regular_file() && item.path().extension() == ".safetensors")
      names.insert(item.path().filename().string());
  MEGATRON_CHECK(!names.empty(), path.string(), ": holds no .safetensors file");
  for (const std::string& name : names) files.open(name);
  return files;
}

TensorFiles TensorFiles::of_source(const fs::path& path, StoredFile file,
                                   std::vector<SafetensorsEntry> tensors) {
  TensorFiles files(path);
  files.replace({}, std::move(file), std::move(tensors));
  return files;
}

void TensorFiles::replace(const std::set<std::string>& removed, StoredFile file,
                          std::vector<SafetensorsEntry> tensors) {
  MEGATRON_ASSERT(!source_, "a second source of tensors");
  source_ = std::move(file);
  entries_ = std::move(tensors);
  for (const std::string& name : removed) places_.erase(name);
  // Moving the vector does not move its elements.
  for (const SafetensorsEntry& entry : entries_)
    places_[entry.name] = {static_cast<int>(files_.size()), &entry};
}

std::vector<StoredFile> TensorFiles::stored() const {
  std::vector<StoredFile> all;
  for (const SafetensorsFile& file : files_) all.push_back(stored_file(file));
  if (source_) all.push_back(*source_);
  return all;
}

std::vector<std::byte> TensorFiles::read(const Place& place) const {
  std::vector<std::byte> bytes(place.entry->end - place.entry->begin);
  read(place, 0, bytes);
  return bytes;
}

void TensorFiles::read(const Place& place, uint64_t offset, std::span<std::byte> out) const {
  const auto file = static_cast<size_t>(place.file);
  if (file == files_.size())
    source_->source->read_at(place.entry->begin + offset, out.data(), out.size());
  else
    files_[file].read(*place.entry, offset, out.size(), out.data());
}

std::string TensorFiles::name_of(int file) const {
  const auto index = static_cast<size_t>(file);
  return index == files_.size() ? source_->name : files_[index].path().filename().string();
}

void TensorFiles::open(const std::string& name) {
  files_.emplace_back(folder_ / name);
  const int file = static_cast<int>(files_.size()) - 1;
  // Headers do not move when files_ grows: they point into the file's own memory.
  for (const SafetensorsEntry& entry : files_.back().header().tensors) {
    const auto [place, added] = places_.try_emplace(entry.name, Place{file, &entry});
    MEGATRON_CHECK(added, folder_.string(), ": tensor ", entry.name, " is in ",
                   name_of(place->second.file), " and in ", name);
  }
}

void TensorFiles::read_index() {
  const std::string name = (folder_ / kHfIndex).string();
  const auto json =
      nlohmann::json::parse(read_file(folder_ / kHfIndex), nullptr, /*allow_exceptions=*/false);
  MEGATRON_CHECK(json.is_object() && json.contains("weight_map") && json["weight_map"].is_object(),
                 name, ": has no object weight_map");
  std::set<std::string> names;
  for (const auto& [tensor, file] : json["weight_map"].items()) {
    MEGATRON_CHECK(file.is_string(), name, ": the file of ", tensor, " is no string");
    const std::string text = file.get<std::string>();
    MEGATRON_CHECK(!text.empty() && fs::path(text).filename() == fs::path(text), name, ": \"", text,
                   "\" is no name of a file in the folder");
    names.insert(text);
  }
  for (const std::string& file : names) {
    MEGATRON_CHECK(fs::exists(folder_ / file), name, ": names ", file,
                   ", which the folder does not hold");
    open(file);
  }
  for (const auto& [tensor, file] : json["weight_map"].items()) {
    const auto found = places_.find(tensor);
    MEGATRON_CHECK(found != places_.end() && name_of(found->second.file) == file.get<std::string>(),
                   name, ": says that ", tensor, " is in ", file.get<std::string>(),
                   ", which does not hold it");
  }
  for (const auto& [tensor, place] : places_)
    MEGATRON_CHECK(json["weight_map"].contains(tensor), name, ": does not list ", tensor,
                   ", which is in ", name_of(place.file));
}

// -- ForeignManifest

ForeignManifest::ForeignManifest(std::string name) : name_(std::move(name)) {
  manifest_.state = kWeightsOnlyState;
}

void ForeignManifest::add_file(const SafetensorsFile& file) {
  manifest_.files.push_back(stored_file(file));
}

StoredFile text_file(std::string name, std::string text) {
  StoredFile stored;
  stored.name = std::move(name);
  stored.bytes = text.size();
  stored.has_checksums = false;
  stored.source = std::make_shared<TextSource>(std::move(text));
  return stored;
}

void ForeignManifest::add_text(std::string name, std::string text) {
  manifest_.files.push_back(text_file(std::move(name), std::move(text)));
}

StoredTensor* ForeignManifest::tensor(const std::string& ours,
                                      const std::vector<int64_t>& our_shape,
                                      const std::string& theirs, DType dtype) {
  if (dtype == DType::kFloat8E4M3) {
    add_problem(cat(theirs, " is stored as ", to_string(dtype), ", codes without their scales"));
    return nullptr;
  }
  StoredTensor& stored =
      manifest_.tensors.try_emplace(ours, StoredTensor{dtype, our_shape, {}}).first->second;
  if (stored.dtype == dtype) return &stored;
  add_problem(cat(theirs, " is stored as ", to_string(dtype), ", other parts of ", ours, " as ",
                  to_string(stored.dtype)));
  return nullptr;
}

void ForeignManifest::add_rows(const std::string& ours, const std::vector<int64_t>& our_shape,
                               const TensorFiles::Place& place, const TensorView& view,
                               std::span<const RowRun> runs, int64_t first_column, int64_t expert) {
  const SafetensorsEntry& entry = *place.entry;
  StoredTensor* const stored = tensor(ours, our_shape, entry.name, entry.dtype);
  if (stored == nullptr) return;
  const int64_t element = size_of(entry.dtype);
  for (const RowRun& run : runs) {
    Fragment fragment;
    fragment.file = place.file;
    fragment.offset =
        entry.begin + static_cast<uint64_t>((view.first + run.theirs * view.row_stride) * element);
    if (expert >= 0) fragment.box = {{expert}, {1}};
    fragment.box.offset.push_back(run.ours);
    fragment.box.shape.push_back(run.count);
    const size_t rows = fragment.box.shape.size();
    for (size_t d = rows; d < our_shape.size(); ++d) {
      const bool columns = rows + 1 == our_shape.size();  // else all of several dimensions
      fragment.box.offset.push_back(columns ? first_column : 0);
      fragment.box.shape.push_back(columns ? view.columns : our_shape[d]);
    }
    fragment.flat_end = run.count * view.columns;
    if (fragment.box.shape.size() == rows && view.row_stride != 1) {
      fragment.row_stride = view.row_stride * run.count;  // elements of an expert's bias
      fragment.step = view.row_stride;
    } else if (view.column_stride != 1) {
      fragment.column_stride = view.column_stride;
      fragment.step = view.row_stride;
    } else if (view.row_stride != view.columns && run.count > 1) {
      fragment.row_stride = view.row_stride;
    }
    stored->fragments.push_back(std::move(fragment));
  }
}

void ForeignManifest::add_zeros(const std::string& ours, const std::vector<int64_t>& our_shape,
                                DType dtype, std::span<const RowRun> runs) {
  if (runs.empty()) return;
  StoredTensor* const stored = tensor(ours, our_shape, ours, dtype);
  if (stored == nullptr) return;
  const auto bytes = static_cast<size_t>(our_shape.at(0) * size_of(dtype));
  add_text("zeros of " + ours, std::string(bytes, '\0'));
  for (const RowRun& run : runs) {
    Fragment fragment;
    fragment.file = static_cast<int>(manifest_.files.size()) - 1;
    fragment.box = {{run.ours}, {run.count}};
    fragment.flat_end = run.count;
    stored->fragments.push_back(std::move(fragment));
  }
}

void throw_problems(const std::string& where, const std::vector<std::string>& problems) {
  constexpr size_t kShown = 10;
  if (problems.empty()) return;
  std::string text = cat(where, ": ", problems[0]);
  for (size_t i = 1; i < std::min(problems.size(), kShown); ++i) text += "\ndetail: " + problems[i];
  if (problems.size() > kShown)
    text += cat("\ndetail: and ", problems.size() - kShown, " more tensors");
  throw Error(text);
}

Checkpoint ForeignManifest::open(const fs::path& folder) && {
  throw_problems(name_, problems_);
  return Checkpoint(folder, std::move(manifest_));
}

}  // namespace megatron
