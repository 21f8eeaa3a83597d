#include <cstring>
#include <vector>

#include "megatron/kernels/detail/block_io.h"
#include "megatron/kernels/embedding.h"

namespace megatron {

void embedding_forward_cpu(const EmbeddingForward& args, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    char* out = static_cast<char*>(args.out) + i * args.row_bytes;
    if (args.ids[i] < 0) {
      std::memset(out, 0, args.row_bytes);
    } else {
      std::memcpy(out, static_cast<const char*>(args.weight) + args.ids[i] * args.row_bytes,
                  args.row_bytes);
    }
  }
}

void embedding_backward_cpu(const EmbeddingBackward& args, int64_t row_begin, int64_t row_end) {
  with_accumulator(args.target_dtype, [&](auto acc) {
    using Acc = decltype(acc);
    const int64_t n = args.columns;
    std::vector<Acc> scratch(n);
    for (int64_t i = 0; i < args.count; ++i) {
      const int64_t id = args.ids[i];
      if (id < row_begin || id >= row_end) continue;
      const Acc* dy = load_run(args.dtype, args.dy, i * n, n, scratch.data());
      Acc* target = static_cast<Acc*>(args.target) + id * n;
      for (int64_t j = 0; j < n; ++j) target[j] += dy[j];
    }
  });
}

}  // namespace megatron
