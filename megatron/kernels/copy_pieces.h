// Copies of many pieces of memory in one launch. Each copy of its own costs the host about 3 us,
// and a thousand of them hold up the device. CUDA alone.
#pragma once

#include <cstdint>
#include <span>

namespace megatron {

// Device memory, also that of another GPU to which there is peer access.
struct PieceCopy {
  const void* from = nullptr;
  void* to = nullptr;
  int64_t bytes = 0;
};

// Whether a piece is of whole words of 4 bytes; those of 16 bytes are copied faster.
bool fits_copy_pieces(const PieceCopy& piece);

// Loads the kernel, which otherwise its first launch does, waiting for the device to be idle: it
// never is if it waits for what is to be copied.
void load_copy_pieces_cuda();

// Pieces must not overlap. Runs on few multiprocessors, since a product may run meanwhile. What is
// written is visible to other GPUs once the kernel has ended.
void copy_pieces_cuda(std::span<const PieceCopy> pieces, void* stream);

}  // namespace megatron
