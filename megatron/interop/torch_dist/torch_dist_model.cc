#include "megatron/interop/torch_dist/torch_dist_model.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/dist_checkpointing/foreign/torch_dist.h"
#include "megatron/interop/foreign_tensors.h"
#include "megatron/models/model_table.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;
using Kind = PickleValue::Kind;

constexpr std::string_view kLayers = "decoder.layers.";
constexpr std::string_view kModelPrefixes[] = {"embedding.", "decoder.", "output_layer."};

bool is_of_model(std::string_view key) {
  return !key.ends_with("_extra_state") &&
         std::any_of(std::begin(kModelPrefixes), std::end(kModelPrefixes),
                     [&](std::string_view prefix) { return key.starts_with(prefix); });
}

// -- arguments

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
    "attention_dropout init_method_std";

// Arguments that change the model without changing its tensors (apply_query_key_layer_scaling only
// rounds otherwise), and the value with which they do not; None, false and zero never do.
constexpr std::string_view kNeutral =
    "num_experts multi_latent_attention mtp_num_layers is_hybrid_model hybrid_override_pattern "
    "hybrid_layer_pattern heterogeneous_layers_config_path "
    "heterogeneous_layers_config_encoded_json experimental_attention_variant "
    "attention_output_gate apply_residual_connection_post_layernorm qk_l2_norm no_rope_freq "
    "softmax_type=vanilla activation_func_clamp_value apply_query_key_layer_scaling use_mup "
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
const std::vector<Argument>& arguments() {
  static const std::vector<Argument> all = [] {
    std::vector<Argument> out;
    for (const auto& [theirs, ours] : pairs_in(kArguments))
      out.push_back({ours.empty() ? theirs : ours, theirs});
    return out;
  }();
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
  ArgumentsReader(const PickleValue& args, std::string where)
      : args_(args), where_(std::move(where)) {}

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
    for (const Argument& argument : arguments()) {
      if (argument.ours != name.name) continue;
      const PickleValue* given = args_.find(argument.theirs);
      if (given == nullptr || given->is(Kind::kNone)) continue;
      const bool fits =
          given->is(kind) || (kind == Kind::kFloat && given->is(Kind::kInt)) ||
          (kind == Kind::kTuple && given->is(Kind::kList)) ||
          (name.name == "window_attn_skip_freq" && (given->is(Kind::kInt) || given->is_sequence()));
      MEGATRON_CHECK(fits, where_, ": ", argument.theirs, " is of another type than expected");
      return given;
    }
    return nullptr;
  }

  const PickleValue& args_;
  const std::string where_;
};

// `args`, a namespace or a dict; null: none.
const PickleValue* arguments_of(const TorchDistFiles& files) {
  const PickleValue* args = files.common.root().find("args");
  if (args == nullptr) return nullptr;
  if (args->is(Kind::kObject)) args = args->state;
  return args != nullptr && args->is(Kind::kDict) ? args : nullptr;
}

// -- names

// Layers without Transformer Engine have norms outside of the linears; Megatron-LM stores them
// under the Transformer Engine names, other programs not always.
constexpr std::pair<std::string_view, std::string_view> kAliases[] = {
    {"input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"},
    {"input_layernorm.bias", "self_attention.linear_qkv.layer_norm_bias"},
    {"pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"},
    {"pre_mlp_layernorm.bias", "mlp.linear_fc1.layer_norm_bias"},
};

constexpr std::string_view kExperts = ".experts.";

// Removes a number and the dot behind it from the text at `at`; nothing if there is none.
std::optional<int64_t> take_index(std::string& text, size_t at) {
  const size_t dot = text.find('.', at);
  const bool numbered = dot != std::string::npos && dot > at && dot < at + 7 &&
                        text.find_first_not_of("0123456789", at) == dot;
  if (!numbered) return std::nullopt;
  const int64_t index = std::stoll(text.substr(at, dot - at));
  text.erase(at, dot + 1 - at);
  return index;
}

// A key of Megatron-LM, or a name of ours, split up: our name within a layer, without an expert's
// index; the layer (-1: stacked; none: not in a layer), the expert (none: stacked, or none), and
// the half of a gated FC1 (gate 0, up 1; -1: both).
struct Name {
  std::string text;
  std::optional<int64_t> layer;
  std::optional<int64_t> expert;
  int half = -1;
};

