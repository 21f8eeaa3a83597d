// The attentions of a model's layers, computed with random numbers, for measurements.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "megatron/models/batch.h"
#include "megatron/models/model.h"
#include "megatron/tensor/attention/unpadded_attention.h"
#include "megatron/transformer/layer/layer_cost.h"

namespace megatron {

// The texts of a micro-batch without padding, of the stacks of a model.
class StackTexts {
 public:
  // The first `first` layers are those of another stack; 0: there is one.
  StackTexts(const Batch& batch, int64_t first);
  // Of the stack of a layer, counting from 1; null: with padding.
  std::shared_ptr<const UnpaddedRows> of(int64_t layer) const;
  // The part of the rows that is computed.
  double share(int64_t layer) const;
  AttendedRows attended(int64_t layer, const AttentionSize& size) const;

 private:
  int64_t first_;
  std::vector<std::shared_ptr<const UnpaddedRows>> texts_;
};

// The attentions of a forward over a micro-batch, of all `num_layers`; equal ones as one.
struct AttendedLayers {
  AttentionSize size;
  AttendedRows rows;
  int64_t layers = 1;
};
std::vector<AttendedLayers> attended_layers(const ModelConfig& model, int64_t num_layers,
                                            const LayerShape& shape, const StackTexts& texts);

// Without dropout, and without masks of documents or padding.
class MeasuredAttention {
 public:
  // `rows`: those of texts without padding, in the place of size.sequences of size.queries (and of
  // size.keys, where it crosses); null: samples are whole.
  MeasuredAttention(const AttentionSize& size, const AttendedRows& rows, at::ScalarType type,
                    c10::Device device);
  at::Tensor forward() const;  // [s, b, n v], of texts [R, 1, n v]
  void both() const;           // and backward
  // Of the scores that are not masked, half of all where attention is causal, as in Megatron's
  // formula.
  double forward_flops() const;

  // What forward() reads: [s, b, n, d], [s_k, b, g, d], [s_k, b, g, v], of texts [R, 1, ...].
  struct Operands {
    at::Tensor q, k, v;
  };
  Operands operands() const;
  const AttentionOptions& options() const { return options_; }

 private:
  at::Tensor computed(const std::vector<at::Tensor>& inputs, const AttentionOptions& options) const;

  const AttentionSize size_;
  const AttendedRows rows_;
  AttentionOptions options_;
  std::vector<at::Tensor> inputs_;  // packed, or queries, keys and values
  at::Tensor dy_;
};

}  // namespace megatron
