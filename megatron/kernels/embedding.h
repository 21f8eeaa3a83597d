// Embedding lookup and its backward.
#pragma once

#include <cstdint>

#include "megatron/base/dtype.h"

namespace megatron {

// out[i] = weight[ids[i]], or zeros for a negative id. Copies bytes, for any type. Assigned.
struct EmbeddingForward {
  int64_t row_bytes = 0;
  int64_t count = 0;
  const void* weight = nullptr;  // [v, row_bytes]
  const int64_t* ids = nullptr;  // [count]
  void* out = nullptr;           // [count, row_bytes]
};
void embedding_forward_cpu(const EmbeddingForward& args, int64_t begin, int64_t end);
void embedding_forward_cuda(const EmbeddingForward& args, void* stream);

// target[ids[i]] += dy[i], in the order of i; target is fp32 or fp64.
struct EmbeddingBackward {
  DType dtype = DType::kFloat32;  // type of dy
  DType target_dtype = DType::kFloat32;
  int64_t columns = 0;
  int64_t count = 0;
  int64_t vocabulary = 0;
  const void* dy = nullptr;        // [count, columns]
  const int64_t* ids = nullptr;    // [count]; CUDA: sorted, stably
  const int64_t* order = nullptr;  // CUDA: index in dy of each sorted id
  void* target = nullptr;          // [vocabulary, columns]
};
// Adds to target rows [row_begin, row_end) only: every thread reads all ids and owns a range of
// rows.
void embedding_backward_cpu(const EmbeddingBackward& args, int64_t row_begin, int64_t row_end);
void embedding_backward_cuda(const EmbeddingBackward& args, void* stream);

}  // namespace megatron
