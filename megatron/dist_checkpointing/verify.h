// Reads every byte of a checkpoint and compares checksums: by one rank, or by many, each of which
// reads a share.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "megatron/dist_checkpointing/agreement.h"
#include "megatron/dist_checkpointing/manifest.h"

namespace megatron {

struct VerifyOptions {
  int threads = 0;  // 0: all cores
  // First asks the system to drop cached pages, so that the disk is read
  bool from_disk = false;
  bool tensor_files = true;  // false: only the manifest and the files without tensors
  // Reads share number `share` of `num_shares` parts of about equal bytes. The manifest belongs to
  // every share.
  int share = 0;
  int num_shares = 1;
  std::function<void()> progress;  // called after each block, from any thread
};

// Verifies every byte of the share. Returns one message per problem; empty: no damage. Throws
// AccessError if a file cannot be read, which is not damage.
std::vector<std::string> verify_checkpoint(const std::filesystem::path& directory,
                                           const VerifyOptions& options = {});

// Every rank verifies a share and all get the problems of all shares; at most 20 are named. If a
// rank cannot read its share, all throw. Collective. share and progress of `options` are ignored:
// they follow from the ranks.
std::vector<std::string> verify_checkpoint(const std::filesystem::path& directory, Agreement& ranks,
                                           VerifyOptions options = {});

// Verifies one file of a checkpoint. Throws Error at the first problem.
void verify_file(const std::filesystem::path& directory, const StoredFile& file,
                 const VerifyOptions& options = {});

}  // namespace megatron
