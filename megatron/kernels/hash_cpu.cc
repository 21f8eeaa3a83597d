#include <algorithm>
#include <atomic>
#include <cstring>

#include "megatron/kernels/hash.h"

namespace megatron {
namespace {

constexpr int64_t kWord = sizeof(uint64_t);

uint64_t hash_bytes(const unsigned char* data, int64_t begin, int64_t end) {
  uint64_t sum = 0;
  int64_t at = begin;
  for (; at + kWord <= end; at += kWord) {
    uint64_t word;
    std::memcpy(&word, data + at, kWord);
    sum += hash_word(word, static_cast<uint64_t>(at / kWord));
  }
  if (at < end) {
    uint64_t word = 0;
    std::memcpy(&word, data + at, static_cast<size_t>(end - at));
    sum += hash_word(word, static_cast<uint64_t>(at / kWord));
  }
  return sum;
}

}  // namespace

void hash_pieces_cpu(const HashPieces& work, int64_t first_block, int64_t end_block) {
  const HashPiece* const end = work.pieces + work.num_pieces;
  const HashPiece* piece = std::upper_bound(work.pieces, end, first_block,
                                            [](int64_t block, const HashPiece& one) {
                                              return block < one.first_block;
                                            }) -
                           1;
  for (int64_t block = first_block; block < end_block; ++block) {
    while (piece + 1 < end && piece[1].first_block <= block) ++piece;
    const int64_t begin = (block - piece->first_block) * kHashBlockBytes;
    const uint64_t sum = hash_bytes(static_cast<const unsigned char*>(piece->data), begin,
                                    std::min(begin + kHashBlockBytes, piece->bytes));
    std::atomic_ref(work.hashes[piece - work.pieces]).fetch_add(sum, std::memory_order_relaxed);
  }
}

}  // namespace megatron
