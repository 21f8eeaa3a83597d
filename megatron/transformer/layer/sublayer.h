// A sublayer, such as attention or the MLP, and the residual connection around it.
#pragma once

#include <memory>

#include "megatron/nn/norm.h"
#include "megatron/tensor_parallel/layers.h"
#include "megatron/transformer/config/transformer_config.h"
#include "megatron/transformer/layer/layer.h"
#include "megatron/transformer/layer/layer_runner.h"

namespace megatron {

// Of a norm of the residual stream. `partial_over_tensor`: as NormOptions has it.
NormOptions norm_options(const TransformerConfig& config, bool partial_over_tensor = false);

// The function of one residual connection, with its own input norm.
class Sublayer : public Module {
 public:
  //   x   [s, b, h]   (s/t with sequence parallelism)
  //
  // Returns {output, residual}, both shaped as x; with `add` {output + residual, undefined}. Saved
  // activations that --offload-modules names go to context.offload().
  virtual SublayerOutput forward(const at::Tensor& x, const LayerContext& context, bool add) = 0;
  // The norm of its input, for the layer to register; null: a linear contains it, or there is none.
  virtual Norm* input_norm() { return nullptr; }
  // As Layer::make_state.
  virtual std::unique_ptr<LayerState> make_state() const { return nullptr; }
};

// x + dropout(m sublayer(x)), or x + dropout(m norm(sublayer(x))) with norms on the output of
// sublayers (--norm-placement post, sandwich), m being --residual-multiplier or, with
// LayerConfig::branch_scales, a vector [h]. Keeps references to
// config and sublayer, which must outlive it.
class ResidualSublayer {
 public:
  // `names`: what recomputation and offloading of the whole are called.
  ResidualSublayer(const TransformerConfig& config, Sublayer& sublayer, RandomKey dropout_key,
                   bool sequence_parallel, const SublayerNames& names);
  at::Tensor forward(const at::Tensor& x, const LayerContext& context);
  // Only the last step of forward(): residual + dropout(norm(output)). If the residual is
  // undefined, the output already contains it.
  at::Tensor add_residual(const SublayerOutput& result, const ForwardContext& pass);
  // The norm on the output, for the layer to register; null: none.
  Norm* post_norm() const { return post_norm_.get(); }
  // The vector of a branch, for the layer to register; null: none.
  Parameter* scale() const { return scale_.get(); }

 private:
  // Whether the last GEMM of the sublayer adds the residual itself: true if neither dropout nor a
  // norm comes in between.
  bool adds_in_product(const ForwardContext& pass) const;

  const TransformerConfig& config_;
  Sublayer& sublayer_;
  RandomKey dropout_key_;
  SublayerNames names_;
  std::unique_ptr<Norm> post_norm_;
  std::unique_ptr<Parameter> scale_;
};

}  // namespace megatron
