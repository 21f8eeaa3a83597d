#include "megatron/dist_checkpointing/save.h"

#include <algorithm>
#include <ctime>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/dist_checkpointing/access_error.h"
#include "megatron/dist_checkpointing/checkpoint.h"
#include "megatron/dist_checkpointing/checkpoint_folder.h"
#include "megatron/dist_checkpointing/detail/block_writer.h"
#include "megatron/dist_checkpointing/detail/geometry.h"
#include "megatron/dist_checkpointing/detail/io.h"
#include "megatron/dist_checkpointing/detail/ownership.h"
#include "megatron/dist_checkpointing/detail/stored_blocks.h"
#include "megatron/dist_checkpointing/manifest.h"
#include "megatron/dist_checkpointing/safetensors.h"
#include "megatron/dist_checkpointing/verify.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;

// The source of one tensor of this rank's file: the part of one piece that lies in the tensor's
// flat range.
struct Source {
  const ShardedTensor* tensor;
  const ShardPiece* piece;
  Fragment fragment;
  std::string entry_name;
};

// The tensor's own name if it is whole, so that other readers find it; else the name with the box
// and the flat range.
std::string entry_name(const ShardedTensor& tensor, const Fragment& fragment) {
  if (fragment.box.shape == tensor.global_shape &&
      fragment.flat_end - fragment.flat_begin == fragment.box.num_elements())
    return tensor.key;
  std::string name =
      tensor.key + "@" + shape_string(fragment.box.offset) + "+" + shape_string(fragment.box.shape);
  if (fragment.flat_end - fragment.flat_begin != fragment.box.num_elements())
    name += cat(":", fragment.flat_begin, "-", fragment.flat_end);
  name.erase(std::remove(name.begin(), name.end(), ' '), name.end());
  return name;
}

std::vector<Source> sources_of(const std::vector<ShardedTensor>& tensors) {
  std::vector<Source> sources;
  for (const ShardedTensor& tensor : tensors) {
    for (const ShardPiece& piece : tensor.pieces) {
      Source source{&tensor, &piece, {}, {}};
      source.fragment.box = piece.global;
      source.fragment.flat_begin = count_before(tensor.local_shape, piece.local_offset,
                                                piece.global.shape, tensor.flat_begin);
      source.fragment.flat_end =
          count_before(tensor.local_shape, piece.local_offset, piece.global.shape, tensor.flat_end);
      if (source.fragment.flat_begin == source.fragment.flat_end) continue;
      source.entry_name = entry_name(tensor, source.fragment);
      sources.push_back(std::move(source));
    }
  }
  std::stable_sort(sources.begin(), sources.end(), [](const Source& a, const Source& b) {
    return size_of(a.tensor->dtype) > size_of(b.tensor->dtype);
  });
  return sources;
}

// `memory`: the tensor's data.
void write_source(const Source& source, const void* memory, BlockWriter& out) {
  const ShardedTensor& tensor = *source.tensor;
  const Fragment& fragment = source.fragment;
  const int64_t element_bytes = size_of(tensor.dtype);
  const char* data = static_cast<const char*>(memory);
  Overlap(fragment.box, fragment.flat_begin, fragment.flat_end, tensor.local_shape, *source.piece,
          tensor.flat_begin, tensor.flat_end)
      .for_each_run(fragment.flat_begin, fragment.flat_end,
                    [&](int64_t, int64_t local_flat, int64_t count) {
                      out.write(data + (local_flat - tensor.flat_begin) * element_bytes,
                                static_cast<size_t>(count * element_bytes));
                    });
}

// Reads a file that was just written back from the disk and verifies it.
void read_back(const fs::path& directory, const StoredFile& file,
               const std::function<void()>& progress) {
  VerifyOptions options;
  options.from_disk = true;
  options.progress = progress;
  const std::string damage = damage_of([&] { verify_file(directory, file, options); });
  MEGATRON_CHECK(damage.empty(), damage.substr(0, damage.find('\n')),
                 "\ndetail: it was written a moment ago and is read back otherwise"
                 "\nhint: the disk, its controller or the memory of this machine fails");
}

