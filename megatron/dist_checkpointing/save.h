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

// Which older checkpoints go after a save. The new one was read back and verified by then, each
// file by its writer; what is damaged is never deleted.
struct Retention {
  // Deletes the previous checkpoint unless its iteration is a multiple of this (Megatron's
  // --save-retain-interval).
  std::optional<int64_t> retain_interval;
  // Keeps the newest K; multiples of retain_interval are kept besides.
  std::optional<int64_t> keep_last;
};

struct SaveRequest {
  std::filesystem::path root;  // created when missing
  int64_t iteration = 0;
  // This rank's part, in host memory; only replica 0 is written
  std::vector<ShardedTensor> tensors;
  // Called before a tensor whose `data` is null is written; gives its memory, which may be used
  // again for the next. For states that do not fit into memory at once.
  std::function<const void*(const ShardedTensor& tensor)> provide;
  // JSON object text, rank 0's counts; NaN and infinities must be spelled as strings
  std::string state = "{}";
  // (relative name, contents) stored beside the weights: resolved configuration, tokenizer files.
  // Rank 0's count.
  std::vector<std::pair<std::string, std::string>> files;
  Retention retention;
  // An existing usable iter_N of the same name: false refuses, true replaces it
  bool replace_existing = false;
  Agreement* agreement = nullptr;  // nullptr: one rank
};

struct SaveResult {
  std::filesystem::path directory;
  uint64_t bytes = 0;        // written by this rank
  uint64_t total_bytes = 0;  // rank 0: of all files, without the manifest
  // Rank 0: a directory moved aside, retention that could not delete, ...
  std::vector<std::string> warnings;
};

// Saves. Throws Error on every rank when any rank fails; then no directory of that name has
// appeared or changed (except when the last step, the sync of the parent folder, is what failed)
// and the temporary one is removed where that is possible.
SaveResult save_checkpoint(const SaveRequest& request);

}  // namespace megatron
