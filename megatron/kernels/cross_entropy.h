// The per-shard steps of a softmax cross entropy over [tokens, columns] logits, of which the first
// `valid` columns count. Acc is fp32, or fp64 for fp64 logits.
#pragma once

#include <cstdint>

#include "megatron/base/dtype.h"

namespace megatron {

struct CrossEntropy {
  DType dtype = DType::kFloat32;
  int64_t tokens = 0;
  int64_t columns = 0;
  int64_t valid = 0;
  const void* logits = nullptr;      // [tokens, columns]
  int64_t stride = 0;                // elements between two rows of logits
  const int64_t* targets = nullptr;  // [tokens]; outside [0, valid): not in this shard
};

// The shard's contribution to the softmax, in one pass over the logits: max[t] = max of the valid
// logits (-inf if there are none), sum[t] = sum over them of exp(logit - max[t]) (0 if there are
// none), target[t] = logit of the target or 0.
struct CrossEntropySums {
  void* max = nullptr;  // [tokens] Acc, assigned; so are the others
  void* sum = nullptr;
  void* target = nullptr;
};
void cross_entropy_sums_cpu(const CrossEntropy& ce, const CrossEntropySums& sums, int64_t begin,
                            int64_t end);
void cross_entropy_sums_cuda(const CrossEntropy& ce, const CrossEntropySums& sums, void* stream);

// dlogits = (softmax * (1 + 2 z lse) - onehot(target)) * scale[t], softmax = exp(logit - lse[t]);
// padding columns 0. Assigned, in the logits' type; may be the logits themselves.
struct CrossEntropyBackward {
  const void* lse = nullptr;    // [tokens] Acc
  const void* scale = nullptr;  // [tokens] Acc
  double z_coeff = 0.0;
  void* dlogits = nullptr;
  int64_t stride = 0;  // row stride of dlogits, in elements
};
void cross_entropy_backward_cpu(const CrossEntropy& ce, const CrossEntropyBackward& args,
                                int64_t begin, int64_t end);
void cross_entropy_backward_cuda(const CrossEntropy& ce, const CrossEntropyBackward& args,
                                 void* stream);

}  // namespace megatron
