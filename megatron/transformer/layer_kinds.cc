#include "megatron/transformer/layer_kinds.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/transformer/attention/attention_cost.h"
#include "megatron/transformer/branch_layer.h"
#include "megatron/transformer/feed_forward/mlp.h"
#include "megatron/transformer/feed_forward/mlp_cost.h"
#include "megatron/transformer/moe/moe_cost.h"
#include "megatron/transformer/moe/moe_layer.h"
#include "megatron/transformer/ssm/gated_delta_net.h"
#include "megatron/transformer/ssm/gated_delta_net_cost.h"
#include "megatron/transformer/ssm/mamba_mixer.h"
#include "megatron/transformer/ssm/mamba_mixer_cost.h"
#include "megatron/transformer/transformer_layer.h"
#include "megatron/transformer/transformer_layer_cost.h"

namespace megatron {
namespace {

template <class Kind>
std::unique_ptr<FeedForward> make_feed_forward(const TransformerConfig& config,
                                               int64_t layer_number, bool sequence_parallel,
                                               const ParallelGroups& groups) {
  return std::make_unique<Kind>(config, layer_number, sequence_parallel, groups);
}

// Attention and then this kind of feed-forward sublayer.
template <class Kind>
std::unique_ptr<Layer> attention_and(const TransformerConfig& config, int64_t layer_number,
                                     bool sequence_parallel, const ParallelGroups& groups) {
  return std::make_unique<TransformerLayer>(config, layer_number, sequence_parallel, groups,
                                            make_feed_forward<Kind>);
}

// The same with cross attention between them.
template <class Kind, TransformerLayer::Cross cross>
std::unique_ptr<Layer> cross_attention_and(const TransformerConfig& config, int64_t layer_number,
                                           bool sequence_parallel, const ParallelGroups& groups) {
  return std::make_unique<TransformerLayer>(config, layer_number, sequence_parallel, groups,
                                            make_feed_forward<Kind>, cross);
}

// -- layers of one residual connection, the letters of --hybrid-layer-pattern

std::unique_ptr<Layer> attention_alone(const TransformerConfig& config, int64_t layer_number,
                                       bool sequence_parallel, const ParallelGroups& groups) {
  return std::make_unique<BranchLayer>(
      config, layer_number, sequence_parallel,
      make_attention(config, layer_number, sequence_parallel, groups),
      BranchNames{"self_attention", "input_layernorm", "attention_output_dropout"});
}

// A mixer of tokens with a state, whose linear contains the norm of its input.
template <class Mixer>
std::unique_ptr<Layer> recurrent(const TransformerConfig& config, int64_t layer_number,
                                 bool sequence_parallel, const ParallelGroups& groups,
                                 const BranchNames& names) {
  return std::make_unique<BranchLayer>(
      config, layer_number, sequence_parallel,
      std::make_unique<Mixer>(config, layer_number, sequence_parallel, groups), names);
}

std::unique_ptr<Layer> mamba(const TransformerConfig& config, int64_t layer_number,
                             bool sequence_parallel, const ParallelGroups& groups) {
  return recurrent<MambaMixer>(config, layer_number, sequence_parallel, groups,
                               {"mixer", {}, "mamba_output_dropout", {.recomputed = "mamba"}});
}

std::unique_ptr<Layer> gated_delta(const TransformerConfig& config, int64_t layer_number,
                                   bool sequence_parallel, const ParallelGroups& groups) {
  return recurrent<GatedDeltaNet>(config, layer_number, sequence_parallel, groups,
                                  {"self_attention", {}, "gated_delta_output_dropout"});
}

template <class Kind>
std::unique_ptr<Layer> feed_forward_alone(const TransformerConfig& config, int64_t layer_number,
                                          bool sequence_parallel, const ParallelGroups& groups) {
  auto sublayer = std::make_unique<Kind>(config, layer_number, sequence_parallel, groups);
  const BranchNames names = {"mlp", "pre_mlp_layernorm", "mlp_output_dropout", sublayer->names()};
  return std::make_unique<BranchLayer>(config, layer_number, sequence_parallel, std::move(sublayer),
                                       names);
}

constexpr LayerKind kLayerKinds[] = {
    {"*-", "attention and MLP", attention_and<MLP>, transformer_layer_cost},
    {"*x-", "attention, cross attention and MLP",
     cross_attention_and<MLP, TransformerLayer::Cross::kEncoded>, cross_attention_layer_cost},
    {"*r-", "attention, chunked cross attention and MLP",
     cross_attention_and<MLP, TransformerLayer::Cross::kRetrieved>, cross_attention_layer_cost},
    {"*E", "attention and experts", attention_and<MoELayer>, moe_layer_cost, moe_losses},
    {"*", "attention", attention_alone, one_branch<attention_cost>},
    {"+", "latent attention", attention_alone, one_branch<attention_cost>},
    {"G", "gated delta net", gated_delta, one_branch<gated_delta_net_cost>},
    {"M", "Mamba-2", mamba, one_branch<mamba_mixer_cost>},
    {"-", "MLP", feed_forward_alone<MLP>, one_branch<mlp_cost>},
    {"E", "experts", feed_forward_alone<MoELayer>, one_branch<experts_cost>, moe_losses},
};

}  // namespace

const LayerKind& find_layer_kind(std::string_view letters) {
  for (const LayerKind& kind : kLayerKinds)
    if (kind.letters == letters) return kind;
  const auto text = [](const LayerKind& kind) { return cat(kind.letters, " (", kind.name, ")"); };
  throw Error(cat("a layer of kind ", letters,
                  " is unknown\nhint: known kinds: ", listed(kLayerKinds, text)));
}

std::unique_ptr<Layer> make_layer(const TransformerConfig& config, int64_t layer_number,
                                  bool sequence_parallel, const ParallelGroups& groups) {
  return find_layer_kind(config.layer_letters(layer_number))
      .make(config, layer_number, sequence_parallel, groups);
}

std::vector<std::string> auxiliary_losses(const TransformerConfig& config) {
  std::vector<std::string> names;
  for (int64_t layer = 1; layer <= config.num_layers + config.mtp_distinct_layers(); ++layer) {
    // Depths of multi-token prediction have the kind of the last layer.
    const LayerKind& kind =
        find_layer_kind(config.layer_letters(std::min(layer, config.num_layers)));
    if (kind.auxiliary_losses == nullptr) continue;
    for (std::string& name : kind.auxiliary_losses(config, layer))
      if (std::find(names.begin(), names.end(), name) == names.end())
        names.push_back(std::move(name));
  }
  return names;
}

LayerCost layer_cost(const TransformerConfig& config, int64_t layer_number, const LayerShape& shape,
                     bool offloaded) {
  return find_layer_kind(config.layer_letters(layer_number))
      .cost(config, layer_number, shape, offloaded);
}

}  // namespace megatron
