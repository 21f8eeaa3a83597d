#include "megatron/datasets/retro/block_files.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/format.h"

namespace megatron {

BlockFiles::BlockFiles(std::filesystem::path folder, BlockShape shape)
    : folder_(std::move(folder)), shape_(std::move(shape)) {
  MEGATRON_ASSERT(shape_.rows >= 0 && shape_.block_rows > 0 && shape_.width > 0);
}

int64_t BlockFiles::num_blocks() const {
  return (shape_.rows + shape_.block_rows - 1) / shape_.block_rows;
}

RowBlock BlockFiles::block(int64_t index) const {
  const int64_t begin = index * shape_.block_rows;
  return {begin, std::min(begin + shape_.block_rows, shape_.rows)};
}

std::filesystem::path BlockFiles::file(const RowBlock& block) const {
  return folder_ / format_text("%012lld-%012lld.npy", static_cast<long long>(block.begin),
                               static_cast<long long>(block.end));
}

std::vector<RowBlock> BlockFiles::missing(const RankShare& share) const {
  std::vector<RowBlock> blocks;
  for (int64_t i = 0; i < num_blocks(); ++i)
    if (share.takes(i) && !std::filesystem::exists(file(block(i)))) blocks.push_back(block(i));
  return blocks;
}

void BlockFiles::wait_for_all() const {
  for (int64_t i = 0; i < num_blocks(); ++i)
    wait_until([&] { return std::filesystem::exists(file(block(i))); });
}

void BlockFiles::write(const RowBlock& block, std::span<const std::byte> rows) const {
  std::filesystem::create_directories(folder_);
  AtomicFileWriter out(file(block));
  out.write(npy_header(shape_.dtype, {block.size(), shape_.width}));
  out.write(rows.data(), rows.size());
  out.commit();
}

NpyArray BlockFiles::read(const RowBlock& block) const {
  const std::filesystem::path path = file(block);
  NpyArray array(path);
  const std::vector<int64_t> expected = {block.size(), shape_.width};
  MEGATRON_CHECK(array.dtype() == shape_.dtype && array.shape() == expected, path.string(),
                 " holds \"", array.dtype(), "\" [", listed(array.shape()), "], expected \"",
                 shape_.dtype, "\" [", listed(expected), "]",
                 "\nhint: it is of another run; remove it to have it made again");
  return array;
}

}  // namespace megatron
