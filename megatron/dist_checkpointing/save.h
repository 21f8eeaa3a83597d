// Writing a checkpoint: `<root>/iter_0000100/` appears completely or not at all.
//
// Every writing rank writes one safetensors file into `iter_0000100.tmp-<host>-<pid>-<start>-<n>/`,
// fsyncs it and reads it back from the medium; the ranks agree; rank 0 writes the manifest, fsyncs,
// renames the directory and fsyncs the parent. A kill at any instant leaves either the old state or
// the new one, and a leftover directory that a later save removes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "megatron/dist_checkpointing/agreement.h"
#include "megatron/tensor/sharded_tensor.h"

namespace megatron {

// Which older checkpoints are deleted after a save. By then the new one was read back and verified,
// each file by its writer. Damaged checkpoints are never deleted.
struct Retention {
  // Deletes the previous checkpoint unless its iteration is a multiple of this (Megatron's
  // --save-retain-interval).
  std::optional<int64_t> retain_interval;
  // Keeps the newest K; multiples of retain_interval are kept in addition.
  std::optional<int64_t> keep_last;
};

struct SaveRequest {
  std::filesystem::path root;  // created when missing
  int64_t iteration = 0;
  // This rank's part, in host memory; only replica 0 is written
  std::vector<ShardedTensor> tensors;
  // Called before a tensor whose `data` is null is written; returns its memory, which may be reused
  // for the next one. For states that do not fit into memory at once.
  std::function<const void*(const ShardedTensor& tensor)> provide;
  // JSON object text, of rank 0; NaN and infinities must be spelled as strings
  std::string state = "{}";
  // (relative name, contents) stored next to the weights: resolved configuration, tokenizer files.
  // Only rank 0's are used.
  std::vector<std::pair<std::string, std::string>> files;
  Retention retention;
  // If a usable iter_N of that name exists: true replaces it, false is an error
  bool replace_existing = false;
  Agreement* agreement = nullptr;  // nullptr: one rank
};

struct SaveResult {
  std::filesystem::path directory;
  uint64_t bytes = 0;        // written by this rank
  uint64_t total_bytes = 0;  // rank 0: size of all files, without the manifest
  // Rank 0: a directory moved aside, retention that could not delete, ...
  std::vector<std::string> warnings;
};

// Saves. If any rank fails, every rank throws Error; then no directory of that name has appeared or
// changed (unless the last step failed, the sync of the parent folder), and the temporary one is
// removed if possible.
SaveResult save_checkpoint(const SaveRequest& request);

}  // namespace megatron
