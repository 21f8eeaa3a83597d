#include "megatron/interop/torch_dist/torch_dist_arguments.h"

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/dist_checkpointing/foreign/torch_dist.h"
#include "megatron/models/model_table.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;
using Kind = PickleValue::Kind;

// Arguments of Megatron-LM that define the model, in the order in which they are written; with our
// name behind it where that is another one.
constexpr std::string_view kArguments =
    "num_layers hidden_size ffn_hidden_size num_attention_heads group_query_attention "
    "num_query_groups kv_channels seq_length max_position_embeddings "
    "untie_embeddings_and_output_weights position_embedding_type use_rotary_position_embeddings "
    "add_position_embedding rotary_base rotary_percent rotary_interleaved "
    "rotary_seq_len_interpolation_factor use_rope_scaling rope_scaling_factor normalization "
    "norm_epsilon=layernorm_epsilon layernorm_epsilon "
    "apply_layernorm_1p=layernorm_zero_centered_gamma layernorm_zero_centered_gamma "
    "add_bias_linear add_qkv_bias qk_layernorm window_size window_attn_skip_freq swiglu "
    "quick_geglu squared_relu openai_gelu bias_gelu_fusion glu_linear_offset hidden_dropout "
    "attention_dropout init_method_std softmax_type activation_func_clamp_value num_experts "
    "multi_latent_attention mtp_num_layers";

// The same, of models with experts, with multi-latent attention, with multi-token prediction, with
// gates of the attention's output, of letters, with Mamba-2, and with gated delta nets.
// Those of other models have values without effect.
constexpr std::string_view kExpertArguments =
    "moe_layer_freq moe_ffn_hidden_size moe_router_topk moe_router_score_function "
    "moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_num_groups "
    "moe_router_group_topk moe_router_enable_expert_bias moe_shared_expert_intermediate_size "
    "moe_shared_expert_gate moe_latent_size moe_apply_probs_on_input moe_router_dtype";
constexpr std::string_view kLatentArguments =
    "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type "
    "rotary_scaling_factor mscale mscale_all_dim";
constexpr std::string_view kFurtherTokenArguments =
    "mtp_use_repeated_layer mtp_loss_scaling_factor";
constexpr std::string_view kOutputGateArguments = "attention_output_gate";
constexpr std::string_view kPatternArguments = "hybrid_layer_pattern";
constexpr std::string_view kOldPattern = "hybrid_override_pattern";
constexpr std::string_view kMambaArguments =
    "mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads";
constexpr std::string_view kDeltaArguments =
    "linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim "
    "linear_conv_kernel_dim";

// Arguments that change the model without changing its tensors (apply_query_key_layer_scaling only
// rounds otherwise), and the value with which they do not; None, false and zero never do.
constexpr std::string_view kNeutral =
    "moe_mlp_glu_interleave_size moe_shared_expert_glu_interleave_size "
    "mtp_hybrid_override_pattern heterogeneous_layers_config_path "
    "heterogeneous_layers_config_encoded_json experimental_attention_variant "
    "apply_residual_connection_post_layernorm qk_l2_norm no_rope_freq "
    "apply_query_key_layer_scaling use_mup "
    "retro_add_retriever";

// "a b=c": {a, ""}, {b, c}.
std::vector<std::pair<std::string, std::string>> pairs_in(std::string_view text) {
  std::vector<std::pair<std::string, std::string>> pairs;
  for (const std::string& word : split(text)) {
    const size_t end = std::min(word.find('='), word.size());
    pairs.emplace_back(word.substr(0, end), word.substr(std::min(end + 1, word.size())));
  }
  return pairs;
}

struct Argument {
  std::string ours, theirs;
};
using ArgumentList = std::vector<Argument>;

struct ModelKind {
  bool experts, latent, further_tokens, output_gate;
  std::string pattern;  // of letters; empty: none
};