// Writes this rank's file and reads it back; returns its part of the manifest.
Manifest write_rank(const fs::path& directory, const SaveRequest& request, Agreement& ranks) {
  Manifest part;
  std::vector<ShardedTensor> tensors;
  for (const ShardedTensor& tensor : request.tensors) {
    if (tensor.replica_id != 0) continue;
    tensors.push_back(normalized(tensor, /*needs_memory=*/!request.provide));
    const StoredTensor described{tensor.dtype, tensor.global_shape, {}};
    const StoredTensor& stored = part.tensors.try_emplace(tensor.key, described).first->second;
    MEGATRON_CHECK(stored.dtype == tensor.dtype && stored.shape == tensor.global_shape, tensor.key,
                   " is given twice, with different types or shapes");
  }
  std::vector<Source> sources = sources_of(tensors);
  if (sources.empty()) return part;
  std::vector<SafetensorsEntry> entries;
  for (const Source& source : sources) {
    const Fragment& fragment = source.fragment;
    const bool whole = fragment.flat_end - fragment.flat_begin == fragment.box.num_elements();
    entries.push_back({source.entry_name, source.tensor->dtype,
                       whole ? fragment.box.shape
                             : std::vector<int64_t>{fragment.flat_end - fragment.flat_begin}});
  }
  const std::string header = encode_safetensors_header(
      entries, {{"format", "pt"}, {"megatron_iteration", std::to_string(request.iteration)}});
  const std::string name = format_text("rank_%05d.safetensors", ranks.rank());
  const auto progress = [&ranks] { ranks.progress(); };
  BlockWriter out(directory, name, header, entries.back().end, progress);
  const ShardedTensor* provided = nullptr;  // the tensor that `memory` belongs to
  const void* memory = nullptr;
  for (size_t i = 0; i < sources.size(); ++i) {
    const ShardedTensor* tensor = sources[i].tensor;
    if (tensor->data == nullptr && std::exchange(provided, tensor) != tensor)
      memory = request.provide(*tensor);
    write_source(sources[i], tensor->data != nullptr ? tensor->data : memory, out);
    sources[i].fragment.offset = entries[i].begin;
    part.tensors[sources[i].tensor->key].fragments.push_back(sources[i].fragment);
  }
  part.files.push_back(out.finish());
  read_back(directory, part.files[0], progress);
  return part;
}

void merge(Manifest& all, const Manifest& part, size_t rank) {
  const int base = static_cast<int>(all.files.size());
  all.files.insert(all.files.end(), part.files.begin(), part.files.end());
  for (const auto& [key, tensor] : part.tensors) {
    const auto [place, added] =
        all.tensors.try_emplace(key, StoredTensor{tensor.dtype, tensor.shape, {}});
    StoredTensor& stored = place->second;
    MEGATRON_CHECK(stored.dtype == tensor.dtype && stored.shape == tensor.shape, "rank ", rank,
                   " describes ", key, " as ", to_string(tensor.dtype), " ",
                   shape_string(tensor.shape), ", a lower rank as ", to_string(stored.dtype), " ",
                   shape_string(stored.shape));
    for (Fragment fragment : tensor.fragments) {
      fragment.file += base;
      stored.fragments.push_back(std::move(fragment));
    }
  }
}

// One save on one rank. The phases are separated by agreements: every rank learns of any rank's
// failure.
class Saver {
 public:
  explicit Saver(const SaveRequest& request)
      : request_(request), agreement_(request.agreement ? *request.agreement : alone_) {}

  SaveResult run() {
    result_.directory = request_.root / checkpoint_name(request_.iteration);
    try {
      phases();
    } catch (...) {
      discard();
      throw;
    }
    lock_.reset();
    if (is_zero()) after_publication();
    return std::move(result_);
  }

