#include "megatron/interop/huggingface/hf_families.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>

#include "megatron/base/check.h"
#include "megatron/base/field_info.h"
#include "megatron/base/format.h"
#include "megatron/interop/huggingface/detail/hf_common.h"
#include "megatron/interop/import_weights.h"
#include "megatron/models/model_table.h"

namespace megatron {
namespace {

const std::vector<HfFamily>& families() {
  static const std::vector<HfFamily> table = [] {
    std::vector<HfFamily> all = dense_hf_families();
    for (HfFamily& family : moe_hf_families()) all.push_back(std::move(family));
    for (HfFamily& family : hybrid_hf_families()) all.push_back(std::move(family));
    for (HfFamily& family : encoder_hf_families()) all.push_back(std::move(family));
    for (HfFamily& family : t5_hf_families()) all.push_back(std::move(family));
    for (HfFamily& family : multimodal_hf_families()) all.push_back(std::move(family));
    for (HfFamily& family : audio_hf_families()) all.push_back(std::move(family));
    return all;
  }();
  return table;
}

}  // namespace

std::optional<std::vector<int64_t>> indices_of(std::string_view pattern, std::string_view name) {
  std::vector<int64_t> indices;
  size_t at = 0;
  for (const char c : pattern) {
    if (c != '*') {
      if (at == name.size() || name[at++] != c) return std::nullopt;
      continue;
    }
    constexpr size_t kMostDigits = 9;
    const size_t end = std::min(name.find_first_not_of("0123456789", at), name.size());
    if (end == at || end - at > kMostDigits) return std::nullopt;
    indices.push_back(std::stoll(std::string(name.substr(at, end - at))));
    at = end;
  }
  if (at != name.size()) return std::nullopt;
  return indices;
}

std::string with_indices(std::string_view pattern, std::span<const int64_t> indices) {
  std::string name;
  size_t next = 0;
  for (const char c : pattern) {
    if (c != '*') {
      name += c;
      continue;
    }
    MEGATRON_ASSERT(next < indices.size(), pattern, " has more than ", indices.size(), " indices");
    name += std::to_string(indices[next++]);
  }
  return name;
}

namespace {

// Rows of parts of a gated delta net's in_proj: [first, last).
int64_t delta_rows(const TransformerConfig& t, size_t first, size_t last) {
  const int64_t parts[] = {2 * t.linear_key_width() + t.linear_value_width(),
                           t.linear_value_width(), t.linear_num_value_heads,
                           t.linear_num_value_heads};
  return std::accumulate(parts + first, parts + last, int64_t{0});
}

}  // namespace

std::vector<RowRun> row_runs(HfLayout layout, size_t part, int64_t rows,
                             const TransformerConfig& t) {
  const int64_t d = t.kv_channels, groups = std::max<int64_t>(1, t.query_groups()),
                r = t.num_attention_heads / groups;
  const int64_t keys = t.attention_output_gate ? 2 * r : r, width = (keys + 2) * d;  // of a group
  std::vector<RowRun> runs;
  const auto queries = [&](int64_t from) {
    for (int64_t g = 0; g < groups; ++g) {
      if (keys == r) {
        runs.push_back({from + g * r * d, g * width, r * d});
        continue;
      }
      for (int64_t head = 0; head < 2 * r; ++head)  // queries and gates in turn
        runs.push_back(
            {from + (2 * g * r + head) * d, g * width + (head % 2 * r + head / 2) * d, d});
    }
  };
  const auto keys_or_values = [&](int64_t from, int64_t which) {
    for (int64_t g = 0; g < groups; ++g)
      runs.push_back({from + g * d, g * width + (keys + which) * d, d});
  };
  switch (layout) {
    case HfLayout::kSame:
    case HfLayout::kAlternating:
      return {{0, 0, rows}};
    case HfLayout::kStacked:
      return {{0, static_cast<int64_t>(part) * rows, rows}};
    case HfLayout::kSeparateQKV:
      part == 0 ? queries(0) : keys_or_values(0, static_cast<int64_t>(part) - 1);
      return runs;
    case HfLayout::kQueryValue:
      part == 0 ? queries(0) : keys_or_values(0, 1);
      return runs;
    case HfLayout::kSeparateKV:
      for (int64_t head = 0; head < groups; ++head)
        runs.push_back({head * d, (2 * head + static_cast<int64_t>(part)) * d, d});
      return runs;
    case HfLayout::kSeparateDelta:
      return {{0, delta_rows(t, 0, part), rows}};
    case HfLayout::kJoinedQKV:
      queries(0);
      keys_or_values(groups * r * d, 0);
      keys_or_values(groups * (r + 1) * d, 1);
      return runs;
  }
  return runs;
}

int64_t rows_of_part(HfLayout layout, size_t part, size_t parts, int64_t rows,
                     const TransformerConfig& t) {
  if (layout == HfLayout::kStacked || layout == HfLayout::kSeparateKV)
    return rows / static_cast<int64_t>(parts);
  if (layout == HfLayout::kSeparateDelta) return delta_rows(t, part, part + 1);
  if (layout != HfLayout::kSeparateQKV && layout != HfLayout::kQueryValue) return rows;
  const int64_t of_head = t.attention_output_gate ? 2 : 1;
  return (part == 0 ? t.num_attention_heads * of_head : t.query_groups()) * t.kv_channels;
}

TensorView view_of(const HfTensor& tensor) {
  if (tensor.transposed) return {0, tensor.shape[1], tensor.shape[0], 1, tensor.shape[1]};
  int64_t columns = 1;
  for (size_t d = 1; d < tensor.shape.size(); ++d) columns *= tensor.shape[d];
  return {0, tensor.shape[0], columns, columns, 1};
}

bool has_expert_views(const HfTensor& tensor) {
  return tensor.alternating ||
         (tensor.transposed && tensor.our_shape.size() == 3 && tensor.expert < 0);
}

std::vector<HfExpertView> expert_views(const HfTensor& tensor) {
  const std::vector<int64_t>& ours = tensor.our_shape;
  const int64_t rows = ours[1], columns = ours.size() > 2 ? ours[2] : 1,
                halves = tensor.alternating ? 2 : 1, count = rows / halves;
  const int64_t row_stride = tensor.transposed ? 1 : columns,
                column_stride = tensor.transposed ? rows : 1;
  std::vector<HfExpertView> views;
  for (int64_t expert = 0; expert < ours[0]; ++expert)
    for (int64_t half = 0; half < halves; ++half)
      views.push_back({expert,
                       {expert * rows * columns + half * row_stride, count, columns,
                        row_stride * halves, column_stride},
                       {0, half * count, count}});
  return views;
}

ShardedTensor part_of_ours(const HfTensor& tensor, DType dtype) {
  ShardedTensor part;
  part.key = tensor.ours;
  part.dtype = dtype;
  part.global_shape = tensor.our_shape;
  part.local_shape = tensor.shape;
  if (tensor.transposed)
    std::swap(part.local_shape[tensor.shape.size() - 2], part.local_shape.back());
  const size_t rows = tensor.expert >= 0 ? 1 : 0;  // the dimension
  if (rows > 0) part.local_shape.insert(part.local_shape.begin(), 1);
  for (const RowRun& run : tensor.runs) {
    ShardPiece piece;
    piece.global = {std::vector<int64_t>(tensor.our_shape.size(), 0), tensor.our_shape};
    piece.local_offset.assign(tensor.our_shape.size(), 0);
    if (rows > 0) {
      piece.global.offset[0] = tensor.expert;
      piece.global.shape[0] = 1;
    }
    piece.global.offset[rows] = run.ours;
    piece.global.shape[rows] = run.count;
    piece.local_offset[rows] = run.theirs;
    part.pieces.push_back(std::move(piece));
  }
  return part;
}

std::span<const HfFamily> hf_families() { return families(); }

const HfFamily* find_hf_family(std::string_view model_type) {
  for (const HfFamily& family : families())
    if (family.model_type == model_type) return &family;
  return nullptr;
}

std::string hf_family_names() { return listed(families(), &HfFamily::model_type); }

namespace {

constexpr std::string_view kOutputLayer = "output_layer.weight";
constexpr std::string_view kMtp = "mtp.layers.*", kDepth = "mtp.layers.*.transformer_layer";

// A row with its names written out.
struct Names {
  std::string ours;
  std::vector<std::string> theirs;
  const HfRow* row;
  bool after_decoder;  // a layer of multi-token prediction
  int64_t sublayers;   // layers of ours that one of theirs is
};

void add_names(const HfFamily& family, const HfRow& row, std::string_view layers,
               std::vector<Names>& all) {
  for (const char* word : {"weight", "bias"}) {
    const auto full = [&](std::string_view name, std::string_view path) {
      std::string text = name.starts_with('.') ? cat(path, name) : std::string(name);
      if (const size_t at = text.find('@'); at != std::string::npos) text.replace(at, 1, word);
      return text;
    };
    Names& names = all.emplace_back(Names{full(row.ours, layers), {}, &row, false, 1});
    names.after_decoder = names.ours.starts_with(kMtp);
    if (names.ours.starts_with(family.our_layers)) names.sublayers = family.sublayers;
    for (const std::string_view theirs : row.theirs)
      names.theirs.push_back(full(theirs, family.layers));
    if (row.ours.find('@') == row.ours.npos) break;
  }
}

std::vector<Names> names_of(const HfFamily& family) {
  std::vector<Names> all;
  for (const std::span<const HfRow> rows : family.rows)
    for (const HfRow& row : rows) {
      add_names(family, row, family.our_layers, all);
      if (row.ours.starts_with('.')) add_names(family, row, kDepth, all);
    }
  return all;
}

int64_t stars(std::string_view name) { return std::count(name.begin(), name.end(), '*'); }

// The tensors of a parameter, or of one expert of it (-1: all), which has this shape.
void add_parts(const Names& names, const std::vector<int64_t>& indices, const std::string& name,
               const std::vector<int64_t>& our_shape, int64_t expert,
               const std::vector<int64_t>& shape, const TransformerConfig& t,
               std::vector<HfTensor>& tensors) {
  const HfRow& row = *names.row;
  const size_t parts = names.theirs.size();
  for (size_t part = 0; part < parts; ++part) {
    HfTensor tensor;
    tensor.name = with_indices(names.theirs[part], indices);
    tensor.shape = shape;
    tensor.shape[0] = rows_of_part(row.layout, part, parts, shape[0], t);
    tensor.runs = row_runs(row.layout, part, tensor.shape[0], t);
    if (row.layout == HfLayout::kQueryValue && part == 0)
      tensor.zeros = row_runs(HfLayout::kSeparateQKV, 1, t.query_groups() * t.kv_channels, t);
    tensor.transposed = row.transposed && shape.size() >= 2;
    if (tensor.transposed) std::swap(tensor.shape[shape.size() - 2], tensor.shape.back());
    tensor.alternating = row.layout == HfLayout::kAlternating;
    tensor.ours = name;
    tensor.our_shape = our_shape;
    if (row.stored_shape != nullptr) tensor.reshaped = row.stored_shape(our_shape);
    tensor.expert = expert;
    tensors.push_back(std::move(tensor));
  }
}

}  // namespace

namespace {

// The tensors of a parameter by one row; `indices` are those of our name.
std::vector<HfTensor> tensors_of(const Names& names, std::vector<int64_t> indices,
                                 const std::string& name, const std::vector<int64_t>& shape,
                                 const TransformerConfig& config) {
  std::vector<HfTensor> tensors;
  if (names.after_decoder) indices.at(0) += config.num_layers;
  if (!indices.empty()) indices[0] /= names.sublayers;
  if (stars(names.theirs.front()) <= std::ssize(indices)) {
    add_parts(names, indices, name, shape, -1, shape, config, tensors);
    return tensors;
  }
  const std::vector<int64_t> of_expert(shape.begin() + 1, shape.end());
  indices.push_back(0);
  for (int64_t& expert = indices.back(); expert < shape[0]; ++expert)
    add_parts(names, indices, name, shape, expert, of_expert, config, tensors);
  return tensors;
}

}  // namespace

namespace {

// `part`: the configuration of the module that a parameter belongs to.
std::vector<HfTensor> tensors_of_parts(
    const HfFamily& family, const ParameterShapes& parameters, const HfNames& held,
    const std::function<const TransformerConfig&(const std::string& ours)>& part) {
  std::vector<Names> all = names_of(family);
  std::erase_if(all, [&](const Names& names) {
    const std::string_view beside = names.row->beside;
    return !beside.empty() && std::ranges::none_of(parameters, [&](const auto& parameter) {
      return parameter.first == beside;
    });
  });
  std::vector<HfTensor> tensors;
  for (const auto& [name, shape] : parameters) {
    const TransformerConfig& config = part(name);
    std::vector<HfTensor> first;
    bool found = false;
    for (const Names& candidate : all) {
      const auto indices = indices_of(candidate.ours, name);
      if (!indices || (candidate.row->of != nullptr && !candidate.row->of(config))) continue;
      std::vector<HfTensor> made = tensors_of(candidate, *indices, name, shape, config);
      found = held && std::any_of(made.begin(), made.end(),
                                  [&](const HfTensor& tensor) { return held(tensor.name); });
      if (found || first.empty()) first = std::move(made);
      if (found || !held) break;
    }
    MEGATRON_CHECK(!first.empty(), "a ", family.model_type,
                   " model of Hugging Face has no tensor for ", name);
    std::move(first.begin(), first.end(), std::back_inserter(tensors));
  }
  return tensors;
}

}  // namespace

std::vector<HfTensor> hf_tensors(const HfFamily& family, const TransformerConfig& config,
                                 const ParameterShapes& parameters, const HfNames& held) {
  return tensors_of_parts(family, parameters, held,
                          [&](const std::string&) -> const TransformerConfig& { return config; });
}

std::vector<HfTensor> hf_tensors(const HfFamily& family, const ModelConfig& config,
                                 const HfNames& held) {
  const ParameterShapes parameters = parameter_shapes(config);
  if (family.part == nullptr) return hf_tensors(family, config.transformer, parameters, held);
  TransformerConfig of_part;
  return tensors_of_parts(family, parameters, held,
                          [&](const std::string& ours) -> const TransformerConfig& {
                            return of_part = family.part(config, ours);
                          });
}

std::vector<HfTensor> hf_copies(const HfFamily& family, const ModelConfig& config) {
  const TransformerConfig& t = config.transformer;
  std::vector<HfTensor> copies;
  if (family.copies.empty() || t.mtp_num_layers == 0) return copies;
  const std::vector<HfTensor> tensors = hf_tensors(family, config);
  for (int64_t depth = 0; depth < t.mtp_num_layers; ++depth)
    for (const auto& [ours, theirs] : family.copies) {
      const bool tied = ours == kOutputLayer && !t.untie_embeddings_and_output_weights;
      const std::string_view source = tied ? kWordEmbeddings : ours;
      const auto found = std::find_if(tensors.begin(), tensors.end(), [&](const HfTensor& tensor) {
        return tensor.ours == source;
      });
      const int64_t layer[] = {t.num_layers + depth};
      copies.push_back(*found);
      copies.back().name = with_indices(cat(family.layers, theirs), layer);
    }
  return copies;
}

std::optional<std::pair<std::string, int64_t>> expert_of_name(const HfFamily& family,
                                                              std::string_view name) {
  for (const Names& names : names_of(family))
    for (const std::string& theirs : names.theirs) {
      const auto indices = indices_of(theirs, name);
      if (!indices || stars(theirs) <= stars(names.ours)) continue;
      std::string pattern = theirs.substr(0, theirs.rfind('*') + 1);
      const size_t layer = pattern.find('*');
      if (layer + 1 < pattern.size()) pattern.replace(layer, 1, std::to_string(indices->front()));
      return std::pair{pattern, indices->back()};
    }
  return std::nullopt;
}

std::string hf_config_of_text_model(const std::string& text, const std::string& name) {
  const HfFields whole(text, name);
  for (const HfFamily& family : hf_families())
    if (!family.enclosing.model_type.empty() &&
        whole.is_text("model_type", family.enclosing.model_type))
      return whole.nested_text(
          "text_config", {"tie_word_embeddings", "dtype", "torch_dtype", "quantization_config"});
  return text;
}

HfModel parse_hf_config(const std::string& text, const std::string& name) {
  HfFields fields(text, name);
  std::string type;
  fields.text("model_type", type, "");
  MEGATRON_CHECK(
      !type.empty(), name, ": has no model_type",
      "\nhint: the config.json of a model names its type, such as \"llama\"; without one, "
      "convert-checkpoint --name-map reads the weights");
  HfModel model;
  model.quantization = fields.quantization();
  model.dtype = fields.dtype();
  model.family = find_hf_family(type);
  MEGATRON_CHECK(model.family != nullptr, name, ": models of the type \"", type, "\" are not known",
                 "\nhint: types that are: ", hf_family_names(),
                 "; convert-checkpoint --name-map reads others whose blocks are ours");
  model.config.type = model.family->type;
  TransformerConfig& t = model.config.transformer;
  model.family->preset(t);
  model.family->fields(fields, model.config);
  MEGATRON_CHECK(t.has_moe() || fields.num_experts() == 0, name, ": has ", fields.num_experts(),
                 " experts per layer, which a \"", type, "\" model has not");
  t.seq_length = t.max_position_embeddings;
  MEGATRON_CHECK(model.config.vocab_size > 0, name, ": vocab_size ", model.config.vocab_size,
                 " is not positive");
  model.config.padded_vocab_size = model.config.vocab_size;
  t.finalize();
  Violations violations;
  t.validate(violations);
  if (const Config* own = model.config.own.config()) own->validate(violations);
  MEGATRON_CHECK(violations.empty(), name, ": ", violations.messages().front());
  if (model.family->carried != nullptr) model.carried = model.family->carried(fields, model.config);
  return model;
}

namespace {

// Position interpolation is linear RoPE scaling, and transformers calls it that.
void use_linear_scaling(TransformerConfig& t) {
  if (!t.rotary_seq_len_interpolation_factor || t.rope_scaling_type != RopeScaling::kNone) return;
  t.rope_scaling_type = RopeScaling::kLinear;
  t.rope_scaling_factor = static_cast<double>(*t.rotary_seq_len_interpolation_factor);
  t.rotary_seq_len_interpolation_factor.reset();
}

}  // namespace

namespace {

// As architecture_difference(), of the flags of a type of models.
std::string own_difference(OwnConfig a, OwnConfig b) {
  if (a.config() == nullptr || !a.same_type(b)) return "";
  Config *const of_first[] = {a.config()}, *const of_second[] = {b.config()};
  const std::vector<FieldInfo> mine = describe_fields(of_first), read = describe_fields(of_second);
  for (size_t i = 0; i < mine.size(); ++i)
    if (mine[i].role == FieldRole::kArchitecture && mine[i].value != read[i].value)
      return cat(mine[i].name, " is ", format_yaml(mine[i].value), ", not ",
                 format_yaml(read[i].value));
  return "";
}

}  // namespace

std::string write_hf_config(const HfFamily& family, const ModelConfig& config,
                            const std::string& base) {
  HfFields fields = HfFields::writer(base);
  fields.set("architectures", cat("[\"", family.architecture, "\"]"));
  std::string type(family.model_type);
  fields.text("model_type", type);
  ModelConfig copy = config;
  use_linear_scaling(copy.transformer);
  family.fields(fields, copy);
  std::string text = fields.text();
  const HfModel back =
      parse_hf_config(text, cat("the configuration as a ", family.model_type, " model"));
  const std::string difference =
      architecture_difference(config.transformer, back.config.transformer);
  MEGATRON_CHECK(difference.empty(), "a ", family.model_type,
                 " model of Hugging Face cannot express this model: ", difference);
  const std::string other = own_difference(copy.own, back.config.own);  // as the family says them
  MEGATRON_CHECK(other.empty(), "a ", family.model_type,
                 " model of Hugging Face cannot express this model: ", other);
  return text;
}

namespace {

// Compares which layers have experts and what they are, not how that was written.
void normalize_experts(TransformerConfig& t) {
  if (!t.has_moe()) return;
  std::string layers;
  for (int64_t i = 1; i <= t.num_layers; ++i) layers += t.is_moe_layer(i) ? '1' : '0';
  t.moe_ffn_hidden_size = t.expert_ffn_size(t);
  if (layers.find('0') == std::string::npos) t.ffn_hidden_size = *t.moe_ffn_hidden_size;
  t.moe_layer_freq = layers;
  t.moe_router_topk_scaling_factor = t.moe_router_topk_scaling_factor.value_or(1.0);
  if (t.moe_router_num_groups == 1) {
    t.moe_router_num_groups.reset();
    t.moe_router_group_topk.reset();
    t.moe_router_group_score = GroupScore::kSum;
  }
}

void normalize_latent_attention(TransformerConfig& t) {
  if (!t.multi_latent_attention) return;
  const MultiLatentAttentionConfig defaults;
  if (t.qk_layernorm) t.latent_norm_epsilon = t.latent_norm_epsilon.value_or(t.layernorm_epsilon);
  if (t.stretches_positions()) return;
  t.rope_type = defaults.rope_type;
  t.rotary_scaling_factor = defaults.rotary_scaling_factor;
  t.mscale = defaults.mscale;
  t.mscale_all_dim = defaults.mscale_all_dim;
}

// Fields of the architecture by name, as text; those without effect have their defaults.
std::map<std::string, std::string> settings(const TransformerConfig& given) {
  TransformerConfig t = given;
  t.finalize();
  const TransformerConfig defaults;
  use_linear_scaling(t);
  t.num_query_groups = t.query_groups();
  t.group_query_attention = t.num_query_groups != t.num_attention_heads;
  t.use_rotary_position_embeddings = t.use_rope_scaling = false;
  t.add_position_embedding = true;
  t.openai_gelu = given.activation() == Activation::kGeluTanh;
  t.bias_gelu_fusion = false;
  t.add_qkv_bias = t.qkv_bias();
  if (!t.window_size.empty()) t.window_size[1] = 0;  // attention is causal
  if (t.window_size.empty()) t.rotary_base_local.reset();
  // Compare which layers are windowed, not how the list was written.
  std::string windows;
  for (int64_t i = 1; i <= t.num_layers; ++i) windows += t.window(i).empty() ? '0' : '1';
  t.window_attn_skip_freq = windows;
  t.query_pre_attn_scalar = t.query_pre_attn_scalar.value_or(static_cast<double>(t.kv_channels));
  t.query_pre_attn_scalar = hf::rounded(*t.query_pre_attn_scalar, 14);  // 1 / scale^2 in some files
  if (t.position_embedding_type != PositionEmbedding::kRope) {
    t.rotary_base = defaults.rotary_base;
    t.rotary_percent = defaults.rotary_percent;
    t.rotary_interleaved = false;
  }
  // What the letters are, not how they are divided over a pipeline.
  if (t.is_hybrid()) t.hybrid_layer_pattern = t.hybrid_letters();
  if (t.has_letter('M')) t.mamba_num_heads = t.mamba_heads(t);
  normalize_experts(t);
  normalize_latent_attention(t);
  // Derived factors get their values.
  const RopeScaling scaling = t.rotary_scaling().type;
  if (scaling == RopeScaling::kNone) t.rope_scaling_factor = defaults.rope_scaling_factor;
  if (scaling == RopeScaling::kNone || scaling == RopeScaling::kLinear)
    t.rope_original_max_position_embeddings = defaults.rope_original_max_position_embeddings;
  if (scaling != RopeScaling::kLlama3) {
    t.rope_low_freq_factor = defaults.rope_low_freq_factor;
    t.rope_high_freq_factor = defaults.rope_high_freq_factor;
  }
  if (scaling != RopeScaling::kYarn) {
    t.yarn_beta_fast = defaults.yarn_beta_fast;
    t.yarn_beta_slow = defaults.yarn_beta_slow;
    t.yarn_correction_range_round_to_int = defaults.yarn_correction_range_round_to_int;
  }
  // With rotary positions max_position_embeddings is not architecture.
  if (t.position_embedding_type != PositionEmbedding::kLearnedAbsolute)
    t.max_position_embeddings = 1;
  Config* const configs[] = {&t};
  std::map<std::string, std::string> out;
  for (const FieldInfo& field : describe_fields(configs))
    if (field.role == FieldRole::kArchitecture) out[field.name] = format_yaml(field.value);
  return out;
}

}  // namespace

std::string architecture_difference(const TransformerConfig& a, const TransformerConfig& b) {
  const std::map<std::string, std::string> first = settings(a), second = settings(b);
  for (const auto& [name, value] : first) {
    const auto other = second.find(name);
    if (other == second.end() || other->second != value)
      return cat(name, " is ", value, ", not ", other == second.end() ? "set" : other->second);
  }
  return "";
}

}  // namespace megatron
