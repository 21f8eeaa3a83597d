#include "megatron/transformer/layer/layer_runner.h"

#include <algorithm>

#include "megatron/nn/activation_offload.h"
#include "megatron/tensor/torch.h"
#include "megatron/tensor_parallel/mappings.h"

namespace megatron {
namespace {

using Layers = std::vector<std::unique_ptr<Layer>>;

// body(x, context) on the tape, which runs it again after the forward has returned: the body owns
// its context. What the second run saves is used at once and therefore not offloaded.
template <class Body>
at::Tensor run_recomputed(const Body& body, const at::Tensor& x, const LayerContext& context,
                          const RecomputeTape::Keeper& keeper) {
  ForwardContext again = context.pass;
  again.offload = nullptr;
  return context.pass.tape->run(
      [body, again, rotary = context.rotary](const at::Tensor& in) {
        return body(in, LayerContext{again, rotary});
      },
      x, keeper);
}

// Runs layers [first, last); activations of layers before `offloaded` go to host memory.
at::Tensor run_layers(const Layers& layers, size_t first, size_t last, size_t offloaded,
                      at::Tensor x, LayerContext context) {
  const DecodingPass* decoding = context.pass.decoding;
  for (size_t i = first; i < last; ++i) {
    context.offloaded = i < offloaded;
    if (decoding != nullptr) context.state = decoding->state.of(*layers[i]);
    x = layers[i]->forward(x, context);
  }
  return x;
}

}  // namespace

at::Tensor run_sublayer(const TransformerConfig& config, const SublayerNames& names,
                        const at::Tensor& x, const LayerContext& context,
                        const SublayerFunction& sublayer) {
  const ForwardContext& pass = context.pass;
  if (pass.offload != nullptr && !names.joined) pass.offload->begin_group();
  if (pass.tape == nullptr || !config.recomputes(names.recomputed)) return sublayer(x, context);
  RecomputeTape::Keeper keeper;
  if (OffloadedPass* offload = context.offload();
      offload != nullptr && config.offloads(names.input))
    keeper = [offload](const at::Tensor& in) { return offload->keep(in); };
  return run_recomputed(sublayer, x, context, keeper);
}

at::Tensor LayerRunner::run(const Layers& layers, at::Tensor x, const LayerContext& context) const {
  const auto offloaded = static_cast<size_t>(
      config_.num_offloaded_layers(static_cast<int64_t>(layers.size()), last_chunk_));
  const size_t recomputed = context.pass.tape != nullptr ? num_recomputed(layers.size()) : 0;
  size_t first = 0;
  while (first < recomputed) {
    const size_t last = std::min(first + unit_layers(), recomputed);
    x = run_recomputed(
        [&layers, first, last](const at::Tensor& in, const LayerContext& again) {
          return run_layers(layers, first, last, 0, in, again);
        },
        x, context, input_keeper(context.pass, last <= offloaded));
    first = last;
  }
  return run_layers(layers, first, layers.size(), offloaded, std::move(x), context);
}

size_t LayerRunner::num_recomputed(size_t num_layers) const {
  if (config_.recompute_granularity != RecomputeGranularity::kFull) return 0;
  if (config_.recompute_method == RecomputeMethod::kUniform) return num_layers;
  return std::min(num_layers, static_cast<size_t>(config_.recompute_num_layers));
}

size_t LayerRunner::unit_layers() const {
  return config_.recompute_method == RecomputeMethod::kUniform
             ? static_cast<size_t>(config_.recompute_num_layers)
             : 1;
}

RecomputeTape::Keeper LayerRunner::input_keeper(const ForwardContext& pass, bool offloaded) const {
  if (config_.distribute_saved_activations)
    return [this](const at::Tensor& in) { return distribute_saved_activation(in, tp_); };
  if (pass.offload == nullptr) return {};
  return [&pass, offloaded](const at::Tensor& in) -> std::function<at::Tensor()> {
    pass.offload->begin_group();
    return offloaded ? pass.offload->keep(in) : [in] { return in; };
  };
}

}  // namespace megatron