 private:
  bool is_zero() const { return agreement_.rank() == 0; }

  void phases() {
    const std::string prepared =
        decide_together(agreement_, [&] { return stands_in_the_way() ? "" : prepare(); });
    temporary_ = prepared.empty() ? judge_existing() : prepared;
    std::string part;
    const std::string failure = outcome_of([&] {
      const Manifest written = write_rank(temporary_, request_, agreement_);
      for (const StoredFile& file : written.files) result_.bytes += file.bytes;
      part = encode_manifest(written);
    });
    const std::vector<std::string> parts =
        agreement_.gather(failure.empty() ? "+" + part : "-" + failure);
    decide_together(agreement_, [&] {
      publish(parts);
      return std::string();
    });
  }

  static std::string outcome_of(const std::function<void()>& work) {
    try {
      work();
    } catch (const std::exception& error) {
      return error.what()[0] != '\0' ? error.what() : "unknown failure";
    }
    return {};
  }

  // Whether the final name already exists.
  bool stands_in_the_way() const {
    MEGATRON_CHECK(request_.iteration >= 0, "a checkpoint of iteration ", request_.iteration,
                   " cannot be named");
    std::error_code ignored;
    return fs::exists(fs::symlink_status(result_.directory, ignored));
  }

  // All ranks verify an existing directory of that name, a share each; then creates the temporary
  // directory.
  std::string judge_existing() {
    existing_ = verify_checkpoint(result_.directory, agreement_);
    MEGATRON_CHECK(request_.replace_existing || !existing_->empty(), result_.directory.string(),
                   ": exists already and is usable; a save never overwrites it unless told to"
                   "\nhint: remove it, or save to another folder");
    return decide_together(agreement_, [&] { return prepare(); });
  }

  std::string prepare() {
    make_directories(request_.root);
    const fs::path temporary = temporary_path(result_.directory);
    make_directory(temporary);
    made_temporary_ = true;
    temporary_ = temporary;
    lock_ = std::make_unique<DirectoryLock>(temporary);
    return temporary.string();
  }

  void publish(const std::vector<std::string>& parts) {
    Manifest manifest;
    manifest.iteration = request_.iteration;
    manifest.created = format_time(std::time(nullptr), "%Y-%m-%dT%H:%M:%SZ", /*utc=*/true);
    manifest.state = request_.state;
    for (size_t rank = 0; rank < parts.size(); ++rank) {
      const std::string who = cat("rank ", rank);
      MEGATRON_CHECK(!parts[rank].empty() && parts[rank][0] == '+',
                     parts.size() > 1 ? who + ": " : std::string(),
                     parts[rank].substr(std::min<size_t>(1, parts[rank].size())));
      merge(manifest, parse_manifest(std::string_view(parts[rank]).substr(1), who, false), rank);
      agreement_.progress();
    }
    std::set<fs::path> folders = {temporary_};
    for (const auto& [name, contents] : request_.files)
      write_extra(name, contents, manifest, folders);
    check_manifest(manifest, result_.directory.string());
    for (const StoredFile& file : manifest.files) result_.total_bytes += file.bytes;
    const std::string text = encode_manifest(manifest);
    OutputFile out(temporary_ / kManifestName, text.size());
    out.write(text.data(), text.size());
    out.sync_and_close();
    const InputFile manifest_file(temporary_ / kManifestName);
    manifest_file.forget_cached_pages();
    MEGATRON_CHECK(read_manifest_text(manifest_file) == text, manifest_file.path().string(),
                   ": it was written a moment ago and is read back otherwise");
    for (const fs::path& folder : folders) sync_directory(folder);
    put_in_place();
  }

