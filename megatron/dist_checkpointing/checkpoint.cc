#include "megatron/dist_checkpointing/checkpoint.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/base/threads.h"
#include "megatron/dist_checkpointing/detail/convert.h"
#include "megatron/dist_checkpointing/detail/geometry.h"
#include "megatron/dist_checkpointing/detail/io.h"
#include "megatron/dist_checkpointing/detail/stored_blocks.h"

namespace megatron {

bool matches_pattern(std::string_view pattern, std::string_view name) {
  size_t p = 0, n = 0, star = std::string_view::npos, mark = 0;
  while (n < name.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      mark = n;
    } else if (p < pattern.size() && pattern[p] == name[n]) {
      ++p, ++n;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      n = ++mark;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

namespace {

namespace fs = std::filesystem;

bool matches_any(const std::vector<std::string>& patterns, std::string_view name) {
  return std::any_of(patterns.begin(), patterns.end(),
                     [&](const std::string& pattern) { return matches_pattern(pattern, name); });
}

// The part of one stored fragment that one wanted piece needs.
struct Transfer {
  Overlap overlap;
  const Fragment* fragment;
  DType stored_dtype;
  const ShardedTensor* wanted;

  // Copies what lies in [begin, begin + size) of the file's data section. `bytes` returns that
  // range, reading it on first use.
  template <class Bytes>
  void copy(uint64_t begin, uint64_t size, Bytes&& bytes) const {
    const int64_t stored_size = size_of(stored_dtype), wanted_size = size_of(wanted->dtype);
    // Address of flat element 0
    const int64_t base =
        static_cast<int64_t>(fragment->offset) - fragment->flat_begin * stored_size;
    const int64_t first = static_cast<int64_t>(begin) - base;
    const int64_t from = first <= 0 ? 0 : (first + stored_size - 1) / stored_size;
    const int64_t to = (first + static_cast<int64_t>(size)) / stored_size;
    char* out = static_cast<char*>(wanted->data);
    overlap.for_each_run(from, to, [&](int64_t box_flat, int64_t local_flat, int64_t count) {
      const std::byte* in = bytes() + (base + box_flat * stored_size - static_cast<int64_t>(begin));
      char* at = out + (local_flat - wanted->flat_begin) * wanted_size;
      if (stored_dtype == wanted->dtype)
        std::memcpy(at, in, static_cast<size_t>(count * stored_size));
      else
        convert_elements(in, stored_dtype, at, wanted->dtype, count);
    });
  }
};

// The same for elements that are not aligned to their size, so that blocks would split them: reads
// its own windows.
struct UnalignedTransfer {
  Transfer transfer;

  uint64_t copy(const Checkpoint& checkpoint) const {
    const Fragment& fragment = *transfer.fragment;
    const StoredFile& file = checkpoint.manifest().files[static_cast<size_t>(fragment.file)];
    const StoredBytes in(checkpoint.directory(), file);
    const int64_t bytes = size_of(transfer.stored_dtype);
    const int64_t base = static_cast<int64_t>(fragment.offset) - fragment.flat_begin * bytes;
    const auto end = static_cast<uint64_t>(base + transfer.overlap.last() * bytes);
    std::vector<std::byte> buffer;
    uint64_t at = static_cast<uint64_t>(base + transfer.overlap.first() * bytes);
    for (uint64_t size = 0; at < end; at += size) {
      size = std::min(end - at, kCheckpointBlockBytes);  // whole elements
      buffer.resize(size);
      in.read_at(file.header_bytes + at, buffer.data(), size);
      transfer.copy(at, size, [&] { return buffer.data(); });
    }
    return static_cast<uint64_t>((transfer.overlap.last() - transfer.overlap.first()) * bytes);
  }
};

// The same if the fragment is part of a larger matrix, in the last two dimensions: row by row, or,
// if the file holds the transpose, column by column.
struct StridedTransfer {
  const ShardPiece* piece;
  const Fragment* fragment;
  DType stored_dtype;
  const ShardedTensor* wanted;

  uint64_t copy(const Checkpoint& checkpoint) const {
    const int64_t stored_size = size_of(stored_dtype), wanted_size = size_of(wanted->dtype);
    const size_t rows = wanted->local_shape.size() - 2, columns = rows + 1;
    MEGATRON_CHECK(wanted->flat_begin == 0 &&
                       wanted->flat_end == checked_num_elements(wanted->local_shape, wanted->key),
                   wanted->key,
                   ": a flat range of a tensor that is stored with a stride cannot be read");
    const StoredFile& file = checkpoint.manifest().files[static_cast<size_t>(fragment->file)];
    const StoredBytes in(checkpoint.directory(), file);
    const Box common = *intersect(fragment->box, piece->global);
    const auto from = [&](const std::vector<int64_t>& origin, size_t d) {
      return common.offset[d] - origin[d];
    };
    // The contiguous dimension in the file: part of a row, or of a column.
    const size_t inner = fragment->row_stride > 0 ? columns : rows, outer = rows + columns - inner;
    const int64_t stride = fragment->row_stride + fragment->column_stride;
    const int64_t count = common.shape[inner], step = fragment->step;
    std::vector<std::byte> run(static_cast<size_t>(((count - 1) * step + 1) * stored_size)),
        converted(static_cast<size_t>(count * wanted_size));
    int64_t to = 0;  // the first element in the local tensor
    for (size_t d = 0; d <= columns; ++d)
      to = to * wanted->local_shape[d] + piece->local_offset[d] + from(piece->global.offset, d);
    const int64_t row = wanted->local_shape[columns] * wanted_size;
    char* const out = static_cast<char*>(wanted->data) + to * wanted_size;
    for (int64_t i = 0; i < common.shape[outer]; ++i) {
      const int64_t at = (from(fragment->box.offset, outer) + i) * stride +
                         from(fragment->box.offset, inner) * step;
      in.read_at(file.header_bytes + fragment->offset + static_cast<uint64_t>(at * stored_size),
                 run.data(), run.size());
      for (int64_t j = 1; step > 1 && j < count; ++j)
        std::memcpy(run.data() + j * stored_size, run.data() + j * step * stored_size,
                    static_cast<size_t>(stored_size));
      const std::byte* elements = run.data();
      if (stored_dtype != wanted->dtype) {
        convert_elements(run.data(), stored_dtype, converted.data(), wanted->dtype, count);
        elements = converted.data();
      }
      char* const element = out + i * (outer == rows ? row : wanted_size);
      if (inner == columns) {
        std::memcpy(element, elements, static_cast<size_t>(count * wanted_size));
        continue;
      }
      for (int64_t j = 0; j < count; ++j)
        std::memcpy(element + j * row, elements + j * wanted_size,
                    static_cast<size_t>(wanted_size));
    }
    return static_cast<uint64_t>(count * common.shape[outer] * stored_size);
  }
};

// One load: checks names, shapes and types, then copies block by block.
class Loader {
 public:
  Loader(const Checkpoint& checkpoint, std::span<const ShardedTensor> wanted,
         const LoadOptions& options)
      : checkpoint_(checkpoint), options_(options) {
    for (const ShardedTensor& tensor : wanted) wanted_.push_back(normalized(tensor));
  }

  LoadReport run() {
    account();
    for (const ShardedTensor& tensor : present_) plan(tensor);
    transfer_all();
    return std::move(report_);
  }

 private:
  void account() {
    const auto& stored = checkpoint_.manifest().tensors;
    std::set<std::string> names;
    for (const ShardedTensor& tensor : wanted_) {
      names.insert(tensor.key);
      const auto found = stored.find(tensor.key);
      if (found != stored.end()) {
        if (fits(tensor, found->second)) present_.push_back(tensor);
      } else if (matches_any(options_.allow_missing, tensor.key)) {
        report_.missing.push_back(tensor.key);
      } else {
        problems_.push_back(tensor.key + " is not in the checkpoint, the model expects it");
      }
    }
    for (const auto& [key, tensor] : stored) {
      if (names.count(key) || matches_any(options_.wanted_elsewhere, key)) continue;
      if (matches_any(options_.allow_unexpected, key))
        report_.unexpected.push_back(key);
      else
        problems_.push_back(key + " is in the checkpoint, the model has no such tensor");
    }
    throw_problems();
  }

  bool fits(const ShardedTensor& tensor, const StoredTensor& stored) {
    if (stored.shape != tensor.global_shape) {
      problems_.push_back(cat(tensor.key, " has global shape ", shape_string(stored.shape),
                              ", the model expects ", shape_string(tensor.global_shape)));
      return false;
    }
    if (stored.dtype == tensor.dtype ||
        (options_.convert_dtype && is_convertible(stored.dtype, tensor.dtype)))
      return true;
    problems_.push_back(cat(tensor.key, " is stored as ", to_string(stored.dtype),
                            ", the model expects ", to_string(tensor.dtype)));
    return false;
  }

  void throw_problems() const {
    if (problems_.empty()) return;
    constexpr size_t kShown = 20;
    std::string text = cat(checkpoint_.directory().string(), ": ", problems_[0]);
    for (size_t i = 1; i < std::min(problems_.size(), kShown); ++i)
      text += "\ndetail: " + problems_[i];
    if (problems_.size() > kShown)
      text += cat("\ndetail: and ", problems_.size() - kShown, " more tensors");
    throw Error(text);
  }

  void plan(const ShardedTensor& tensor) {
    const StoredTensor& stored = checkpoint_.manifest().tensors.at(tensor.key);
    int64_t mapped = 0;
    for (const ShardPiece& piece : tensor.pieces) {
      mapped += count_before(tensor.local_shape, piece.local_offset, piece.global.shape,
                             tensor.flat_end) -
                count_before(tensor.local_shape, piece.local_offset, piece.global.shape,
                             tensor.flat_begin);
      for (const Fragment& fragment : stored.fragments) {
        Overlap overlap(fragment.box, fragment.flat_begin, fragment.flat_end, tensor.local_shape,
                        piece, tensor.flat_begin, tensor.flat_end);
        if (overlap.empty()) continue;
        if (fragment.is_strided()) {
          strided_.push_back({&piece, &fragment, stored.dtype, &tensor});
          continue;
        }
        if (fragment.offset % static_cast<uint64_t>(size_of(stored.dtype)) != 0) {
          unaligned_.push_back({{std::move(overlap), &fragment, stored.dtype, &tensor}});
          continue;
        }
        add_to_blocks(transfers_.size(), overlap, fragment, stored.dtype);
        transfers_.push_back({std::move(overlap), &fragment, stored.dtype, &tensor});
      }
    }
    if (mapped < tensor.flat_end - tensor.flat_begin)
      std::memset(
          tensor.data, 0,
          static_cast<size_t>((tensor.flat_end - tensor.flat_begin) * size_of(tensor.dtype)));
  }

  void add_to_blocks(size_t transfer, const Overlap& overlap, const Fragment& fragment,
                     DType dtype) {
    const int64_t bytes = size_of(dtype),
                  base = static_cast<int64_t>(fragment.offset) - fragment.flat_begin * bytes;
    const uint64_t begin = static_cast<uint64_t>(base + overlap.first() * bytes);
    const uint64_t end = static_cast<uint64_t>(base + overlap.last() * bytes);
    for (uint64_t block = begin / kCheckpointBlockBytes; block * kCheckpointBlockBytes < end;
         ++block)
      blocks_[{fragment.file, block}].push_back(transfer);
  }

  using Place = std::pair<int, uint64_t>;  // file, block
  using Job = std::pair<Place, const std::vector<size_t>*>;

  void transfer_all() {
    std::vector<Job> jobs;
    std::set<int> files;
    for (const auto& [place, transfers] : blocks_) {
      if (files.insert(place.first).second && files.size() > kMaxOpenFiles) {
        transfer_some(std::exchange(jobs, {}));
        files = {place.first};
      }
      jobs.push_back({place, &transfers});
    }
    transfer_some(jobs);
    const auto whole = [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        bytes_read_ += unaligned_[static_cast<size_t>(i)].copy(checkpoint_);
    };
    parallel_for(static_cast<int64_t>(unaligned_.size()), 1, whole, options_.threads);
    for (const StridedTransfer& transfer : strided_) {
      bytes_read_ += transfer.copy(checkpoint_);
      if (options_.progress) options_.progress();
    }
    report_.bytes_read = bytes_read_;
  }

  void transfer_some(const std::vector<Job>& jobs) {
    std::map<int, std::unique_ptr<StoredBytes>> files;
    for (const auto& [place, transfers] : jobs) {
      std::unique_ptr<StoredBytes>& file = files[place.first];
      if (file) continue;
      const StoredFile& stored = checkpoint_.manifest().files[static_cast<size_t>(place.first)];
      file = std::make_unique<StoredBytes>(checkpoint_.directory(), stored);
    }
    const auto body = [&](int64_t begin, int64_t end) {
      std::vector<std::byte> buffer;
      for (int64_t job = begin; job < end; ++job) {
        const auto& [place, transfers] = jobs[static_cast<size_t>(job)];
        const StoredFile& stored = checkpoint_.manifest().files[static_cast<size_t>(place.first)];
        bool is_read = false;
        const auto bytes = [&, place = place]() -> const std::byte* {
          if (std::exchange(is_read, true)) return buffer.data();
          read_block(*files.at(place.first), stored, place.second, buffer);
          bytes_read_ += buffer.size();
          if (options_.progress) options_.progress();
          return buffer.data();
        };
        for (size_t transfer : *transfers)
          transfers_[transfer].copy(place.second * kCheckpointBlockBytes,
                                    block_size(stored, place.second), bytes);
      }
    };
    parallel_for(static_cast<int64_t>(jobs.size()), 4, body, options_.threads);
  }

  const Checkpoint& checkpoint_;
  const LoadOptions& options_;
  std::vector<ShardedTensor> wanted_, present_;
  std::vector<std::string> problems_;
  std::vector<Transfer> transfers_;
  std::vector<UnalignedTransfer> unaligned_;
  std::vector<StridedTransfer> strided_;
  std::map<Place, std::vector<size_t>> blocks_;  // -> transfers that touch it
  std::atomic<uint64_t> bytes_read_{0};
  LoadReport report_;
};

}  // namespace

Checkpoint::Checkpoint(fs::path directory) : Checkpoint(open_verified(std::move(directory))) {
  check_sizes();
}

Checkpoint::Checkpoint(fs::path directory, Manifest manifest)
    : directory_(std::move(directory)), manifest_(std::move(manifest)) {
  check_manifest(manifest_, directory_.string());
  check_sizes();
}

Checkpoint Checkpoint::open_verified(fs::path directory) {
  const fs::path path = directory / kManifestName;
  MEGATRON_CHECK(path_exists(directory) && fs::is_directory(directory), directory.string(),
                 ": is not a folder");
  MEGATRON_CHECK(path_exists(path), directory.string(), ": has no ", kManifestName,
                 "\nhint: it is no checkpoint of this program, or one whose manifest was deleted");
  Checkpoint checkpoint;
  checkpoint.manifest_ = parse_manifest(read_manifest_text(InputFile(path)), path.string());
  checkpoint.directory_ = std::move(directory);
  return checkpoint;
}

void Checkpoint::check_sizes() const {
  for (const StoredFile& file : manifest_.files) {
    if (file.source) continue;
    const fs::path path = directory_ / file.name;
    const uint64_t bytes = regular_file_size(path);
    MEGATRON_CHECK(bytes == file.bytes, path.string(), ": is ", bytes,
                   " bytes long, the manifest says ", file.bytes);
  }
}

bool Checkpoint::has_file(std::string_view name) const {
  return std::any_of(manifest_.files.begin(), manifest_.files.end(),
                     [&](const StoredFile& f) { return f.name == name; });
}

std::string Checkpoint::read_file(std::string_view name) const {
  for (const StoredFile& file : manifest_.files) {
    if (file.name != name) continue;
    if (file.source) {
      std::string text(file.bytes, '\0');
      file.source->read_at(0, text.data(), text.size());
      return text;
    }
    const InputFile in(directory_ / file.name);
    verify_header(in, file);
    std::string text(file.header_bytes, '\0');
    in.read_at(0, text.data(), text.size());
    std::vector<std::byte> buffer;
    for (uint64_t block = 0; block < file.block_hashes.size(); ++block) {
      read_block(in, file, block, buffer);
      text.append(reinterpret_cast<const char*>(buffer.data()), buffer.size());
    }
    return text;
  }
  throw Error(cat(directory_.string(), ": holds no file ", name));
}

LoadReport Checkpoint::load(std::span<const ShardedTensor> wanted,
                            const LoadOptions& options) const {
  return Loader(*this, wanted, options).run();
}

}  // namespace megatron
