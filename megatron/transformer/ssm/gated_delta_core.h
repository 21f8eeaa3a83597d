// What a gated delta net computes between its linears:
//
//   [u | z | b | a] = mixed           input of the convolution [q | k | v], gate, raw beta, decay
//   [q | k | v] = silu(conv(u))       q, k of each head made of unit length
//   g = -exp(A_log) softplus(a + dt_bias),   beta = sigmoid(b)
//   y = delta_rule(q, k, v, g, beta)
//   o = norm(y) silu(z)               over each head of values, with one weight for all
//
// One autograd function: only `mixed`, y and the norm's statistics are saved, and rows and states
// that came from other ranks; the rest is computed again.
#pragma once

#include <memory>

#include "megatron/comm/parallel_groups.h"
#include "megatron/nn/parameter.h"
#include "megatron/transformer/config/transformer_config.h"
#include "megatron/transformer/layer/layer.h"
#include "megatron/transformer/ssm/gated_delta.h"
#include "megatron/transformer/ssm/mixer_parts.h"

namespace megatron {

// What a tensor-parallel rank holds of it, t ranks: heads are divided.
struct GatedDeltaShape {
  GatedDeltaShape(const TransformerConfig& config, int64_t t);
  int64_t key_heads, key_size;      // of queries and keys
  int64_t value_heads, value_size;  // of values
  int64_t conv_size;                // tokens that the convolution reads
  int64_t key_width() const { return key_heads * key_size; }
  int64_t value_width() const { return value_heads * value_size; }
  int64_t conv_channels() const { return 2 * key_width() + value_width(); }
  int64_t mixed() const { return conv_channels() + value_width() + 2 * value_heads; }
};

// The parameters but those of the linears, [this rank's part of them]. The heads of different ranks
// share `norm`: its gradient is partial over them.
struct GatedDeltaParameters {
  GatedDeltaParameters(const TransformerConfig& config, int64_t t);
  Parameter conv_weight;     // [conv_channels, 1, K]
  Parameter dt_bias, A_log;  // [value_heads]
  Parameter norm;            // [value_size]
};

class GatedDeltaCore {
 public:
  GatedDeltaCore(const TransformerConfig& config, const ParallelGroups& groups);

  //   mixed   [s, b, GatedDeltaShape::mixed()], s local rows under context parallelism
  //
  // Differentiable. Communication under context parallelism: two all-gathers, of rows and of maps
  // of states, and two in the backward; none otherwise.
  MixerOutput forward(const at::Tensor& mixed, const ForwardContext& pass);
  // The same for rows of several sequences, mixed [t, 1, ...], with what `state` keeps of them.
  at::Tensor decode(const at::Tensor& mixed, RecurrentState& state, const RaggedBatch& batch);
  // The bits of MixerOutput::o. Not differentiable.
  at::Tensor norm_again(const at::Tensor& mixed, const at::Tensor& y, const at::Tensor& rstd);

  const GatedDeltaShape& shape() const { return shape_; }
  GatedDeltaParameters parameters;

 private:
  struct Function;
  struct Values;
  struct Rows;
  // Heads of convolved rows, with q and k as they come from the convolution.
  DeltaOperands heads(const at::Tensor& convolved, const at::Tensor& g,
                      const at::Tensor& beta) const;
  // The operands of the rule.
  DeltaOperands operands(const at::Tensor& convolved, const Rows& rows, const Values& values) const;
  at::Tensor by_head(const at::Tensor& values) const;
  // Of each own segment: the state that enters it, and the gradient of the one that leaves it;
  // undefined: zero.
  std::vector<at::Tensor> incoming_states(const Segments& segments,
                                          const DeltaOperands& whole) const;
  std::vector<at::Tensor> state_grads(const Segments& segments, const DeltaOperands& whole,
                                      const at::Tensor& dy) const;

  const ParallelGroups& groups_;
  const GatedDeltaShape shape_;
  const int64_t chunk_;  // rows of a chunk of the rule
  const double eps_;
};

}  // namespace megatron