// Those that a model of this kind has.
ArgumentList arguments_of_model(const ModelKind& kind) {
  ArgumentList all;
  const auto add = [&](std::string_view names) {
    for (const auto& [theirs, ours] : pairs_in(names))
      all.push_back({ours.empty() ? theirs : ours, theirs});
  };
  add(kArguments);
  const auto has = [&](char letter) { return kind.pattern.find(letter) != std::string::npos; };
  if (kind.experts) add(kExpertArguments);
  if (kind.latent) add(kLatentArguments);
  if (kind.further_tokens) add(kFurtherTokenArguments);
  if (kind.output_gate) add(kOutputGateArguments);
  if (!kind.pattern.empty()) add(kPatternArguments);
  if (has('M')) add(kMambaArguments);
  if (has('G')) add(kDeltaArguments);
  return all;
}

bool is_empty(const PickleValue& value) {
  switch (value.kind) {
    case Kind::kNone:
      return true;
    case Kind::kBool:
    case Kind::kInt:
      return value.integer == 0;
    case Kind::kFloat:
      return value.number == 0.0;
    case Kind::kText:
      return value.text.empty();
    default:
      return value.is_sequence() && value.items.empty();
  }
}

// Fills the fields that are in `args`.
class ArgumentsReader final : public FieldVisitor {
 public:
  ArgumentsReader(const PickleValue& args, const ArgumentList& list, std::string where)
      : args_(args), list_(list), where_(std::move(where)) {}

  void group(std::string_view) override {}
  void visit(FieldName name, FieldRef ref, std::string_view) override {
    std::visit([&](auto* value) { read(name, *value); }, ref);
  }
  void read(FieldName name, bool& value) {
    if (const PickleValue* given = find(name, Kind::kBool)) value = given->integer != 0;
  }
  void read(FieldName name, int64_t& value) {
    if (const PickleValue* given = find(name, Kind::kInt)) value = given->integer;
  }
  void read(FieldName name, double& value) {
    if (const PickleValue* given = find(name, Kind::kFloat)) value = number(*given);
  }
  void read(FieldName name, std::string& value) {
    const PickleValue* given = find(name, Kind::kText);
    if (given == nullptr) return;
    if (given->is(Kind::kText)) value = given->text;
    if (given->is(Kind::kInt)) value = std::to_string(given->integer);
    if (given->is_sequence()) value = format_shape(integers(*given));
  }
  void read(FieldName name, std::optional<int64_t>& value) {
    if (const PickleValue* given = find(name, Kind::kInt)) value = given->integer;
  }
  void read(FieldName name, std::optional<double>& value) {
    if (const PickleValue* given = find(name, Kind::kFloat)) value = number(*given);
  }
  void read(FieldName name, std::vector<int64_t>& value) {
    if (const PickleValue* given = find(name, Kind::kTuple)) value = integers(*given);
  }
  void read(FieldName, std::vector<double>&) {}
  void read(FieldName, std::vector<std::string>&) {}
  void choice(FieldName name, int& index, std::span<const std::string_view> spellings,
              std::string_view) override {
    const PickleValue* given = find(name, Kind::kText);
    if (given == nullptr) return;
    const auto found = std::find(spellings.begin(), spellings.end(), given->text);
    MEGATRON_CHECK(found != spellings.end(), where_, ": ", std::string(name.name), " is \"",
                   given->text, "\", which is not built");
    index = static_cast<int>(found - spellings.begin());
  }

 private:
  static double number(const PickleValue& value) {
    return value.is(Kind::kFloat) ? value.number : static_cast<double>(value.integer);
  }
  std::vector<int64_t> integers(const PickleValue& list) const {
    std::vector<int64_t> out;
    for (const PickleValue* item : list.items) {
      MEGATRON_CHECK(item->is(Kind::kInt), where_, ": a list of numbers holds something else");
      out.push_back(item->integer);
    }
    return out;
  }
  // Null: not given, or None.
  const PickleValue* find(FieldName name, Kind kind) const {
    for (const Argument& argument : list_) {
      if (argument.ours != name.name) continue;
      const PickleValue* given = args_.find(argument.theirs);
      if (given == nullptr || given->is(Kind::kNone)) continue;
      const bool fits =
          given->is(kind) || (kind == Kind::kFloat && given->is(Kind::kInt)) ||
          (kind == Kind::kTuple && given->is(Kind::kList)) ||
          (is_layer_list(name.name) && (given->is(Kind::kInt) || given->is_sequence()));
      MEGATRON_CHECK(fits, where_, ": ", argument.theirs, " is of another type than expected");
      return given;
    }
    return nullptr;
  }

