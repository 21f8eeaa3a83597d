// Core attention: softmax(q k^T * scale + mask) v with grouped keys and values.
#pragma once

#include <ATen/core/Tensor.h>

#include "megatron/tensor/random.h"

namespace megatron {

// How the deterministic backward of cuDNN on Hopper is split; it stores the score gradients, two
// bytes each, in memory. The batch is split so that they need at most 1 GiB; if a single KV group
// of one sample needs more than 4 GiB, its query heads are split too, and the partial dk and dv are
// rounded before they are added.
struct AttentionParts {
  int64_t samples = 1;
  int64_t heads = 1;
  int64_t scratch_bytes = 0;  // scratch memory of one part
};
// For b samples, `heads` query heads over `groups` KV groups, s queries over s_k keys.
AttentionParts attention_parts(int64_t b, int64_t heads, int64_t groups, int64_t s, int64_t s_k,
                               bool deterministic);

enum class AttentionBackend { kAuto, kFlash, kFused, kUnfused, kLocal };

struct AttentionOptions {
  bool causal = true;    // bottom-right aligned: query i of s sees keys <= i + (s_k - s)
  double scale = 1.0;    // applied to q k^T
  double softcap = 0.0;  // c > 0: scores become c tanh(score / c); uses the unfused path
  // keys further left than this many are masked; -1: no limit (--window-size)
  int64_t window_left = -1;
  int64_t window_right = -1;  // ignored when causal
  double dropout = 0.0;       // of the probabilities, position-keyed; unfused path
  RandomKey key = {};
  TokenPositions place = {};     // of the queries; needed when dropout > 0
  at::Tensor key_position = {};  // [s_k] int64; needed when dropout > 0
  int64_t first_head = 0;        // global number of the first query head of this rank
  // bool [b, 1, s, s_k] or [1, 1, s, s_k], True = may NOT attend; undefined: none
  at::Tensor mask = {};
  // [n] fp32 (fp64): the score of a further key with value 0, one for each query head, unscaled and
  // not capped (an attention sink); undefined: none
  at::Tensor sinks = {};
  // [n, s + s_k - 1] fp32 (fp64): what is added to the scaled score of query i and key j, by their
  // distance: element j - i + s - 1 of the head. Without sinks and softcap; undefined: nothing
  at::Tensor distance_bias = {};
  AttentionBackend backend = AttentionBackend::kAuto;
  // False: cuDNN's backward may sum in any order, which is faster and needs less memory
  bool deterministic = true;
  bool recompute = false;  // save q, k, v only and run the forward again in the backward
};

// Differentiable in q, k, v, sinks and distance_bias. kAuto takes the first backend that supports
// these options: with a bias by distance or a narrow window a kernel of our own (CUDA, 16-bit
// types), cuDNN (kFused; CUDA, lengths that are multiples of 64, since each shape needs a plan),
// flash attention, libtorch's memory-efficient kernel behind a mask of keys alone (CUDA, 16-bit
// types), else the unfused path (ATen operations, softmax in fp32). All are
// bit-reproducible unless `deterministic` is off. Throws Error if a backend is requested that does
// not support the options.
//
//   q       [s, b, n, d]       any strides with a contiguous last dimension
//   k       [s_k, b, g, d]     g divides n
//   v       [s_k, b, g, v]     v <= d without a copy on cuDNN, padded to d for flash attention;
//                              v > d takes the unfused path
//   return  [s, b, n, v]       contiguous
at::Tensor core_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const AttentionOptions& options);

// Self-attention over packed projections of key/value groups, each [its r query heads | key |
// value]: applies rotary embedding to queries and keys (tensor/rotary.h; none if cos is undefined),
// then attention, without copies of either where a library kernel is used. Differentiable in
// packed, whose queries and keys are rotated in place: no other code may need the old values.
//
//   packed  [s, b, g * (r + 2) * d] contiguous
//   return  [s, b, g * r * d]
struct PackedHeads {
  int64_t groups = 1;           // g
  int64_t heads_per_group = 1;  // r
  int64_t head_size = 1;        // d
};
struct RotaryAngles {
  at::Tensor cos, sin;
  bool interleaved = false;
};
at::Tensor packed_attention(const at::Tensor& packed, const PackedHeads& heads,
                            const RotaryAngles& rotary, const AttentionOptions& options);

}  // namespace megatron
