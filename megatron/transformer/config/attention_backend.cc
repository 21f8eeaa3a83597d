#include "megatron/transformer/config/attention_backend.h"

#include <algorithm>
#include <optional>

#include "megatron/base/check.h"
#include "megatron/tensor/batch_invariant/mode.h"

namespace megatron {
namespace {

constexpr std::string_view kBackends[] = {"auto", "flash", "fused", "unfused", "local"};
constexpr std::string_view kContextParallelTypes[] = {"p2p", "all_gather", "a2a", "a2a+p2p"};

std::optional<ContextParallelType> parse_context_parallel_type(const std::string& text) {
  const auto* found =
      std::find(std::begin(kContextParallelTypes), std::end(kContextParallelTypes), text);
  if (found == std::end(kContextParallelTypes)) return std::nullopt;
  return static_cast<ContextParallelType>(found - std::begin(kContextParallelTypes));
}

}  // namespace

void AttentionBackendConfig::fields(FieldVisitor& v) {
  v.role(FieldRole::kMachine);
  v.list_after("cross_entropy_chunk_tokens");
  v.field("fast", fast,
          "faster kernels whose bits differ from run to run: the backward of cuDNN's attention");
  v.field("batch_invariant_mode", batch_invariant_mode, kBatchInvariantHelp);
  v.choice("attention_backend", attention_backend, kBackends,
           "implementation of core attention; fused is cuDNN");
  v.group("attention and recomputation");
  v.field(
      "cp_comm_type", cp_comm_type,
      "how the ranks of a sequence exchange keys and values: p2p, all_gather, a2a or a2a+p2p, for "
      "all layers or for each; nothing to exchange at one context-parallel rank");
}

void AttentionBackendConfig::validate(Violations& v, const ShapeConfig& shape) const {
  v.require(
      cp_comm_type.size() == 1 || static_cast<int64_t>(cp_comm_type.size()) == shape.num_layers,
      cat("--cp-comm-type has ", cp_comm_type.size(), " values, expected 1 or one per layer, ",
          shape.num_layers));
  for (const std::string& type : cp_comm_type)
    v.require(parse_context_parallel_type(type).has_value(),
              cat("--cp-comm-type ", type, " is not known"),
              "types: p2p, all_gather, a2a, a2a+p2p");
}

ContextParallelType AttentionBackendConfig::context_parallel_type(int64_t layer_number) const {
  // validate() reports lists of another length.
  const auto place = static_cast<size_t>(layer_number - 1);
  const size_t index = place < cp_comm_type.size() ? place : 0;
  const auto type = parse_context_parallel_type(cp_comm_type.at(index));
  MEGATRON_CHECK(type.has_value(), "--cp-comm-type ", cp_comm_type[index], " is not known",
                 "\nhint: types: p2p, all_gather, a2a, a2a+p2p");
  return *type;
}

}  // namespace megatron