  static bool is_layer_list(std::string_view name) {
    return name == "window_attn_skip_freq" || name == "moe_layer_freq";
  }

  const PickleValue& args_;
  const ArgumentList& list_;
  const std::string where_;
};

// The pattern of letters; empty: none.
std::string pattern_of(const PickleValue& args) {
  for (const std::string_view name : {kPatternArguments, kOldPattern})
    if (const PickleValue* value = args.find(name);
        value != nullptr && value->is(Kind::kText) && !value->text.empty())
      return value->text;
  return "";
}

// `args`, a namespace or a dict; null: none.
const PickleValue* arguments_of(const TorchDistFiles& files) {
  const PickleValue* args = files.common.root().find("args");
  if (args == nullptr) return nullptr;
  if (args->is(Kind::kObject)) args = args->state;
  return args != nullptr && args->is(Kind::kDict) ? args : nullptr;
}

// -- writing

// Writes the fields that Megatron-LM has as entries of `args`.
class ArgumentsWriter final : public FieldVisitor {
 public:
  explicit ArgumentsWriter(const ArgumentList& list) : list_(list), values_(list.size()) {}
  // The entries in the order of the list.
  std::vector<std::pair<std::string, std::string>> entries() const {
    std::vector<std::pair<std::string, std::string>> out;
    for (size_t i = 0; i < values_.size(); ++i)
      if (!values_[i].empty()) out.emplace_back(pickle::text(list_[i].theirs), values_[i]);
    return out;
  }

  void group(std::string_view) override {}
  void visit(FieldName name, FieldRef ref, std::string_view) override {
    std::visit([&](auto* value) { write(name, *value); }, ref);
  }
  void write(FieldName name, bool& value) { put(name, pickle::boolean(value)); }
  void write(FieldName name, int64_t& value) {
    const bool none = value == 0 && (name.name == "num_experts" || name.name == "mtp_num_layers");
    put(name, none ? pickle::none() : pickle::integer(value));
  }
  void write(FieldName name, double& value) { put(name, pickle::number(value)); }
  void write(FieldName name, std::string& value) {
    const auto json = nlohmann::json::parse(value, nullptr, /*allow_exceptions=*/false);
    if (json.is_number_integer()) return put(name, pickle::integer(json.get<int64_t>()));
    if (!json.is_array()) return put(name, value.empty() ? pickle::none() : pickle::text(value));
    std::vector<std::string> items;
    for (const auto& item : json) items.push_back(pickle::integer(item.get<int64_t>()));
    put(name, pickle::list(items));
  }
  void write(FieldName name, std::optional<int64_t>& value) {
    put(name, value ? pickle::integer(*value) : pickle::none());
  }
  void write(FieldName name, std::optional<double>& value) {
    put(name, value ? pickle::number(*value) : pickle::none());
  }
  void write(FieldName name, std::vector<int64_t>& value) {
    if (value.empty()) return put(name, pickle::none());
    std::vector<std::string> items;
    for (const int64_t item : value) items.push_back(pickle::integer(item));
    put(name, pickle::tuple(items));
  }
  void write(FieldName, std::vector<double>&) {}
  void write(FieldName, std::vector<std::string>&) {}
  void choice(FieldName name, int& index, std::span<const std::string_view> spellings,
              std::string_view) override {
    put(name, pickle::text(spellings[static_cast<size_t>(index)]));
  }

 private:
  void put(FieldName name, const std::string& value) {
    for (size_t i = 0; i < values_.size(); ++i)
      if (list_[i].ours == name.name) values_[i] = value;
  }

  const ArgumentList& list_;
  std::vector<std::string> values_;
};

// As Megatron-LM has it: n, or a list of zeros and ones.
std::string listed_layers(const TransformerConfig& t) {
  if (t.moe_layer_freq.find_first_not_of("0123456789") == std::string::npos)
    return t.moe_layer_freq;
  std::vector<int64_t> layers;
  for (int64_t layer = 1; layer <= t.num_layers; ++layer) layers.push_back(t.is_moe_layer(layer));
  return format_shape(layers);
}

using Check = std::function<void(bool condition, const char* what)>;

