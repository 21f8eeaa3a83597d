#include "megatron/transformer/branch_layer.h"

#include "megatron/base/check.h"

namespace megatron {

BranchLayer::BranchLayer(const TransformerConfig& config, int64_t layer_number,
                         bool sequence_parallel, std::unique_ptr<Sublayer> sublayer,
                         const BranchNames& names)
    : Layer(layer_number),
      sublayer_(std::move(sublayer)),
      branch_(config, *sublayer_,
              random_key(config.seed, names.dropout, config.draw_number(layer_number)),
              sequence_parallel, names.whole) {
  MEGATRON_ASSERT(!config.has_post_norm(), "a norm on the output of a layer of one branch");
  if (Norm* norm = sublayer_->input_norm()) add(std::string(names.input_norm), norm);
  add(std::string(names.sublayer), sublayer_.get());
}

at::Tensor BranchLayer::forward(const at::Tensor& x, const LayerContext& context) {
  return branch_.forward(x, context);
}

}  // namespace megatron