Name parse_name(const std::string& key) {
  Name name{key, {}, {}, -1};
  if (!key.starts_with(kLayers)) return name;
  std::string rest = key.substr(kLayers.size());
  name.layer = take_index(rest, 0).value_or(-1);
  if (const size_t experts = rest.find(kExperts); experts != std::string::npos)
    name.expert = take_index(rest, experts + kExperts.size());
  for (const auto& [theirs, ours] : kAliases)
    if (rest == theirs) rest = ours;
  for (const int half : {0, 1}) {  // separate in checkpoints with singleton shards
    const char* const suffix = half == 0 ? "_w" : "_v";
    if (rest.starts_with("mlp.linear_fc1.") && rest.ends_with(suffix)) {
      rest.resize(rest.size() - 2);
      name.half = half;
      break;
    }
  }
  name.text = rest;
  return name;
}

class TorchDistReader {
 public:
  TorchDistReader(const fs::path& directory, const TransformerConfig& transformer,
                  std::optional<int64_t> vocab_size,
                  const std::optional<ParameterShapes>& parameters)
      : directory_(directory),
        name_(directory.string()),
        files_(open_torch_dist(directory, is_of_model)),
        manifest_(name_) {
    config_.transformer = transformer;
    const auto table = files_.manifest.tensors.find(kWordEmbeddings);
    MEGATRON_CHECK(table != files_.manifest.tensors.end() && table->second.shape.size() == 2, name_,
                   ": no tensor ", kWordEmbeddings, "\nhint: this is no checkpoint of a ",
                   find_model_type(config_.type).title, " model");
    const int64_t rows = table->second.shape[0];
    config_.vocab_size = config_.padded_vocab_size = vocab_size.value_or(rows);
    MEGATRON_CHECK(config_.vocab_size <= rows, name_, ": the embedding has ", rows,
                   " rows, the vocabulary ", config_.vocab_size, " tokens");
    if (rows > config_.vocab_size)
      waived_.push_back(
          cat("rows ", config_.vocab_size, " to ", rows - 1, " of the vocabulary: padding"));
    for (auto& [name, shape] : parameters ? *parameters : parameter_shapes(config_))
      expected_[name] = shape;
  }

  ForeignModel run() {
    for (const auto& [key, tensor] : files_.manifest.tensors) add(key, tensor);
    for (const auto& [name, shape] : expected_)
      if (!manifest_.contains(name))
        manifest_.add_problem(name +
                              " is not in the checkpoint, the model of its arguments has it");
    manifest_.set_files(std::move(files_.manifest.files));
    manifest_.set_iteration(files_.iteration);
    Checkpoint checkpoint = std::move(manifest_).open(directory_);
    std::map<std::string, int64_t> groups;  // waived tensors, by the beginning of their names
    for (const std::string& key : files_.others) ++groups[group_of(key)];
    for (const auto& [group, count] : groups)
      waived_.push_back(count == 1 ? group : cat(group, " (", count, ")"));
    return {config_, std::move(checkpoint), used_, std::move(waived_)};
  }

 private:
  static std::string group_of(const std::string& key) {
    if (key.ends_with("_extra_state") || key.find("_extra_state/") != std::string::npos)
      return "_extra_state of modules, which holds nothing without FP8";
    if (key.starts_with("optimizer") || key.starts_with("chained_"))
      return "states of the optimizer";
    return key.substr(0, key.find('/'));
  }

  // Adds a Megatron-LM tensor, which holds one of ours, or one per layer or per expert.
  void add(const std::string& key, const StoredTensor& tensor) {
    const Name name = parse_name(key);
    ++used_;
    if (!name.layer) return add_parts(key, name, name.text, tensor);
    if (*name.layer >= 0) return add_layer(key, name, *name.layer, tensor);
    const int64_t layers = config_.transformer.num_layers;
    if (tensor.shape.size() < 2 || tensor.shape[0] != layers) {
      manifest_.add_problem(
          cat(key, " has shape ", format_shape(tensor.shape), ", expected ", layers, " layers"));
      return;
    }
    const std::vector<StoredTensor> parts = unstacked(tensor);
    for (int64_t i = 0; i < layers; ++i) add_layer(key, name, i, parts[static_cast<size_t>(i)]);
  }

  // The tensor of one layer, which holds all experts if these are stacked: ours may be, too.
  void add_layer(const std::string& key, const Name& name, int64_t layer,
                 const StoredTensor& tensor) {
    const std::string ours = cat(kLayers, layer, ".", name.text);
    const size_t experts = ours.find(kExperts);
    if (experts == std::string::npos) return add_parts(key, name, ours, tensor);
    const auto of_expert = [&](int64_t expert) {
      return std::string(ours).insert(experts + kExperts.size(), cat(expert, "."));
    };
    if (name.expert) return add_parts(key, name, of_expert(*name.expert), tensor);
    if (expected_.contains(ours) || tensor.shape.size() < 2)
      return add_parts(key, name, ours, tensor);
    const std::vector<StoredTensor> parts = unstacked(tensor);
    for (size_t i = 0; i < parts.size(); ++i)
      add_parts(key, name, of_expert(static_cast<int64_t>(i)), parts[i]);
  }