// Megatron-LM fixes the range of frequencies that YaRN blends in multi-latent attention.
constexpr int64_t kLatentOriginalPositions = 4096;
constexpr double kLatentBetaFast = 32.0, kLatentBetaSlow = 1.0;

void check_latent_attention(const TransformerConfig& t, const Check& check) {
  if (!t.multi_latent_attention) return;
  check(
      !t.qk_layernorm || t.latent_norm_epsilon.value_or(t.layernorm_epsilon) == t.layernorm_epsilon,
      "another epsilon in the norms of latents (latent_norm_epsilon)");
  check(!t.stretches_positions() ||
            (t.rope_original_max_position_embeddings == kLatentOriginalPositions &&
             t.yarn_beta_fast == kLatentBetaFast && t.yarn_beta_slow == kLatentBetaSlow &&
             t.yarn_correction_range_round_to_int),
        "multi-latent attention with other YaRN than from 4096 positions with betas 32 and 1 "
        "(rope_original_max_position_embeddings, yarn_beta_fast, yarn_beta_slow, "
        "yarn_correction_range_round_to_int)");
}

void check_expressible(const TransformerConfig& t) {
  const Check check = [](bool condition, const char* what) {
    MEGATRON_CHECK(condition, "the model has ", what, ", which Megatron-LM's GPT has not");
  };
  check(t.norm_placement == NormPlacement::kPre, "norms after its branches (norm_placement)");
  check(!t.parallel_residual, "a parallel residual (parallel_residual)");
  check(!t.scale_embeddings, "scaled embeddings (scale_embeddings)");
  check(t.embedding_multiplier == 1.0 && t.residual_multiplier == 1.0 && t.logits_scaling == 1.0,
        "multipliers of embeddings, branches or logits (embedding_multiplier, residual_multiplier, "
        "logits_scaling)");
  check(!t.query_pre_attn_scalar, "a scale of queries of its own (query_pre_attn_scalar)");
  check(t.attn_logit_softcapping == 0.0, "soft caps of scores (attn_logit_softcapping)");
  check(t.final_logit_softcapping == 0.0, "soft caps of logits (final_logit_softcapping)");
  check(!t.qk_layernorm_over_heads, "a QK norm over all heads (qk_layernorm_over_heads)");
  check(!t.rotary_base_local, "two rotary bases (rotary_base_local)");
  check(!t.geglu && !t.exact_geglu, "a GELU-gated MLP (geglu, exact_geglu)");
  check(t.norm_bias, "LayerNorms without biases (norm_bias)");
  check(t.first_input_norm, "no norm before the first layer's attention (first_input_norm)");
  const bool llama3 = t.rope_scaling_type == RopeScaling::kLlama3 &&
                      t.rope_low_freq_factor == 1.0 && t.rope_high_freq_factor == 4.0 &&
                      t.rope_original_max_position_embeddings == 8192 && !t.rope_attention_factor;
  check(t.rope_scaling_type == RopeScaling::kNone || llama3,
        "rotary scaling other than that of Llama 3 from 8192 positions (rope_scaling_type)");
  check(t.moe_router_group_score == GroupScore::kSum,
        "groups of experts ranked by their best one (moe_router_group_score)");
  check(!t.moe_latent_size || !t.add_bias_linear,
        "latents of experts projected without the biases of other linears (moe_latent_size)");
  check(t.mamba_dt_limit.empty(), "limits of time steps (mamba_dt_limit)");
  check(t.mamba_norm_epsilon == MambaConfig().mamba_norm_epsilon,
        "another epsilon in the norms of Mamba-2 (mamba_norm_epsilon)");
  check_latent_attention(t, check);
}

}  // namespace

