#include "megatron/transformer/layer_kinds.h"

#include "megatron/base/check.h"
#include "megatron/transformer/feed_forward/mlp.h"
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

constexpr LayerKind kLayerKinds[] = {
    {"*-", "attention and MLP", attention_and<MLP>, transformer_layer_cost},
};

}  // namespace

const LayerKind& find_layer_kind(std::string_view letters) {
  std::string known;
  for (const LayerKind& kind : kLayerKinds) {
    if (kind.letters == letters) return kind;
    known += cat(known.empty() ? "" : ", ", kind.letters, " (", kind.name, ")");
  }
  throw Error(cat("a layer of kind ", letters, " is unknown\nhint: known kinds: ", known));
}

std::unique_ptr<Layer> make_layer(const TransformerConfig& config, int64_t layer_number,
                                  bool sequence_parallel, const ParallelGroups& groups) {
  return find_layer_kind(config.layer_letters(layer_number))
      .make(config, layer_number, sequence_parallel, groups);
}

LayerCost layer_cost(const TransformerConfig& config, int64_t layer_number, const LayerShape& shape,
                     bool offloaded) {
  return find_layer_kind(config.layer_letters(layer_number))
      .cost(config, layer_number, shape, offloaded);
}

}  // namespace megatron