  // The parts of a tensor along its first dimension.
  static std::vector<StoredTensor> unstacked(const StoredTensor& tensor) {
    const auto count = static_cast<size_t>(tensor.shape[0]);
    std::vector<StoredTensor> parts(
        count, {tensor.dtype, {tensor.shape.begin() + 1, tensor.shape.end()}, {}});
    for (const Fragment& fragment : tensor.fragments) {
      Fragment part = fragment;
      part.box.offset.erase(part.box.offset.begin());
      part.box.shape.erase(part.box.shape.begin());
      part.flat_end = part.box.num_elements();
      const auto bytes = static_cast<uint64_t>(part.flat_end * size_of(tensor.dtype));
      for (int64_t i = 0; i < fragment.box.shape[0]; ++i, part.offset += bytes) {
        const auto index = static_cast<size_t>(fragment.box.offset[0] + i);
        if (index >= count) break;  // the manifest's check of the boxes reports it
        parts[index].fragments.push_back(part);
      }
    }
    return parts;
  }

  void add_parts(const std::string& key, const Name& name, const std::string& ours,
                 const StoredTensor& tensor) {
    std::vector<int64_t> shape = tensor.shape;
    std::vector<Fragment> fragments = tensor.fragments;
    const auto found = expected_.find(ours);
    if (found == expected_.end()) {
      const bool tied =
          ours == "output_layer.weight" && !config_.transformer.untie_embeddings_and_output_weights;
      manifest_.add_problem(
          cat(key, " is in the checkpoint, the model of its arguments has no such tensor",
              tied ? ": its output layer is tied to the embedding" : ""));
      return;
    }
    const std::vector<int64_t>& expected = found->second;
    if (name.half >= 0) {
      if (!expected.empty() && expected[0] % 2 == 0 && !shape.empty() &&
          2 * shape[0] == expected[0]) {
        for (Fragment& fragment : fragments) fragment.box.offset[0] += name.half * shape[0];
        shape[0] = expected[0];
      }
    } else if (ours == "embedding.word_embeddings.weight" || ours == "output_layer.weight") {
      drop_padding(shape, fragments, expected);
    }
    if (shape != expected) {
      manifest_.add_problem(cat(key, " has shape ", format_shape(shape),
                                name.layer == -1 ? " per layer" : "",
                                ", by the model's arguments it is ", format_shape(expected)));
      return;
    }
    StoredTensor* const stored = manifest_.tensor(ours, shape, key, tensor.dtype);
    if (stored == nullptr) return;
    stored->fragments.insert(stored->fragments.end(), std::make_move_iterator(fragments.begin()),
                             std::make_move_iterator(fragments.end()));
  }

  // Removes rows beyond the vocabulary.
  void drop_padding(std::vector<int64_t>& shape, std::vector<Fragment>& fragments,
                    const std::vector<int64_t>& expected) const {
    if (shape.size() != 2 || shape[0] <= expected[0] || shape[1] != expected[1]) return;
    shape[0] = expected[0];
    for (Fragment& fragment : fragments) {
      int64_t& rows = fragment.box.shape[0];
      rows = std::min(rows, expected[0] - fragment.box.offset[0]);
      fragment.flat_end = std::max<int64_t>(0, rows) * fragment.box.shape[1];
    }
    std::erase_if(fragments, [](const Fragment& fragment) { return fragment.flat_end == 0; });
  }

  const fs::path directory_;
  const std::string name_;
  TorchDistFiles files_;
  ModelConfig config_;
  std::map<std::string, std::vector<int64_t>> expected_;  // shapes of ours, by name
  ForeignManifest manifest_;
  int64_t used_ = 0;
  std::vector<std::string> waived_;
};

// -- writing

// Writes the fields that Megatron-LM has as entries of `args`.
class ArgumentsWriter final : public FieldVisitor {
 public:
  // The entries in the order of arguments().
  std::vector<std::pair<std::string, std::string>> entries() const {
    std::vector<std::pair<std::string, std::string>> out;
    for (size_t i = 0; i < values_.size(); ++i)
      if (!values_[i].empty()) out.emplace_back(pickle::text(arguments()[i].theirs), values_[i]);
    return out;
  }

