#include "megatron/kernels/hash.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

namespace megatron {
namespace {

using Bytes = std::vector<unsigned char>;

// The hashes of several runs of bytes, worked on in the given ranges of blocks.
std::vector<uint64_t> hashes_of(const std::vector<Bytes>& runs, int64_t blocks_at_once) {
  std::vector<HashPiece> pieces;
  int64_t blocks = 0;
  for (const Bytes& run : runs) {
    const auto bytes = static_cast<int64_t>(run.size());
    pieces.push_back({run.data(), bytes, blocks});
    blocks += (bytes + kHashBlockBytes - 1) / kHashBlockBytes;
  }
  std::vector<uint64_t> hashes(runs.size(), 0);
  const HashPieces work{pieces.data(), static_cast<int64_t>(pieces.size()), blocks, hashes.data()};
  // The last blocks first: their order does not matter.
  for (int64_t end = blocks; end > 0; end -= blocks_at_once)
    hash_pieces_cpu(work, std::max<int64_t>(0, end - blocks_at_once), end);
  return hashes;
}

uint64_t hash_of(const Bytes& run) { return hashes_of({run}, 1)[0]; }

Bytes pattern(size_t size) {
  Bytes bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<unsigned char>(i * 7 % 251);
  return bytes;
}

// The expected numbers were computed by a few lines of Python from the description in hash.h.
TEST(Hash, IsTheOneThatIsDescribed) {
  Bytes counting(256);
  std::iota(counting.begin(), counting.end(), 0);
  const std::vector<Bytes> runs = {{}, {'a'}, {}, counting, pattern(300001), {}};
  const std::vector<uint64_t> expected = {
      0, 0x4f5da978776a9db1ULL, 0, 0x0308856e007df973ULL, 0xccdfadd1f14a5c89ULL, 0};
  for (const int64_t blocks : {1, 2, 100})
    EXPECT_EQ(hashes_of(runs, blocks), expected) << blocks << " blocks at once";
}

TEST(Hash, EveryBitChangesIt) {
  Bytes bytes = pattern(1003);
  const uint64_t before = hash_of(bytes);
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    bytes[bit / 8] ^= static_cast<unsigned char>(1u << bit % 8);
    EXPECT_NE(hash_of(bytes), before) << "bit " << bit;
    bytes[bit / 8] ^= static_cast<unsigned char>(1u << bit % 8);
  }
  EXPECT_EQ(hash_of(bytes), before);
}

// For any two words and any index the terms differ, since each step of the mixing can be taken
// back; a sample of neighbours.
TEST(Hash, WordsAndPlacesCount) {
  for (uint64_t index = 0; index < 1000; ++index)
    for (int bit = 0; bit < 64; ++bit)
      EXPECT_NE(hash_word(index * index, index), hash_word((index * index) ^ (1ULL << bit), index));
  Bytes bytes(64, 0);
  bytes[0] = 1;
  Bytes moved(64, 0);
  moved[8] = 1;
  EXPECT_NE(hash_of(bytes), hash_of(moved));
  Bytes swapped = pattern(64);
  const uint64_t before = hash_of(swapped);
  std::swap_ranges(swapped.begin(), swapped.begin() + 8, swapped.begin() + 32);
  EXPECT_NE(hash_of(swapped), before);
}

}  // namespace
}  // namespace megatron
