// Attention in which the distance of query and key matters, by a bias of their score (relative
// positions of T5) or by a window, forward and backward. CUDA alone; tensor/attention's ATen
// operations compute the same elsewhere.
//
//   score(i, j) = scale q_i . k_j + bias[j - i + s - 1]        out_i = sum_j softmax_j(score) v_j
//
// What lies outside of the window is not computed.
//
// Scores are computed in fp32 in tiles and never stored; probabilities are rounded to the type of q
// for the product with v, as in flash attention (Dao 2023, arXiv:2307.08691). Deterministic: the
// backward computes scores twice, once by keys for dk and dv, once by queries for dq and the
// gradient of the bias, whose sums along the diagonals have a fixed order.
#pragma once

#include <cstdint>

#include "megatron/base/dtype.h"

namespace megatron {

// Rows of [s, b, n, d], or of samples of various lengths one after another, [R, n, d], with 0 as
// the sample's stride; d is contiguous, strides are in elements and multiples of 8, data is 16-byte
// aligned.
struct AttentionRows {
  void* data = nullptr;
  int64_t position = 0, sample = 0, head = 0;  // strides
};

struct DistanceAttentionArgs {
  DType dtype = DType::kBFloat16;  // or fp16
  int64_t samples = 1, heads = 1;  // b, n
  int64_t queries = 0, keys = 0;   // s, s_k: of each sample, or at most
  // [b + 1] on the device: the first row of each sample, and the end of the last; null: every
  // sample has s (s_k). Both or none; rows outside of all samples are not touched.
  const int32_t* query_offsets = nullptr;
  const int32_t* key_offsets = nullptr;
  int64_t head_size = 64;  // 64 or 128
  bool causal = false;     // query i sees keys <= i; needs as many queries as keys
  // Query i sees keys i - window_left ... i + window_right; -1: all on that side. Without a
  // gradient of the bias, and with as many queries as keys.
  int64_t window_left = -1, window_right = -1;
  double scale = 1.0;
  AttentionRows q, k, v, out;
  const float* bias = nullptr;  // [n, s + s_k - 1], or null: none
  float* lse = nullptr;         // [b, n, s]: log sum exp of the scores; assigned by the forward

  // The backward's; `out` and `lse` are those of the forward.
  AttentionRows dout, dq, dk, dv;
  float* dbias = nullptr;     // [n, s + s_k - 1], added to; or null
  void* workspace = nullptr;  // distance_attention_workspace() bytes
};

constexpr bool distance_attention_supports(int64_t head_size) {
  return head_size == 64 || head_size == 128;
}
// Whether a window (-1: all on that side) leaves so few of `keys` that computing no others is
// faster than the libraries' kernels, which take a third of the time for each score.
constexpr bool is_narrow_window(int64_t left, int64_t right, int64_t keys) {
  constexpr int64_t kRounding = 256;  // what blocks of queries see besides
  return left >= 0 && right >= 0 && 4 * (left + right + kRounding) <= keys;
}
// What a block of the kernels works on.
struct DistanceAttentionTiles {
  static constexpr int64_t kWarps = 4;
  static constexpr int64_t kTile = 64;  // rows of the tiles that it goes through
  static constexpr int64_t kHalf = 32;  // columns of scores at a time in the backward
  static constexpr int64_t owned(int64_t head_size) { return head_size == 64 ? 128 : 64; }
};
// A float per query and head and, for a gradient of the bias, per warp's queries those of all
// distances: at s_k = 512 about half of the bytes of q.
constexpr int64_t distance_attention_workspace(const DistanceAttentionArgs& args, bool bias_grad) {
  using Tiles = DistanceAttentionTiles;
  const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t warps = ceil_div(args.queries, Tiles::owned(args.head_size)) * Tiles::kWarps,
                diagonals = ceil_div(args.keys, Tiles::kTile) * Tiles::kTile + Tiles::kHalf;
  return args.samples * args.heads * (args.queries + (bias_grad ? warps * diagonals : 0)) *
         static_cast<int64_t>(sizeof(float));
}
void distance_attention_forward_cuda(const DistanceAttentionArgs& args, void* stream);
void distance_attention_backward_cuda(const DistanceAttentionArgs& args, void* stream);

}  // namespace megatron
