// Index arrays that are built once per node and stored as .npy files.
//
// A set of arrays is named by a hash of the description that determines it. The description file is
// written last and contains the size and checksum of each array, so a set is complete or absent; a
// damaged one is rebuilt. One process per node reads the arrays in full to verify their checksums;
// the others, and later starts while the files are unchanged, only map them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "megatron/datasets/npy.h"

namespace megatron {

// An array to store: its name ("document_index"), NumPy element type, shape and bytes.
struct CacheArray {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  std::span<const std::byte> bytes;
};

// 32 hexadecimal digits of a 128-bit hash.
std::string hash_text(std::string_view text);

class IndexCache {
 public:
  // Files are <folder>/<hash of description>-<name>-{description.txt,<array>.npy}.
  IndexCache(std::filesystem::path folder, std::string name, std::string description);

  // The stored arrays in the order of `names`, built first if missing or damaged. `build` passes
  // the arrays to its argument. False if the folder is not writable: nothing is stored and `arrays`
  // is unchanged.
  bool get(std::span<const std::string> names,
           const std::function<void(const std::function<void(std::span<const CacheArray>)>& store)>&
               build,
           std::vector<NpyArray>& arrays);

  // Facts about the whole arrays besides their checksums, computed in the same pass. Set before
  // get().
  using Summary = std::function<std::string(std::span<const NpyArray> arrays)>;
  void summarize_with(Summary summary) { summarize_ = std::move(summary); }
  const std::string& summary() const { return summary_; }

  // Whether get() read the arrays in full instead of trusting another process.
  bool checked_here() const { return checked_here_; }

 private:
  std::filesystem::path file(const std::string& what) const;
  bool load(std::span<const std::string> names, std::vector<NpyArray>& arrays);
  void store(std::span<const CacheArray> arrays) const;
  bool make_folder() const;

  std::filesystem::path folder_;
  std::string stem_, description_;
  Summary summarize_;
  std::string summary_;
  bool checked_here_ = false;
};

}  // namespace megatron
