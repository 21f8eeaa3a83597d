// An array of many rows as a folder of .npy files, <begin>-<end>.npy, that are written one by one
// and appear completely or not at all: what is stopped goes on with the files that are missing.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "megatron/datasets/npy.h"
#include "megatron/datasets/retro/rank_share.h"

namespace megatron {

struct RowBlock {
  int64_t begin = 0, end = 0;  // rows
  int64_t size() const { return end - begin; }
};

struct BlockShape {
  int64_t rows = 0;        // of all files
  int64_t block_rows = 0;  // of each but the last
  int64_t width = 0;       // elements of a row
  std::string dtype;       // "<f4", as NpyArray
};

class BlockFiles {
 public:
  BlockFiles(std::filesystem::path folder, BlockShape shape);

  const BlockShape& shape() const { return shape_; }
  const std::filesystem::path& folder() const { return folder_; }
  int64_t num_blocks() const;
  RowBlock block(int64_t index) const;
  std::filesystem::path file(const RowBlock& block) const;
  // Blocks without a file, of those that the rank makes.
  std::vector<RowBlock> missing(const RankShare& share = {}) const;
  // Returns when every rank has made its blocks.
  void wait_for_all() const;

  // `rows` are those of the block in the array's type. Makes the folder.
  void write(const RowBlock& block, std::span<const std::byte> rows) const;
  // Throws Error that names the file unless it holds just these rows.
  NpyArray read(const RowBlock& block) const;

 private:
  std::filesystem::path folder_;
  BlockShape shape_;
};

}  // namespace megatron