  void group(std::string_view) override {}
  void visit(FieldName name, FieldRef ref, std::string_view) override {
    std::visit([&](auto* value) { write(name, *value); }, ref);
  }
  void write(FieldName name, bool& value) { put(name, pickle::boolean(value)); }
  void write(FieldName name, int64_t& value) { put(name, pickle::integer(value)); }
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
      if (arguments()[i].ours == name.name) values_[i] = value;
  }

  std::vector<std::string> values_ = std::vector<std::string>(arguments().size());
};

void check_expressible(const TransformerConfig& t) {
  const auto check = [](bool condition, const char* what) {
    MEGATRON_CHECK(condition, "the model has ", what, ", which Megatron-LM's GPT has not");
  };
  const auto built = [](bool condition, const char* what) {
    MEGATRON_CHECK(condition, "checkpoints of Megatron-LM with ", what, " are not built yet");
  };
  built(!t.multi_latent_attention, "multi-latent attention");
  built(t.num_experts == 0, "experts");
  built(t.mtp_num_layers == 0, "multi-token prediction");
  check(t.norm_placement == NormPlacement::kPre, "norms after its branches (norm_placement)");
  check(!t.parallel_residual, "a parallel residual (parallel_residual)");
  check(!t.scale_embeddings, "scaled embeddings (scale_embeddings)");
  check(!t.query_pre_attn_scalar, "a scale of queries of its own (query_pre_attn_scalar)");
  check(t.attn_logit_softcapping == 0.0, "soft caps of scores (attn_logit_softcapping)");
  check(t.final_logit_softcapping == 0.0, "soft caps of logits (final_logit_softcapping)");
  check(!t.qk_layernorm_over_heads, "a QK norm over all heads (qk_layernorm_over_heads)");
  check(!t.rotary_base_local, "two rotary bases (rotary_base_local)");
  check(!t.geglu, "a GELU-gated MLP (geglu)");
  const bool llama3 = t.rope_scaling_type == RopeScaling::kLlama3 &&
                      t.rope_low_freq_factor == 1.0 && t.rope_high_freq_factor == 4.0 &&
                      t.rope_original_max_position_embeddings == 8192 && !t.rope_attention_factor;
  check(t.rope_scaling_type == RopeScaling::kNone || llama3,
        "rotary scaling other than that of Llama 3 from 8192 positions (rope_scaling_type)");
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
  ArgumentsReader reader(*args, where);
  config.fields(reader);
  config.finalize();
  return config;
}

ForeignModel open_torch_dist_model(const fs::path& directory, const TransformerConfig& transformer,
                                   std::optional<int64_t> vocab_size,
                                   const std::optional<ParameterShapes>& parameters) {
  MEGATRON_CHECK(transformer.num_layers > 0 && transformer.hidden_size > 0 &&
                     transformer.num_attention_heads > 0,
                 directory.string(), ": holds no args, so the shape of its model is unknown",
                 "\nhint: give the flags of the model: --num-layers, --hidden-size, "
                 "--num-attention-heads, ...");
  return TorchDistReader(directory, transformer, vocab_size, parameters).run();
}

std::string pickled_arguments(const ModelConfig& config, DType dtype) {
  TransformerConfig transformer = config.transformer;
  MEGATRON_CHECK(config.type == ModelConfig().type, "a model of type ", config.type,
                 " cannot be written in Megatron-LM's format, which is built for ",
                 ModelConfig().type);
  check_expressible(transformer);
  transformer.use_rope_scaling = transformer.rope_scaling_type == RopeScaling::kLlama3;
  transformer.num_query_groups = transformer.query_groups();
  ArgumentsWriter writer;
  transformer.fields(writer);
  auto entries = writer.entries();
  const auto add = [&](const char* name, std::string value) {
    entries.emplace_back(pickle::text(name), std::move(value));
  };
  for (const char* size :
       {"tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
        "expert_model_parallel_size", "data_parallel_size", "world_size"})
    add(size, pickle::integer(1));
  add("virtual_pipeline_model_parallel_size", pickle::none());
  add("num_experts", pickle::none());
  add("multi_latent_attention", pickle::boolean(false));
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

TorchDistPlace torch_dist_place(const std::string& name) {
  const Name parsed = parse_name(name);
  if (!parsed.layer) return {name, {}};
  TorchDistPlace place{std::string(kLayers) + parsed.text, {*parsed.layer}};
  if (parsed.expert) place.indices.push_back(*parsed.expert);
  return place;
}

}  // namespace megatron