  void write_extra(const std::string& name, const std::string& contents, Manifest& manifest,
                   std::set<fs::path>& folders) {
    MEGATRON_CHECK(name != kManifestName, "a file stored in a checkpoint may not be called ", name);
    const fs::path relative(name);
    MEGATRON_CHECK(!name.empty() && relative.is_relative() &&
                       relative == relative.lexically_normal() && *relative.begin() != "..",
                   "\"", name, "\" is no name of a file inside a checkpoint");
    fs::path folder = temporary_;
    for (const auto& part : relative.parent_path()) {
      folder /= part;
      if (folders.insert(folder).second) make_directory(folder);
    }
    BlockWriter out(temporary_, name, {}, contents.size());
    out.write(contents.data(), contents.size());
    manifest.files.push_back(out.finish());
    read_back(temporary_, manifest.files.back(), {});
    result_.bytes += contents.size();
  }

  // Problems, as far as its manifest shows, of a directory of that name that has appeared since the
  // start.
  std::vector<std::string> problems_of_newcomer() const {
    std::string damage = damage_of([&] { const Checkpoint newcomer(result_.directory); });
    return damage.empty() ? std::vector<std::string>{} : std::vector{std::move(damage)};
  }

  // Renames the finished directory. One that existed at the start was checked by judge_existing().
  void put_in_place() {
    if (stands_in_the_way()) {
      const std::vector<std::string> problems = existing_ ? *existing_ : problems_of_newcomer();
      MEGATRON_CHECK(
          existing_ || !problems.empty(), result_.directory.string(),
          ": appeared while this checkpoint was written\nhint: two jobs save to the same folder");
      if (problems.empty() && exchange_paths(temporary_, result_.directory)) {
        published_ = true;
        sync_directory(request_.root);
        const auto progress = [this] { agreement_.progress(); };
        // This now holds the replaced directory
        const std::string failure = outcome_of([&] { remove_tree(temporary_, progress); });
        if (!failure.empty()) result_.warnings.push_back(failure);
        return;
      }
      const fs::path aside = free_name(problems.empty() ? ".replaced" : ".unusable");
      rename_path(result_.directory, aside);
      result_.warnings.push_back(cat(result_.directory.string(), ": was moved to ", aside.string(),
                                     problems.empty() ? "" : ": " + problems[0]));
    }
    rename_path(temporary_, result_.directory);
    published_ = true;
    sync_directory(request_.root);
  }

  fs::path free_name(const std::string& suffix) const {
    for (int i = 0;; ++i) {
      const fs::path name(cat(result_.directory.string(), suffix, "-", i));
      std::error_code ignored;
      if (!fs::exists(fs::symlink_status(name, ignored))) return name;
    }
  }

  // Hint file and retention. Their failures are warnings: the checkpoint has been published.
  void after_publication() {
    std::string failure = outcome_of([&] {
      const fs::path hint = request_.root / kLatestName, temporary = temporary_path(hint);
      const std::string text = cat(request_.iteration, "\n");
      OutputFile out(temporary);
      out.write(text.data(), text.size());
      out.sync_and_close();
      rename_path(temporary, hint);
      sync_directory(request_.root);
    });
    if (!failure.empty()) result_.warnings.push_back(failure);
    failure = outcome_of([&] {
      for (std::string& warning :
           apply_retention(request_.root, request_.iteration, request_.retention,
                           [this] { agreement_.progress(); }))
        result_.warnings.push_back(std::move(warning));
    });
    if (!failure.empty()) result_.warnings.push_back(failure);
  }

  // Removes this save's files, to free space on a full disk.
  void discard() {
    if (!made_temporary_ || published_) return;
    lock_.reset();
    (void)outcome_of([&] { remove_tree(temporary_); });
  }

  const SaveRequest& request_;
  Agreement alone_;
  Agreement& agreement_;
  SaveResult result_;
  fs::path temporary_;
  std::unique_ptr<DirectoryLock> lock_;
  // Problems of the directory that had the name at the start
  std::optional<std::vector<std::string>> existing_;
  bool made_temporary_ = false, published_ = false;
};

}  // namespace

SaveResult save_checkpoint(const SaveRequest& request) { return Saver(request).run(); }

}  // namespace megatron
