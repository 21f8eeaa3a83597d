// A layer of one residual connection: x + dropout(sublayer(norm(x))). One letter of Megatron's
// --hybrid-layer-pattern.
#pragma once

#include <memory>
#include <string_view>

#include "megatron/transformer/layer/sublayer.h"

namespace megatron {

struct BranchNames {
  std::string_view sublayer;    // of its parameters
  std::string_view input_norm;  // of the norm of its input, where no linear contains it
  std::string_view dropout;     // of the dropout of its output, in random keys
  SublayerNames whole = {};
};

// Parameters: NAME..., and the norm of its input where the sublayer has one.
class BranchLayer : public Layer {
 public:
  BranchLayer(const TransformerConfig& config, int64_t layer_number, bool sequence_parallel,
              std::unique_ptr<Sublayer> sublayer, const BranchNames& names);
  at::Tensor forward(const at::Tensor& x, const LayerContext& context) override;
  std::unique_ptr<LayerState> make_state() const override { return sublayer_->make_state(); }

 private:
  std::unique_ptr<Sublayer> sublayer_;
  ResidualSublayer branch_;
};

}  // namespace megatron
