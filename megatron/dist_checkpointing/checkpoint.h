// Reading a checkpoint: any part of any logical tensor, whatever layout wrote it.
//
// Opening verifies the manifest; loading verifies the checksum of every block it touches;
// verify_checkpoint() (verify.h) reads every byte. Access problems throw AccessError, damage throws
// another Error. Files are read with pread, never mapped, so that a truncated file is an error and
// not a signal.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/dist_checkpointing/manifest.h"
#include "megatron/tensor/sharded_tensor.h"

namespace megatron {

// Whether the name matches a pattern in which each `*` stands for any sequence of characters.
bool matches_pattern(std::string_view pattern, std::string_view name);

// Names may contain `*`, as above.
struct LoadOptions {
  // Between F64, F32, BF16 and F16, rounding to nearest even
  bool convert_dtype = false;
  std::vector<std::string> allow_missing;     // wanted but not stored: left untouched and reported
  std::vector<std::string> allow_unexpected;  // stored but neither wanted here nor by others
  std::vector<std::string> wanted_elsewhere;  // stored, but wanted by another rank
  int threads = 0;                            // 0: all cores
  // Called after each block that was read, from any thread
  std::function<void()> progress;
};

struct LoadReport {
  std::vector<std::string> missing;     // keys, by allow_missing
  std::vector<std::string> unexpected;  // keys, by allow_unexpected
  uint64_t bytes_read = 0;
};

// An opened checkpoint directory. Safe to use from several threads.
class Checkpoint {
 public:
  // Reads and verifies manifest.json, and that every file has its size. Throws Error.
  explicit Checkpoint(std::filesystem::path directory);
  // Files of another program, described by `manifest`; verifies that every file has its size.
  // Throws Error.
  Checkpoint(std::filesystem::path directory, Manifest manifest);
  // A checkpoint whose files have been verified, by all ranks together: reads only the manifest.
  static Checkpoint open_verified(std::filesystem::path directory);

  const std::filesystem::path& directory() const { return directory_; }
  const Manifest& manifest() const { return manifest_; }
  int64_t iteration() const { return manifest_.iteration; }
  const std::string& state() const { return manifest_.state; }  // JSON object text
  bool has_file(std::string_view name) const;
  // The contents of a stored file, verified.
  std::string read_file(std::string_view name) const;

  // Fills `data` of every wanted tensor. Elements of the local tensor outside its pieces
  // (vocabulary padding) become zero. Missing and unexpected tensors, other shapes and other
  // element types are errors, all named in one message; then nothing is written. A checksum
  // mismatch is an error that names file and block.
  LoadReport load(std::span<const ShardedTensor> wanted, const LoadOptions& options = {}) const;

 private:
  Checkpoint() = default;
  void check_sizes() const;

  std::filesystem::path directory_;
  Manifest manifest_;
};

}  // namespace megatron
