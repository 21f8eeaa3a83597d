// Recomputation and offloading of saved activations, around what layers compute: a layer's own
// forward is the mathematics.
#pragma once

#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "megatron/nn/recompute.h"
#include "megatron/transformer/config/transformer_config.h"
#include "megatron/transformer/layer/layer.h"

namespace megatron {

class ProcessGroup;

// What the flags call a sublayer as a whole.
struct SublayerNames {
  std::string_view recomputed;  // in --recompute-modules; empty: never recomputed as a whole
  std::string_view input;       // its input in --offload-modules
  bool joined = false;          // offloaded in one group with the sublayer before it
};

// Runs in the forward, and with recomputation again in the backward: a pure function of x,
// parameters and positions.
using SublayerFunction = std::function<at::Tensor(const at::Tensor& x, const LayerContext&)>;

// sublayer(x) as the unit of offloading. With a tape in the context and `names.recomputed` among
// --recompute-modules, only x is saved, in host memory if --offload-modules names it.
at::Tensor run_sublayer(const TransformerConfig& config, const SublayerNames& names,
                        const at::Tensor& x, const LayerContext& context,
                        const SublayerFunction& sublayer);

// Runs the layers of one chunk of the model in order. With a tape in the context and full
// recomputation, units of layers are recomputed in the backward; with
// --distribute-saved-activations each tensor-parallel rank keeps 1/t of their saved inputs.
// Keeps references to config and group, which must outlive it.
class LayerRunner {
 public:
  // `last_chunk`: the last layer is the last one of the model.
  LayerRunner(const TransformerConfig& config, const ProcessGroup& tp, bool last_chunk)
      : config_(config), tp_(tp), last_chunk_(last_chunk) {}

  //   x, return   as for Layer::forward. The layers must outlive the backward.
  at::Tensor run(const std::vector<std::unique_ptr<Layer>>& layers, at::Tensor x,
                 const LayerContext& context) const;

 private:
  // How many layers full recomputation covers, from the first, and how many are one unit of it.
  size_t num_recomputed(size_t num_layers) const;
  size_t unit_layers() const;
  // How the input of a recomputed unit is kept until the backward.
  RecomputeTape::Keeper input_keeper(const ForwardContext& pass, bool offloaded) const;

  const TransformerConfig& config_;
  const ProcessGroup& tp_;
  bool last_chunk_;
};

}  // namespace megatron