TransformerConfig read_torch_dist_arguments(const fs::path& directory,
                                            const TransformerConfig& otherwise) {
  const TorchDistFiles files = open_torch_dist(directory, [](std::string_view) { return false; });
  TransformerConfig config = otherwise;
  const PickleValue* args = arguments_of(files);
  if (args == nullptr) return config;
  const std::string where = directory.string() + ": args";
  for (const auto& [name, neutral] : pairs_in(kNeutral)) {
    const PickleValue* value = args->find(name);
    MEGATRON_CHECK(
        value == nullptr || is_empty(*value) || (value->is(Kind::kText) && value->text == neutral),
        where, ": ", std::string(name), " is set, which is not built");
  }
  const auto is_set = [&](std::string_view name) {
    const PickleValue* value = args->find(name);
    return value != nullptr && !is_empty(*value);
  };
  const std::string pattern = pattern_of(*args);
  MEGATRON_CHECK(!pattern.empty() || !is_set("is_hybrid_model"), where,
                 ": is_hybrid_model is set without hybrid_layer_pattern, which is not built");
  const ArgumentList list =
      arguments_of_model({is_set("num_experts"), is_set("multi_latent_attention"),
                          is_set("mtp_num_layers"), is_set("attention_output_gate"), pattern});
  ArgumentsReader reader(*args, list, where);
  config.fields(reader);
  if (!pattern.empty()) config.hybrid_layer_pattern = pattern;
  if (config.multi_latent_attention) {
    config.kv_channels = config.query_head_size();  // theirs has no effect
    config.rope_original_max_position_embeddings = kLatentOriginalPositions;
    config.yarn_beta_fast = kLatentBetaFast;
    config.yarn_beta_slow = kLatentBetaSlow;
  }
  const PickleValue* balance = args->find("moe_router_load_balancing_type");
  if (config.has_moe() && balance != nullptr && balance->is(Kind::kText) &&
      balance->text == "sinkhorn")
    config.moe_router_load_balancing_type = {"sinkhorn"};  // it chooses in evaluation, too
  config.finalize();
  Violations violations;
  if (config.is_hybrid()) static_cast<HybridConfig&>(config).validate(violations, config);
  MEGATRON_CHECK(violations.empty(), where, ": ", violations.messages().front());
  return config;
}

std::string pickled_arguments(const ModelConfig& config, DType dtype) {
  TransformerConfig transformer = config.transformer;
  MEGATRON_CHECK(config.type == ModelConfig().type, "a model of type ", config.type,
                 " cannot be written in Megatron-LM's format, which is built for ",
                 ModelConfig().type);
  check_expressible(transformer);
  transformer.use_rope_scaling = transformer.rope_scaling_type == RopeScaling::kLlama3;
  transformer.num_query_groups = transformer.query_groups();
  if (transformer.has_moe()) {
    transformer.moe_ffn_hidden_size = transformer.expert_ffn_size(transformer);
    transformer.moe_layer_freq = listed_layers(transformer);
  }
  if (transformer.multi_latent_attention)  // without effect; Megatron-LM's default
    transformer.kv_channels = transformer.hidden_size / transformer.num_attention_heads;
  transformer.hybrid_layer_pattern = transformer.hybrid_letters();  // of one stage
  const ArgumentList list = arguments_of_model(
      {transformer.has_moe(), transformer.multi_latent_attention, transformer.mtp_num_layers > 0,
       transformer.attention_output_gate, transformer.hybrid_layer_pattern});
  ArgumentsWriter writer(list);
  transformer.fields(writer);
  auto entries = writer.entries();
  const auto add = [&](const char* name, std::string value) {
    entries.emplace_back(pickle::text(name), std::move(value));
  };
  for (const char* size : {"tensor_model_parallel_size", "pipeline_model_parallel_size",
                           "context_parallel_size", "expert_model_parallel_size",
                           "expert_tensor_parallel_size", "data_parallel_size", "world_size"})
    add(size, pickle::integer(1));
  add("virtual_pipeline_model_parallel_size", pickle::none());
  if (transformer.is_hybrid()) add("is_hybrid_model", pickle::boolean(true));
  add("padded_vocab_size", pickle::integer(config.padded_vocab_size));
  add("vocab_size", pickle::integer(config.vocab_size));
  add("bf16", pickle::boolean(dtype == DType::kBFloat16));
  add("fp16", pickle::boolean(dtype == DType::kFloat16));
  add("use_distributed_optimizer", pickle::boolean(false));
  add("ckpt_format", pickle::text("torch_dist"));
  add("consumed_train_samples", pickle::integer(0));
  add("consumed_valid_samples", pickle::integer(0));
  add("no_save_optim", pickle::boolean(true));
  add("no_save_rng", pickle::boolean(true));
  return pickle::object(pickle::name("argparse", "Namespace"), pickle::dict(entries));
}

}  // namespace megatron
