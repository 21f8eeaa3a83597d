// Core attention: softmax(q k^T * scale + mask) v with grouped keys and values.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "megatron/tensor/random.h"

namespace megatron {

enum class AttentionBackend { kAuto, kFlash, kFused, kUnfused, kLocal };

struct AttentionOptions {
  bool causal = true;          // aligned to the end: query i of s sees keys <= i + (s_k - s)
  double scale = 1.0;          // applied to q k^T
  double softcap = 0.0;        // c > 0: scores become c tanh(score / c); uses the unfused path
  int64_t window_left = -1;    // keys further left than this many are masked; -1: no limit (--window-size)
  int64_t window_right = -1;   // ignored when causal
  double dropout = 0.0;        // of the probabilities, by place; uses the unfused path
  RandomKey key = {};
  Place place = {};            // queries; needed when dropout > 0
  at::Tensor key_position = {};  // [s_k] int64; needed when dropout > 0
  int64_t first_head = 0;      // global number of the first query head of this rank
  at::Tensor mask = {};        // bool [b, 1, s, s_k] or [1, 1, s, s_k], True = may NOT attend; undefined: none
  at::Tensor sink = {};        // reserved: must be undefined
  AttentionBackend backend = AttentionBackend::kAuto;
  bool recompute = false;      // save q, k, v only and run the forward again in the backward
};

// Differentiable in q, k and v. Chooses flash attention where it computes exactly this, else the unfused path (ATen
// operations, softmax in fp32); both give the same bits in every run. kFused is cuDNN, whose backward does not. Throws Error
// when the backend that was asked for cannot.
//
//   q       [s, b, n, d]       any strides with a contiguous last dimension
//   k, v    [s_k, b, g, d]     g divides n
//   return  [s, b, n, d]       contiguous
at::Tensor core_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const AttentionOptions& options);

}  // namespace megatron
