// What a Mamba-2 mixer computes between its linears:
//
//   [z | u | r] = mixed              gate, input of the convolution [x | B | C], raw time steps
//   [x | B | C] = silu(conv(u))
//   dt = clip(softplus(r + dt_bias)),   A = -exp(A_log)
//   y  = scan(x, dt, A, B, C) + D x
//   o  = norm(y silu(z))             per group of channels
//
// One autograd function: only `mixed`, y and the norm's statistics are saved, with B and C where
// they are gathered, and rows and states that came from other ranks; the rest is computed again.
#pragma once

#include <memory>
#include <vector>

#include "megatron/comm/parallel_groups.h"
#include "megatron/nn/parameter.h"
#include "megatron/transformer/config/transformer_config.h"
#include "megatron/transformer/layer/layer.h"
#include "megatron/transformer/ssm/gated_norm.h"
#include "megatron/transformer/ssm/mixer_parts.h"
#include "megatron/transformer/ssm/ssd_scan.h"

namespace megatron {

// What a tensor-parallel rank holds of it, t ranks: heads are divided, and with them the groups.
// Where there are fewer groups than ranks, a group lies on t / G neighbours: each convolves its
// part of B and C, which they then gather.
struct MambaShape {
  MambaShape(const TransformerConfig& config, int64_t t);
  int64_t heads, head_size, groups, state;
  int64_t sharing;                                             // ranks that hold one group
  int64_t width() const { return heads * head_size; }          // of x, y, z and o
  int64_t states() const { return groups * state / sharing; }  // of B, and of C, before the gather
  int64_t conv_channels() const { return width() + 2 * states(); }
  int64_t mixed() const { return width() + conv_channels() + heads; }
};

// The parameters but those of the linears, [this rank's part of them].
struct MambaParameters {
  MambaParameters(const TransformerConfig& config, int64_t t);
  Parameter conv_weight;        // [conv_channels, 1, K]
  Parameter conv_bias;          // [conv_channels]
  Parameter dt_bias, A_log, D;  // [heads]
  Parameter norm;               // [width]
};

class MambaCore {
 public:
  MambaCore(const TransformerConfig& config, const ParallelGroups& groups);

  //   mixed   [s, b, MambaShape::mixed()], s local rows under context parallelism
  //
  // Differentiable. Communication: with more ranks than groups an all-gather of B and C over the
  // ranks of a group, one of sums of the norm, and the backward's; under context parallelism two
  // all-gathers, of rows and of states, and two in the backward.
  MixerOutput forward(const at::Tensor& mixed, const ForwardContext& pass);
  // The same for rows of several sequences, mixed [t, 1, ...], with what `state` keeps of them.
  at::Tensor decode(const at::Tensor& mixed, RecurrentState& state, const RaggedBatch& batch);
  // The bits of MixerOutput::o, without communication. Not differentiable.
  at::Tensor norm_again(const at::Tensor& mixed, const at::Tensor& y, const at::Tensor& rstd);

  const MambaShape& shape() const { return shape_; }
  MambaParameters parameters;

 private:
  struct Function;
  struct Values;
  struct Operands;
  NormGroups norm_groups() const;
  // B and C of the rank's groups from its convolved part of them, [s, b, 2 states], and the
  // backward.
  at::Tensor gather_groups(const at::Tensor& own) const;
  at::Tensor scatter_groups(const at::Tensor& grad) const;
  ScanOperands operands(const at::Tensor& x, const at::Tensor& bc, const at::Tensor& dt,
                        const Values& values) const;
  // Of each own segment: the state before it, and the gradient of the state after it.
  std::vector<at::Tensor> incoming_states(const Segments& segments,
                                          const ScanOperands& whole) const;
  std::vector<at::Tensor> state_grads(const Segments& segments, const ScanOperands& whole,
                                      const at::Tensor& dy) const;

  const ParallelGroups& groups_;
  const MambaShape shape_;
  const TimeStepLimits limits_;
  const int64_t chunk_;  // rows of a chunk of the scan
  const double eps_;
  const ProcessGroup& sharing_;  // the ranks that hold one group
};

}  // namespace megatron
