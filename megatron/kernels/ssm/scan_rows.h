// What the kernels of state-space layers share: how rows lie, and where documents start.
#pragma once

#include <cstdint>

namespace megatron {

// Rows of [tokens, samples] with strides in elements; what a token holds is contiguous.
struct ScanRows {
  void* data = nullptr;
  int64_t token = 0, sample = 0;  // strides
};

// A number of each token, on the device, with strides: a document starts where the number differs
// from that of the token before. Null: one document.
struct ScanDocuments {
  const int64_t* ids = nullptr;
  int64_t token = 0, sample = 0;  // strides
};

}  // namespace megatron
