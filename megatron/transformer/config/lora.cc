#include "megatron/transformer/config/lora.h"

#include <algorithm>
#include <array>

#include "megatron/base/check.h"
#include "megatron/transformer/config/lora_modules.h"
#include "megatron/transformer/config/transformer_config.h"

namespace megatron {
namespace {

// The models that have a linear.
enum class Where {
  kAttention,
  kPlainAttention,
  kLatentAttention,
  kLatentQueries,
  kPlainQueries,
  kMlp,
  kStates
};

using ModuleNames = std::array<std::string_view, 3>;  // the rest is empty

struct Target {
  std::string_view name;
  ModuleNames huggingface;  // empty: no name common to all families
  std::string_view linear;
  Where where;
  bool is_named(std::string_view given) const {
    return given == name || (!given.empty() && std::find(huggingface.begin(), huggingface.end(),
                                                         given) != huggingface.end());
  }
};

constexpr Target kTargets[] = {
    {"linear_qkv", {}, "linear_qkv", Where::kPlainAttention},
    {"linear_q", {"q_proj", "query", "q"}, "linear_qkv", Where::kPlainAttention},
    {"linear_k", {"k_proj", "key", "k"}, "linear_qkv", Where::kPlainAttention},
    {"linear_v", {"v_proj", "value", "v"}, "linear_qkv", Where::kPlainAttention},
    {"linear_q_proj", {"q_proj"}, "linear_q_proj", Where::kPlainQueries},
    {"linear_q_down_proj", {"q_a_proj"}, "linear_q_down_proj", Where::kLatentQueries},
    {"linear_q_up_proj", {"q_b_proj"}, "linear_q_up_proj", Where::kLatentQueries},
    {"linear_kv_down_proj", {"kv_a_proj_with_mqa"}, "linear_kv_down_proj", Where::kLatentAttention},
    {"linear_kv_up_proj", {"kv_b_proj"}, "linear_kv_up_proj", Where::kLatentAttention},
    {"linear_proj", {"o_proj", "o"}, "linear_proj", Where::kAttention},
    {"linear_fc1", {"wi"}, "linear_fc1", Where::kMlp},
    {"linear_fc1_gate", {"gate_proj", "wi_0"}, "linear_fc1", Where::kMlp},
    {"linear_fc1_up", {"up_proj", "wi_1"}, "linear_fc1", Where::kMlp},
    {"linear_fc2", {"down_proj", "wo"}, "linear_fc2", Where::kMlp},
    {"in_proj", {"in_proj"}, "in_proj", Where::kStates},
    {"out_proj", {"out_proj"}, "out_proj", Where::kStates},
};

constexpr std::string_view kAll = "all-linear";

bool contains(const std::vector<std::string>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool is_part(const Target& target) { return target.name != target.linear; }

bool has_linear(const AdaptableLinears& model, Where where) {
  switch (where) {
    case Where::kAttention:
      return model.attention;
    case Where::kPlainAttention:
      return model.attention && !model.latent_attention;
    case Where::kLatentAttention:
      return model.latent_attention;
    case Where::kLatentQueries:
      return model.latent_attention && model.latent_queries;
    case Where::kPlainQueries:
      return model.latent_attention && !model.latent_queries;
    case Where::kStates:
      return model.states;
    case Where::kMlp:
      return model.mlp;
  }
  return true;
}

// Why a model has no linear of that kind.
std::string_view why_absent(Where where, const AdaptableLinears& model) {
  switch (where) {
    case Where::kAttention:
    case Where::kPlainAttention:
      return model.attention ? "attention is latent in this model" : "this model has no attention";
    case Where::kStates:
      return "this model has neither Mamba-2 layers nor gated delta nets";
    case Where::kLatentAttention:
      return "this model has no latent attention";
    case Where::kLatentQueries:
      return "this model has no latents of queries";
    case Where::kPlainQueries:
      return "this model has no linear of queries alone";
    case Where::kMlp:
      if (model.states) return "this model has neither MLPs nor shared experts";
      return "every layer of this model has routed experts, for which adapters are not built";
  }
  return "";
}

// Whether all-linear includes the target.
bool is_default(const Target& target, bool gated) {
  if (target.linear == "linear_qkv") return is_part(target);
  return target.linear != "linear_fc1" || is_part(target) == gated;
}

}  // namespace

void LoraConfig::fields(FieldVisitor& v) {
  v.role(FieldRole::kNumerics);
  v.group("adapters");
  v.field("lora_rank", lora_rank,
          "train low-rank adapters (LoRA) of this rank in place of the weights; 0: no adapters");
  v.field("lora_alpha", lora_alpha,
          "what adapters add is multiplied by this over the rank; none: the rank");
  v.field("lora_targets", lora_targets,
          "linears with adapters: linear_q, linear_k, linear_v, linear_proj, linear_fc1_gate, "
          "linear_fc1_up, linear_fc2 "
          "(q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj mean the same, and so do "
          "query, key, value of BERTs and q, k, v, o, wi_0, wi_1, wo, wi of T5s), "
          "linear_qkv and linear_fc1 (one adapter for all rows), of latent attention "
          "linear_q_proj, linear_q_down_proj, linear_q_up_proj, linear_kv_down_proj, "
          "linear_kv_up_proj, of Mamba-2 layers and gated delta nets in_proj, out_proj; empty or "
          "all-linear: each part of every linear but routers and "
          "routed experts; of models that see or hear these are of the language model, and others "
          "begin with their module: vision_model.linear_q, vision_projection.linear_fc1, "
          "audio_model.all-linear");
}

void LoraConfig::validate(Violations& v, const ShapeConfig&) const {
  v.require(lora_rank >= 0, cat("--lora-rank ", lora_rank, " is negative"), "0: none");
  v.require(lora_rank > 0 || (!lora_alpha && lora_targets.empty()),
            "--lora-alpha and --lora-targets have an effect only with --lora-rank");
  v.require(lora_rank <= 0 || !lora_alpha || *lora_alpha > 0,
            cat("--lora-alpha ", lora_alpha.value_or(0), " must be positive"));
}

AdaptableLinears adaptable_linears(const TransformerConfig& config) {
  AdaptableLinears linears;
  linears.gated = is_gated(config.activation());
  linears.latent_attention = config.multi_latent_attention;
  linears.latent_queries = config.q_lora_rank.has_value();
  linears.mlp = config.num_moe_layers(config.num_layers) < config.num_layers ||
                config.moe_shared_expert_intermediate_size.has_value();
  if (config.is_hybrid()) {
    linears.mlp = config.has_letter('-') || config.moe_shared_expert_intermediate_size.has_value();
    linears.attention = config.attends();
    linears.states = config.has_letter('M') || config.has_letter('G');
  }
  return linears;
}

std::vector<std::string> written_out_lora_targets(const std::vector<std::string>& given,
                                                  const AdaptableLinears& model) {
  const bool all = given.empty() || contains(given, kAll);
  std::vector<std::string> out;
  const auto is_given = [&](const Target& target) {
    return std::any_of(given.begin(), given.end(),
                       [&](const std::string& name) { return target.is_named(name); });
  };
  for (const Target& target : kTargets)
    if (has_linear(model, target.where) &&
        ((all && is_default(target, model.gated)) || is_given(target)))
      out.emplace_back(target.name);
  for (const std::string& name : given) {
    const bool known =
        name == kAll ||
        std::any_of(std::begin(kTargets), std::end(kTargets), [&](const Target& target) {
          return has_linear(model, target.where) && target.is_named(name);
        });
    if (!known) out.push_back(name);
  }
  return out;
}

void validate_lora_targets(const std::vector<std::string>& targets, const AdaptableLinears& model,
                           Violations& violations) {
  for (const std::string& name : targets) {
    if (names_module(name)) continue;
    const auto is_named = [&](const Target& t) { return t.is_named(name); };
    const auto* target =
        std::find_if(std::begin(kTargets), std::end(kTargets),
                     [&](const Target& t) { return t.name == name && has_linear(model, t.where); });
    if (target == std::end(kTargets)) {
      const auto* absent = std::find_if(std::begin(kTargets), std::end(kTargets), is_named);
      violations.add(absent == std::end(kTargets)
                         ? cat("--lora-targets ", name, " is not known")
                         : cat("--lora-targets ", name, ": ", why_absent(absent->where, model)),
                     "targets: linear_q, linear_k, linear_v, linear_proj, linear_fc1_gate, "
                     "linear_fc1_up, linear_fc2, linear_qkv, linear_fc1, q_proj, k_proj, v_proj, "
                     "o_proj, gate_proj, up_proj, down_proj, query, key, value, q, k, v, o, wi, "
                     "wi_0, wi_1, wo, all-linear; of latent attention "
                     "linear_q_proj, linear_q_down_proj, linear_q_up_proj, linear_kv_down_proj, "
                     "linear_kv_up_proj; of Mamba-2 layers and gated delta nets in_proj, out_proj; "
                     "the modules dense of a BERT are linear_proj, linear_fc1 and linear_fc2");
      continue;
    }
    if (is_part(*target) && contains(targets, target->linear))
      violations.add(
          cat("--lora-targets ", target->linear, " and ", name, " would adapt the same rows"),
          "give one of them");
    if (is_part(*target) && target->linear == "linear_fc1" && !model.gated)
      violations.add(cat("--lora-targets ", name, ": the MLP of this model is not gated"),
                     "linear_fc1");
  }
}

namespace {

// Those of linear_q and linear_kv of cross attention, for which the targets are those of linear_qkv
// of self-attention.
std::vector<std::string> cross_adapters(const std::vector<std::string>& targets,
                                        std::string_view linear) {
  if (contains(targets, "linear_qkv")) return {std::string(linear)};
  std::vector<std::string> names;
  for (const std::string_view part : {"linear_q", "linear_k", "linear_v"})
    if ((part == "linear_q") == (linear == "linear_q") && contains(targets, part))
      names.emplace_back(part);
  return names;
}

}  // namespace

std::vector<std::string> lora_adapters(const TransformerConfig& config, std::string_view linear) {
  std::vector<std::string> names;
  if (config.lora_rank <= 0) return names;
  if (linear == "linear_q" || linear == "linear_kv")
    return cross_adapters(config.lora_targets, linear);
  for (const Target& target : kTargets)
    if (target.linear == linear && contains(config.lora_targets, target.name))
      names.emplace_back(target.name);
  return names;
}

LoraOptions lora_options(const TransformerConfig& config, std::string_view linear) {
  LoraOptions options;
  const std::vector<std::string> adapters = lora_adapters(config, linear);
  if (adapters.empty()) return options;
  options.rank = config.lora_rank;
  options.scale = config.lora_alpha.value_or(static_cast<double>(config.lora_rank)) /
                  static_cast<double>(config.lora_rank);
  options.adapters = static_cast<int>(adapters.size());
  if (adapters.front() == linear) return options;
  const auto number_of = [&](std::string_view name) {
    const auto found = std::find(adapters.begin(), adapters.end(), name);
    return static_cast<int8_t>(found == adapters.end() ? -1 : found - adapters.begin());
  };
  const auto add = [&](std::string_view name, int64_t rows) {
    options.adapter_of_row.insert(options.adapter_of_row.end(), static_cast<size_t>(rows),
                                  number_of(name));
  };
  if (linear == "linear_fc1") {
    add("linear_fc1_gate", config.ffn_hidden_size);
    add("linear_fc1_up", config.ffn_hidden_size);
    return options;
  }
  const int64_t d = config.kv_channels;
  if (linear == "linear_kv") {
    for (int64_t head = 0; head < config.num_attention_heads; ++head) {
      add("linear_k", d);
      add("linear_v", d);
    }
    return options;
  }
  // With gates of the output, queries and their gates are the rows of q_proj.
  const int64_t groups = config.query_groups(), of_head = config.attention_output_gate ? 2 : 1;
  for (int64_t group = 0; group < groups; ++group) {
    add("linear_q", config.num_attention_heads / groups * of_head * d);
    add("linear_k", d);
    add("linear_v", d);
  }
  return options;
}

bool names_module(std::string_view target) { return target.find('.') != target.npos; }

void take_adapters(const LoraConfig& from, std::string_view module, LoraConfig& part) {
  part.lora_targets.clear();
  for (const std::string& target : from.lora_targets)
    if (target.starts_with(module)) part.lora_targets.push_back(target.substr(module.size()));
  part.lora_rank = part.lora_targets.empty() ? 0 : from.lora_rank;
  part.lora_alpha = from.lora_alpha;
}

bool is_lora_parameter(std::string_view name) {
  return name.ends_with(kLoraA) || name.ends_with(kLoraB);
}

}  // namespace megatron
