// Hashes of the bytes of tensors, to check whether two ranks hold the same ones.
//
// The hash of n bytes is the sum, modulo 2^64, of hash_word(w[i], i) over the little-endian words
// w[i] of eight bytes, the last one padded with zeros. A word's term depends on its index and is a
// bijection of the word, so that any change within one word changes the hash, and any other change
// does except with probability of about 2^-64. Terms are added, so that blocks may be hashed in any
// order, on any number of threads, and on a GPU with the same result as on a CPU. Source of the
// mixing function: the finaliser of SplitMix64 (Steele, Lea, Flood 2014).
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define MEGATRON_DEVICE_TOO __host__ __device__
#else
#define MEGATRON_DEVICE_TOO
#endif

namespace megatron {

MEGATRON_DEVICE_TOO inline uint64_t hash_word(uint64_t word, uint64_t index) {
  uint64_t x = word + (index + 1) * 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

constexpr int64_t kHashBlockBytes = int64_t{1} << 17;

// One range of bytes, aligned to its element type, and the blocks of kHashBlockBytes in which it is
// processed.
struct HashPiece {
  const void* data = nullptr;
  int64_t bytes = 0;
  int64_t first_block = 0;  // number of blocks of the preceding pieces
};

// Adds the hash of each piece to hashes[piece]; pieces are in the order of their first_block.
struct HashPieces {
  const HashPiece* pieces = nullptr;  // [num_pieces], on the device for the CUDA version
  int64_t num_pieces = 0;
  int64_t num_blocks = 0;
  uint64_t* hashes = nullptr;  // [num_pieces]
};
void hash_pieces_cpu(const HashPieces& work, int64_t first_block, int64_t end_block);
void hash_pieces_cuda(const HashPieces& work, void* stream);

}  // namespace megatron

#undef MEGATRON_DEVICE_TOO
