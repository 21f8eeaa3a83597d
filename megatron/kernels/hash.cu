#include "megatron/kernels/detail/cuda_types.cuh"
#include "megatron/kernels/hash.h"

namespace megatron {
namespace {

constexpr int kHashThreads = 256;
constexpr int64_t kWord = sizeof(uint64_t);

// The piece that contains the block: the last one that begins at or before it.
__device__ int64_t piece_of(const HashPieces& work, int64_t block) {
  int64_t low = 0, high = work.num_pieces;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (work.pieces[middle].first_block <= block ? low : high) = middle;
  }
  return low;
}

__device__ uint64_t partial_word(const unsigned char* bytes, int64_t count) {
  uint64_t word = 0;
  for (int64_t i = 0; i < count; ++i) word |= static_cast<uint64_t>(bytes[i]) << (8 * i);
  return word;
}

// One hash block of kHashBlockBytes per thread block, read once, sixteen bytes at a time if
// aligned.
__global__ void __launch_bounds__(kHashThreads) hash_pieces_kernel(HashPieces work) {
  const int64_t block = blockIdx.x;
  const int64_t index = piece_of(work, block);
  const HashPiece piece = work.pieces[index];
  const auto* data = static_cast<const unsigned char*>(piece.data);
  const int64_t begin = (block - piece.first_block) * kHashBlockBytes;
  const int64_t end = begin + kHashBlockBytes < piece.bytes ? begin + kHashBlockBytes : piece.bytes;
  uint64_t sum = 0;
  int64_t plain = begin;  // from here on words are assembled from bytes
  if (reinterpret_cast<uintptr_t>(data) % sizeof(ulonglong2) == 0) {
    plain = begin + (end - begin) / static_cast<int64_t>(sizeof(ulonglong2)) *
                        static_cast<int64_t>(sizeof(ulonglong2));
#pragma unroll 4
    for (int64_t at = begin + threadIdx.x * sizeof(ulonglong2); at < plain;
         at += kHashThreads * sizeof(ulonglong2)) {
      const ulonglong2 words = *reinterpret_cast<const ulonglong2*>(data + at);
      const auto first = static_cast<uint64_t>(at / kWord);
      sum += hash_word(words.x, first) + hash_word(words.y, first + 1);
    }
  }
  for (int64_t at = plain + threadIdx.x * kWord; at < end; at += kHashThreads * kWord)
    sum += hash_word(partial_word(data + at, end - at < kWord ? end - at : kWord),
                     static_cast<uint64_t>(at / kWord));

  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_down_sync(0xffffffffu, sum, offset);
  __shared__ uint64_t warps[kHashThreads / 32];
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int warp = 1; warp < kHashThreads / 32; ++warp) sum += warps[warp];
  atomicAdd(reinterpret_cast<unsigned long long*>(&work.hashes[index]),
            static_cast<unsigned long long>(sum));
}

}  // namespace

void hash_pieces_cuda(const HashPieces& work, void* stream) {
  if (work.num_blocks == 0) return;
  hash_pieces_kernel<<<static_cast<unsigned>(work.num_blocks), kHashThreads, 0,
                       as_stream(stream)>>>(work);
  check_cuda(cudaGetLastError(), "hash of tensors");
}

}  // namespace megatron
