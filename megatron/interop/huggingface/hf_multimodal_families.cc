// Models that read images beside text.
#include <algorithm>
#include <deque>

#include "megatron/base/check.h"
#include "megatron/interop/huggingface/detail/hf_multimodal.h"
#include "megatron/models/mimo/mimo_model.h"

namespace megatron {
namespace {

using namespace hf;  // NOLINT: names of the tables

// -- names, as HfRow has them

}  // namespace

std::vector<HfRow> hf::nested_rows(std::initializer_list<std::span<const HfRow>> all,
                                   std::string_view prefix) {
  static std::deque<std::string> names;  // that the rows refer to
  const auto kept = [&](std::string text) -> std::string_view {
    return names.emplace_back(std::move(text));
  };
  std::vector<HfRow> nested;
  for (const std::span<const HfRow> rows : all)
    for (HfRow row : rows) {
      const auto within = [&](std::string_view part, std::string_view name,
                              std::string_view layers) {
        return kept(cat(part, name.starts_with('.') ? layers : "", name));
      };
      row.ours = within("language_model.", row.ours, "decoder.layers.*");
      for (std::string_view& theirs : row.theirs) theirs = within(prefix, theirs, "model.layers.*");
      nested.push_back(std::move(row));
    }
  return nested;
}

namespace {

// The rows of Llama and its descendants.
std::span<const HfRow> language_rows() {
  static const std::vector<HfRow> rows =
      nested_rows({kBody, kSeparateQKV, kQKNorms, kGatedMlp, kPreNorms, kHead});
  return rows;
}

std::span<const HfRow> gemma3_language_rows() {
  static const std::vector<HfRow> rows =
      nested_rows({kBody, kSeparateQKV, kQKNorms, kGatedMlp, kSandwichNorms, kHead});
  return rows;
}

std::span<const HfRow> qwen2_language_rows() {
  static const std::vector<HfRow> rows =
      nested_rows({kBody, kSeparateQKV, kGatedMlp, kPreNorms, kHead}, "");
  return rows;
}

// [h, 3 p^2] as [h, 3, p, p].
std::vector<int64_t> as_convolution(const std::vector<int64_t>& ours) {
  constexpr int64_t kChannels = 3;
  int64_t p = 1;
  while (kChannels * (p + 1) * (p + 1) <= ours[1]) ++p;
  return {ours[0], kChannels, p, p};
}

std::vector<int64_t> as_vector(const std::vector<int64_t>& ours) { return {ours.back()}; }

const HfRow kClipEnds[] = {{.ours = "vision_model.class_token",
                            .theirs = {"vision_tower.embeddings.class_embedding"},
                            .stored_shape = as_vector},
                           {"vision_model.ln_pre.@", {"vision_tower.pre_layrnorm.@"}}};  // sic

const HfRow kSiglipEnds[] = {
    {"vision_model.conv1.bias", {"vision_tower.embeddings.patch_embedding.bias"}},
    {"vision_model.ln_post.@", {"vision_tower.post_layernorm.@"}}};

// Of CLIP and of SigLIP.
const HfRow kClip[] = {
    {.ours = "vision_model.conv1.weight",
     .theirs = {"vision_tower.embeddings.patch_embedding.weight"},
     .stored_shape = as_convolution},
    {"vision_model.position_embeddings.weight",
     {"vision_tower.embeddings.position_embedding.weight"}},
    {"vision_model.decoder.layers.*.self_attention.linear_qkv.layer_norm_@",
     {"vision_tower.encoder.layers.*.layer_norm1.@"}},
    {"vision_model.decoder.layers.*.self_attention.linear_qkv.@",
     {"vision_tower.encoder.layers.*.self_attn.q_proj.@",
      "vision_tower.encoder.layers.*.self_attn.k_proj.@",
      "vision_tower.encoder.layers.*.self_attn.v_proj.@"},
     HfLayout::kSeparateQKV},
    {"vision_model.decoder.layers.*.self_attention.linear_proj.@",
     {"vision_tower.encoder.layers.*.self_attn.out_proj.@"}},
    {"vision_model.decoder.layers.*.mlp.linear_fc1.layer_norm_@",
     {"vision_tower.encoder.layers.*.layer_norm2.@"}},
    {"vision_model.decoder.layers.*.mlp.linear_fc1.@", {"vision_tower.encoder.layers.*.mlp.fc1.@"}},
    {"vision_model.decoder.layers.*.mlp.linear_fc2.@",
     {"vision_tower.encoder.layers.*.mlp.fc2.@"}}};

std::vector<int64_t> as_convolution_of_frames(const std::vector<int64_t>& ours) {
  const std::vector<int64_t> still = as_convolution({ours[0], ours[1] / 2});
  return {still[0], still[1], 2, still[2], still[3]};
}

// Of Qwen 2 and 2.5.
const HfRow kQwenVision[] = {
    {.ours = "vision_model.conv1.weight",
     .theirs = {"visual.patch_embed.proj.weight"},
     .stored_shape = as_convolution_of_frames},
    {"vision_model.decoder.layers.*.self_attention.linear_qkv.layer_norm_@",
     {"visual.blocks.*.norm1.@"}},
    {"vision_model.decoder.layers.*.self_attention.linear_qkv.@",
     {"visual.blocks.*.attn.qkv.@"},
     HfLayout::kJoinedQKV},
    {"vision_model.decoder.layers.*.self_attention.linear_proj.@", {"visual.blocks.*.attn.proj.@"}},
    {"vision_model.decoder.layers.*.mlp.linear_fc1.layer_norm_@", {"visual.blocks.*.norm2.@"}},
    {"vision_model.ln_post.@", {"visual.merger.ln_q.@"}},
    {"vision_projection.encoder.linear_fc1.@", {"visual.merger.mlp.0.@"}},
    {"vision_projection.encoder.linear_fc2.@", {"visual.merger.mlp.2.@"}}};

const HfRow kQwen2Mlps[] = {
    {"vision_model.decoder.layers.*.mlp.linear_fc1.@", {"visual.blocks.*.mlp.fc1.@"}},
    {"vision_model.decoder.layers.*.mlp.linear_fc2.@", {"visual.blocks.*.mlp.fc2.@"}}};

const HfRow kQwen25Mlps[] = {
    {"vision_model.decoder.layers.*.mlp.linear_fc1.@",
     {"visual.blocks.*.mlp.gate_proj.@", "visual.blocks.*.mlp.up_proj.@"},
     HfLayout::kStacked},
    {"vision_model.decoder.layers.*.mlp.linear_fc2.@", {"visual.blocks.*.mlp.down_proj.@"}}};

std::vector<int64_t> as_batch(const std::vector<int64_t>& ours) { return {1, ours[0], ours[1]}; }

const HfRow kInternVit[] = {
    {.ours = "vision_model.conv1.weight",
     .theirs = {"vision_tower.embeddings.patch_embeddings.projection.weight"},
     .stored_shape = as_convolution},
    {"vision_model.conv1.bias", {"vision_tower.embeddings.patch_embeddings.projection.bias"}},
    {"vision_model.class_token", {"vision_tower.embeddings.cls_token"}},
    {.ours = "vision_model.position_embeddings.weight",
     .theirs = {"vision_tower.embeddings.position_embeddings"},
     .stored_shape = as_batch},
    {"vision_model.decoder.layers.*.self_attention.linear_qkv.layer_norm_@",
     {"vision_tower.encoder.layer.*.layernorm_before.@"}},
    {"vision_model.decoder.layers.*.self_attention.linear_qkv.@",
     {"vision_tower.encoder.layer.*.attention.q_proj.@",
      "vision_tower.encoder.layer.*.attention.k_proj.@",
      "vision_tower.encoder.layer.*.attention.v_proj.@"},
     HfLayout::kSeparateQKV},
    {"vision_model.decoder.layers.*.self_attention.linear_proj.@",
     {"vision_tower.encoder.layer.*.attention.projection_layer.@"}},
    {"vision_model.decoder.layers.*.attn_layer_scale", {"vision_tower.encoder.layer.*.lambda_1"}},
    {"vision_model.decoder.layers.*.mlp_layer_scale", {"vision_tower.encoder.layer.*.lambda_2"}},
    {"vision_model.decoder.layers.*.mlp.linear_fc1.layer_norm_@",
     {"vision_tower.encoder.layer.*.layernorm_after.@"}},
    {"vision_model.decoder.layers.*.mlp.linear_fc1.@", {"vision_tower.encoder.layer.*.mlp.fc1.@"}},
    {"vision_model.decoder.layers.*.mlp.linear_fc2.@", {"vision_tower.encoder.layer.*.mlp.fc2.@"}},
    {"vision_projection.encoder.linear_fc1.layer_norm_@", {"multi_modal_projector.layer_norm.@"}}};

const HfRow kGemma3Projector[] = {{"vision_projection.encoder.layer_norm_weight",
                                   {"multi_modal_projector.mm_soft_emb_norm.weight"}},
                                  {"vision_projection.encoder.weight",
                                   {"multi_modal_projector.mm_input_projection_weight"},
                                   HfLayout::kSame,
                                   /*transposed=*/true}};

const HfRow kNewline[] = {{"image_newline", {"image_newline"}}};

const HfRow kProjector[] = {
    {"vision_projection.encoder.linear_fc1.@", {"multi_modal_projector.linear_1.@"}},
    {"vision_projection.encoder.linear_fc2.@", {"multi_modal_projector.linear_2.@"}}};

// Alternatives of transformers 4 and of the modules of transformers 5, the longest first.
const std::vector<std::pair<std::string_view, std::string_view>> kBeginnings = {
    {"model.vision_tower.vision_model.", "vision_tower."},
    {"vision_tower.vision_model.", "vision_tower."},
    {"model.vision_tower.", "vision_tower."},
    {"model.multi_modal_projector.", "multi_modal_projector."},
    {"model.image_newline", "image_newline"},
    {"model.language_model.", "language_model.model."},
    {"lm_head.", "language_model.lm_head."}};

// -- the language model, "text_config"

constexpr TextDefaults kTextDefaults[] = {{"llama", 4096, 11008, 32, 32, 32000},
                                          {"mistral", 4096, 14336, 32, 32, 32000},
                                          {"qwen2", 4096, 22016, 32, 32, 151936},
                                          {"qwen3", 4096, 22016, 32, 32, 151936}};
constexpr TextDefaults kGemma3Defaults[] = {{"gemma3_text", 2304, 9216, 26, 8, 262208}};

const TextDefaults* defaults_of(TextTypes types, std::string_view type) {
  const auto found =
      std::ranges::find_if(types, [&](const TextDefaults& row) { return row.type == type; });
  return found == types.end() ? nullptr : &*found;
}

// The text of a text_config with these keys written out.
std::string with_defaults(const std::string& part, const std::string& name, std::string& type,
                          TextTypes types, const char* missing_type) {
  HfFields given(part, name);
  given.text("model_type", type, missing_type);
  const TextDefaults* defaults = defaults_of(types, type);
  std::string built;
  for (const TextDefaults& row : types) built += cat(built.empty() ? "" : ", ", row.type);
  MEGATRON_CHECK(defaults != nullptr, name, ": a language model of the type \"", type,
                 "\" is not built beside images\nhint: types that are: ", built);
  HfFields full = HfFields::writer(part);
  const auto fill = [&](std::string_view key, int64_t value) {
    value = given.find_integer(key).value_or(value);
    full.integer(key, value);
  };
  fill("hidden_size", defaults->hidden);
  fill("intermediate_size", defaults->ffn);
  fill("num_hidden_layers", defaults->layers);
  fill("num_attention_heads", defaults->heads);
  fill("vocab_size", defaults->vocabulary);
  if (defaults->more != nullptr) defaults->more(given, full);
  return full.text();
}

void read_text(const HfFields& f, ModelConfig& c, TextTypes types, const char* missing_type) {
  const std::string name = cat(f.name(), ": text_config");
  std::string type;
  HfFields text(with_defaults(f.part("text_config"), name, type, types, missing_type), name);
  const HfFamily& family = *find_hf_family(type);
  family.preset(c.transformer);
  family.fields(text, c);
}

// Over the text_config that is there, if that is of a type that can express the model; else of the
// first type that can.
void write_text(HfFields& f, const ModelConfig& c, TextTypes types) {
  const ModelConfig language = language_config(c);
  const std::string base = f.part("text_config");
  std::string given;
  HfFields(base, "text_config").text("model_type", given, "");
  const auto write = [&](std::string_view type, const std::string& over) {
    const HfFamily& family = *find_hf_family(type);
    write_hf_config(family, language, over);  // throws if it cannot
    HfFields text = HfFields::writer(over);
    std::string name(type);
    text.text("model_type", name);
    ModelConfig copy = language;
    family.fields(text, copy);
    f.set("text_config", text.text());
  };
  if (defaults_of(types, given) != nullptr) return write(given, base);
  std::string reasons;
  for (const TextDefaults& row : types) {
    try {
      return write(row.type, "{}");
    } catch (const Error& error) {
      const std::string what = error.what();
      reasons += "\ndetail: " + what.substr(0, what.find('\n'));
    }
  }
  throw Error("no language model that is built beside images can express this one" + reasons);
}

}  // namespace

void hf::text_fields(HfFields& f, ModelConfig& c, const char* missing_type, TextTypes types) {
  TransformerConfig& t = c.transformer;
  if (!f.reading()) {
    write_text(f, c, types);
    return tied(f, t, false);
  }
  read_text(f, c, types, missing_type);
  tied(f, t, !t.untie_embeddings_and_output_weights);
}

namespace {

// -- images

constexpr std::pair<std::string_view, VisionActivation> kActivationNames[] = {
    {"gelu", VisionActivation::kGelu},
    {"gelu_pytorch_tanh", VisionActivation::kGeluTanh},
    {"quick_gelu", VisionActivation::kQuickGelu},
    {"silu", VisionActivation::kSilu}};

}  // namespace

void hf::activation_field(HfFields& f, std::string_view key, VisionActivation& value,
                          const char* missing) {
  std::string name;
  for (const auto& [word, kind] : kActivationNames)
    if (kind == value) name = word;
  f.text(key, name, missing);
  const auto* row = std::find_if(std::begin(kActivationNames), std::end(kActivationNames),
                                 [&](const auto& candidate) { return candidate.first == name; });
  MEGATRON_CHECK(row != std::end(kActivationNames), f.name(), ": ", key, " \"", name,
                 "\" is not built");
  value = row->second;
}

namespace {

// Feature 0 is the input of the first layer, i the output of layer i; negative ones count from the
// last layer's.
int64_t computed_layers(int64_t all, int64_t feature) {
  return feature >= 0 ? feature : all + 1 + feature;
}

// All layers, and which of their outputs is taken.
struct TakenLayer {
  int64_t all = 24, feature = -2;
};

TakenLayer read_taken(HfFields& f, HfFields& vision, int64_t missing) {
  TakenLayer taken;
  vision.integer("num_hidden_layers", taken.all, missing);
  f.signed_integer("vision_feature_layer", taken.feature, -2);
  return taken;
}

void clip_fields(HfFields& f, VisionConfig& own) {
  const std::string part = f.part("vision_config"), name = cat(f.name(), ": vision_config");
  // Without a vision_config that of CLIP ViT-L/14-336
  const bool given = part != "{}";
  HfFields read(part, name), write = HfFields::writer(part);
  HfFields& vision = f.reading() ? read : write;
  vision.constant("model_type", "\"clip_vision_model\"");
  own.vision_model_type = VisionModel::kClip;
  const auto size = [&](std::string_view key, int64_t& value, int64_t of_clip, int64_t of_llava) {
    vision.integer(key, value, given ? of_clip : of_llava);
  };
  size("hidden_size", own.vision_hidden_size, 768, 1024);
  size("intermediate_size", own.vision_ffn_hidden_size, 3072, 4096);
  size("num_attention_heads", own.vision_num_attention_heads, 12, 16);
  size("image_size", own.img_h, 224, 336);
  size("patch_size", own.patch_dim, 32, 14);
  vision.number("layer_norm_eps", own.vision_layernorm_epsilon, 1e-5);
  vision.constant("num_channels", "3");
  activation_field(vision, "hidden_act", own.vision_activation, "quick_gelu");
  if (f.reading()) {
    own.img_w = own.img_h;
    const TakenLayer taken = read_taken(f, vision, given ? 12 : 24);
    own.vision_num_layers = computed_layers(taken.all, taken.feature);
    MEGATRON_CHECK(own.vision_num_layers > 0 && own.vision_num_layers <= taken.all, f.name(),
                   ": vision_feature_layer ", taken.feature, " is no output of the ", taken.all,
                   " layers of the encoder");
    return;
  }
  MEGATRON_CHECK(own.img_h == own.img_w,
                 "encoders of Hugging Face's CLIP read squares, not pictures of ", own.img_h, " x ",
                 own.img_w);
  HfFields before(f.part("vision_config"), name), whole(f.text(), f.name());
  TakenLayer taken = read_taken(whole, before, 0);
  if (computed_layers(taken.all, taken.feature) != own.vision_num_layers || taken.all == 0)
    taken = {own.vision_num_layers, -1};
  vision.integer("num_hidden_layers", taken.all);
  f.signed_integer("vision_feature_layer", taken.feature);
  f.set("vision_config", vision.text());
}

void projector_fields(HfFields& f, VisionConfig& own, const TransformerConfig& language) {
  f.flag("multimodal_projector_bias", own.vision_projection_bias, true);
  activation_field(f, "projector_hidden_act", own.vision_projection_activation, "gelu");
  if (f.reading()) return;
  const int64_t middle = own.vision_projection_ffn_hidden_size;
  MEGATRON_CHECK(
      own.vision_projection_type == VisionProjection::kMlp &&
          (middle == 0 || middle == language.hidden_size),
      "projectors of Hugging Face's LLaVA are two linears with the width of the language "
      "model between them");
}

// "default" leaves the class row out.
void strategy_field(HfFields& f, VisionConfig& own) {
  std::string strategy = own.vision_class_token ? "full" : "default";
  f.text("vision_feature_select_strategy", strategy, "default");
  MEGATRON_CHECK(strategy == "full" || strategy == "default", f.name(),
                 ": vision_feature_select_strategy \"", strategy, "\" is not known");
  own.vision_class_token = strategy == "full";
}

// image_token_index, or image_token_id where that is there.
void image_token_field(HfFields& f, MimoConfig& own, int64_t missing) {
  constexpr const char *kIndex = "image_token_index", *kId = "image_token_id";
  const bool by_id = f.find_integer(kId).has_value();
  f.integer(by_id ? kId : kIndex, own.image_token_id, missing);
}

void llava_fields(HfFields& f, ModelConfig& c) {
  MimoConfig& own = c.own.ensure<MimoConfig>();
  text_fields(f, c, "llama", kTextDefaults);
  clip_fields(f, own);
  projector_fields(f, own, c.transformer);
  strategy_field(f, own);
  image_token_field(f, own, 32000);
  MEGATRON_CHECK(
      f.reading() || (own.is_clip() && own.cell_side() == 1 && !own.vision_projection_norm &&
                      own.vision_qkv_bias && !own.bidirectional_images),
      "models of Hugging Face's LLaVA have CLIP as their encoder, without pixel shuffle");
}

void llava_of_one_picture(HfFields& f, ModelConfig& c) {
  llava_fields(f, c);
  MEGATRON_CHECK(f.reading() || !c.own.as<MimoConfig>()->vision_newlines,
                 "a llava has no image_newline (--vision-newlines)");
}

void llava_next_fields(HfFields& f, ModelConfig& c) {
  if (f.reading()) c.own.ensure<MimoConfig>().vision_newlines = true;
  llava_fields(f, c);
  MEGATRON_CHECK(c.own.as<MimoConfig>()->vision_newlines,
                 "a llava_next has an image_newline (--vision-newlines)");
}

void internvit_fields(HfFields& f, VisionConfig& own) {
  const std::string part = f.part("vision_config"), name = cat(f.name(), ": vision_config");
  HfFields read(part, name), write = HfFields::writer(part);
  HfFields& vision = f.reading() ? read : write;
  vision.constant("model_type", "\"internvl_vision\"");
  own.vision_model_type = VisionModel::kInternVit;
  vision.integer("hidden_size", own.vision_hidden_size, 1024);
  vision.integer("num_hidden_layers", own.vision_num_layers, 24);
  vision.integer("num_attention_heads", own.vision_num_attention_heads, 16);
  vision.integer("intermediate_size", own.vision_ffn_hidden_size, 4096);
  vision.flag("attention_bias", own.vision_qkv_bias, false);
  vision.number("layer_norm_eps", own.vision_layernorm_epsilon, 1e-6);
  vision.sides("image_size", own.img_h, own.img_w, 448);
  int64_t across = own.patch_dim;
  vision.sides("patch_size", own.patch_dim, across, 14);
  MEGATRON_CHECK(across == own.patch_dim, name, ": patches of ", own.patch_dim, " x ", across,
                 " are not built, only squares");
  activation_field(vision, "hidden_act", own.vision_activation, "gelu");
  vision.constant("norm_type", "\"layer_norm\"");
  vision.constant("use_qk_norm", "false");
  vision.constant("use_mask_token", "false");
  vision.constant("use_absolute_position_embeddings", "true");
  vision.constant("use_mean_pooling", "true");  // so that no norm is behind the layers
  vision.constant("num_channels", "3");
  if (!f.reading()) f.set("vision_config", vision.text());
}

void internvl_fields(HfFields& f, ModelConfig& c) {
  MimoConfig& own = c.own.ensure<MimoConfig>();
  text_fields(f, c, "qwen2", kTextDefaults);
  internvit_fields(f, own);
  activation_field(f, "projector_hidden_act", own.vision_projection_activation, "gelu");
  f.constant("vision_feature_layer", "-1");
  f.constant("vision_feature_select_strategy", "\"default\"");
  f.constant("downsample_ratio", "0.5");
  f.integer("image_token_id", own.image_token_id, 151667);
  if (f.reading()) {
    own.vision_class_token = false;
    own.pixel_shuffle = own.vision_projection_norm = true;
    return;
  }
  MEGATRON_CHECK(
      own.pixel_shuffle && own.vision_projection_norm && own.vision_projection_bias &&
          own.is_internvit() && !own.bidirectional_images &&
          own.vision_projection_type == VisionProjection::kMlp,
      "an internvl has an InternViT, pixel shuffle, and a norm and biases in its projector");
}

void siglip_fields(HfFields& f, VisionConfig& own) {
  const std::string part = f.part("vision_config"), name = cat(f.name(), ": vision_config");
  HfFields read(part, name), write = HfFields::writer(part);
  HfFields& vision = f.reading() ? read : write;
  vision.constant("model_type", "\"siglip_vision_model\"");
  own.vision_model_type = VisionModel::kSiglip;
  vision.integer("hidden_size", own.vision_hidden_size, 768);
  vision.integer("intermediate_size", own.vision_ffn_hidden_size, 3072);
  vision.integer("num_hidden_layers", own.vision_num_layers, 12);
  vision.integer("num_attention_heads", own.vision_num_attention_heads, 12);
  vision.integer("image_size", own.img_h, 224);
  vision.integer("patch_size", own.patch_dim, 16);
  vision.number("layer_norm_eps", own.vision_layernorm_epsilon, 1e-6);
  activation_field(vision, "hidden_act", own.vision_activation, "gelu_pytorch_tanh");
  vision.constant("num_channels", "3");
  if (f.reading()) {
    own.img_w = own.img_h;
    return;
  }
  MEGATRON_CHECK(own.img_h == own.img_w,
                 "encoders of Hugging Face's Gemma 3 read squares, not pictures of ", own.img_h,
                 " x ", own.img_w);
  f.set("vision_config", vision.text());
}

// mm_tokens_per_image: the square of the features along a side.
void pooling_field(HfFields& f, VisionConfig& own) {
  int64_t tokens = own.features();
  f.integer("mm_tokens_per_image", tokens, 256);
  if (!f.reading()) return;
  int64_t side = 1;
  while ((side + 1) * (side + 1) <= tokens) ++side;
  MEGATRON_CHECK(side * side == tokens && own.patch_rows() > 0 && own.patch_rows() % side == 0,
                 f.name(), ": mm_tokens_per_image ", tokens, " of ", own.patch_rows(), " x ",
                 own.patch_rows(), " patches is not built, only the square of a divisor of ",
                 own.patch_rows());
  own.vision_pooling = own.patch_rows() / side;
}

void gemma3_fields(HfFields& f, ModelConfig& c) {
  MimoConfig& own = c.own.ensure<MimoConfig>();
  if (f.reading()) {
    own.vision_class_token = false;
    own.vision_projection_type = VisionProjection::kAffine;
    own.vision_projection_bias = false;
    own.vision_projection_norm = own.bidirectional_images = true;
  }
  text_fields(f, c, "gemma3_text", kGemma3Defaults);
  siglip_fields(f, own);
  pooling_field(f, own);
  image_token_field(f, own, 262144);
  MEGATRON_CHECK(own.is_siglip() && own.vision_qkv_bias && own.vision_projection_norm &&
                     own.bidirectional_images && !own.vision_projection_bias &&
                     own.vision_projection_type == VisionProjection::kAffine,
                 "a gemma3 has SigLIP, a norm and one linear without biases as its projector, and "
                 "images in both directions (--bidirectional-images)");
}

// Of Qwen2.5-VL, the whole and its text.
constexpr std::string_view kQwenTextKeys[] = {"attention_dropout",   "head_dim",
                                              "hidden_act",          "hidden_size",
                                              "image_token_id",      "intermediate_size",
                                              "layer_types",         "max_position_embeddings",
                                              "max_window_layers",   "num_attention_heads",
                                              "num_hidden_layers",   "num_key_value_heads",
                                              "quantization_config", "rms_norm_eps",
                                              "rope_parameters",     "rope_scaling",
                                              "rope_theta",          "sliding_window",
                                              "text_config",         "use_sliding_window",
                                              "video_token_id",      "vision_config",
                                              "vision_end_token_id", "vision_start_token_id",
                                              "vision_token_id",     "vocab_size"};

void qwen_vl_text(HfFields& f, ModelConfig& c) {
  TransformerConfig& t = c.transformer;
  sizes(f, c);
  query_groups(f, t, 8);
  f.integer("max_position_embeddings", t.max_position_embeddings, 32768);
  f.number("rms_norm_eps", t.layernorm_epsilon, 1e-5);
  f.number("initializer_range", t.init_method_std, 0.02);
  head_dim(f, t, /*always=*/false);
  f.number("attention_dropout", t.attention_dropout, 0.0);
  f.constant("hidden_act", "\"silu\"");
  f.constant("use_sliding_window", "false");
  if (f.reading())
    for (const std::string& type : f.texts("layer_types"))
      MEGATRON_CHECK(type == "full_attention", f.name(), ": layer_types has ", type,
                     ", without use_sliding_window only full_attention");
  f.rope(t, {.theta = 1000000, .sections = true});
}

// The width of the language model, by its key in the encoder's part.
void language_width(HfFields& vision, const std::string& name, std::string_view key,
                    int64_t language_hidden) {
  int64_t width = language_hidden;
  vision.integer(key, width, 3584);
  MEGATRON_CHECK(width == language_hidden, name, ": ", key, " is ", width,
                 ", that of the language model is ", language_hidden);
}

void qwen2_vision_fields(HfFields& vision, const std::string& name, VisionConfig& own,
                         int64_t language_hidden) {
  own.vision_model_type = VisionModel::kQwen2;
  vision.integer("embed_dim", own.vision_hidden_size, 1280);
  vision.integer("depth", own.vision_num_layers, 32);
  vision.integer("num_heads", own.vision_num_attention_heads, 16);
  MEGATRON_CHECK(vision.reading() || own.vision_ffn_hidden_size % own.vision_hidden_size == 0,
                 "MLPs of a qwen2_vl's encoder have a multiple of its width");
  int64_t ratio = own.vision_ffn_hidden_size / own.vision_hidden_size;
  vision.integer("mlp_ratio", ratio, 4);
  own.vision_ffn_hidden_size = ratio * own.vision_hidden_size;
  activation_field(vision, "hidden_act", own.vision_activation, "quick_gelu");
  language_width(vision, name, "hidden_size", language_hidden);
}

void qwen2_5_vision_fields(HfFields& vision, const std::string& name, VisionConfig& own,
                           int64_t language_hidden) {
  own.vision_model_type = VisionModel::kQwen25;
  vision.integer("hidden_size", own.vision_hidden_size, 3584);
  vision.integer("depth", own.vision_num_layers, 32);
  vision.integer("num_heads", own.vision_num_attention_heads, 16);
  vision.integer("intermediate_size", own.vision_ffn_hidden_size, 3420);
  activation_field(vision, "hidden_act", own.vision_activation, "silu");
  language_width(vision, name, "out_hidden_size", language_hidden);
  vision.integer("window_size", own.vision_window_size, 112);
  vision.integers("fullatt_block_indexes", own.vision_whole_picture_layers, {7, 15, 23, 31});
}

void qwen_vision_fields(HfFields& f, VisionConfig& own, int64_t language_hidden, bool windows) {
  const std::string part = f.part("vision_config"), name = cat(f.name(), ": vision_config");
  HfFields read(part, name), write = HfFields::writer(part);
  HfFields& vision = f.reading() ? read : write;
  if (windows) {
    constexpr std::string_view kKeys[] = {"depth",
                                          "fullatt_block_indexes",
                                          "hidden_act",
                                          "hidden_size",
                                          "in_channels",
                                          "in_chans",
                                          "intermediate_size",
                                          "num_heads",
                                          "out_hidden_size",
                                          "patch_size",
                                          "rope_parameters",
                                          "spatial_merge_size",
                                          "spatial_patch_size",
                                          "temporal_patch_size",
                                          "tokens_per_second",
                                          "window_size"};
    if (f.reading()) vision.only(kKeys);
    qwen2_5_vision_fields(vision, name, own, language_hidden);
  } else {
    qwen2_vision_fields(vision, name, own, language_hidden);
  }
  vision.integer("patch_size", own.patch_dim, 14);
  vision.constant("spatial_merge_size", "2");
  vision.constant("temporal_patch_size", "2");
  vision.constant("in_channels", "3");
  if (!f.reading()) return f.set("vision_config", vision.text());
  vision.constant("in_chans", "3");  // of transformers 4
  HfFields rope(vision.part("rope_parameters"), cat(name, ": rope_parameters"));
  rope.constant("rope_type", "\"axial\"");
  rope.constant("rope_theta", "10000.0");
}

// The text's keys lie in text_config, or as transformers 4 wrote them at the top.
void qwen_vl_fields(HfFields& f, ModelConfig& c, bool windows) {
  MimoConfig& own = c.own.ensure<MimoConfig>();
  TransformerConfig& t = c.transformer;
  const std::string part = f.part("text_config");
  const bool at_top = part == "{}" && f.find_integer("hidden_size").has_value();
  if (f.reading()) {
    find_hf_family("qwen2")->preset(t);
    own.vision_class_token = false;
    own.pixel_shuffle = true;
    own.vision_layernorm_epsilon = 1e-6;
    if (windows) f.only(kQwenTextKeys);
  }
  if (at_top) {
    qwen_vl_text(f, c);
  } else {
    HfFields read(part, cat(f.name(), ": text_config")), write = HfFields::writer(part);
    HfFields& text = f.reading() ? read : write;
    text.constant("model_type", windows ? "\"qwen2_5_vl_text\"" : "\"qwen2_vl_text\"");
    if (windows && f.reading()) text.only(kQwenTextKeys);
    qwen_vl_text(text, c);
    if (!f.reading()) f.set("text_config", text.text());
  }
  tied(f, t, false);
  MEGATRON_CHECK(f.reading() || own.has_windows() == windows,
                 windows ? "a qwen2_5_vl has the encoder of Qwen 2.5 (--vision-model-type qwen2_5)"
                         : "a qwen2_vl has the encoder of Qwen 2 (--vision-model-type qwen2)");
  qwen_vision_fields(f, own, t.hidden_size, windows);
  f.integer("image_token_id", own.image_token_id, 151655);
  if (f.reading()) own.vision_projection_ffn_hidden_size = own.feature_size();
  MEGATRON_CHECK(
      own.has_own_sizes() && own.pixel_shuffle && own.vision_qkv_bias &&
          own.vision_projection_bias && !own.vision_projection_norm && !own.bidirectional_images &&
          own.vision_projection_activation == VisionActivation::kGelu &&
          own.vision_projection_type == VisionProjection::kMlp &&
          own.vision_layernorm_epsilon == 1e-6 &&
          own.vision_projection_ffn_hidden_size == own.feature_size(),
      "a qwen2_vl or qwen2_5_vl has the encoder of Qwen 2 or 2.5 and two linears with biases, as "
      "wide as four features between them");
}

void qwen2_vl_fields(HfFields& f, ModelConfig& c) { qwen_vl_fields(f, c, /*windows=*/false); }
void qwen2_5_vl_fields(HfFields& f, ModelConfig& c) { qwen_vl_fields(f, c, /*windows=*/true); }

// SigLIP's head, which pools all of a picture to one vector.
std::vector<std::string> head_of_siglip(HfFields&, const ModelConfig&) {
  std::vector<std::string> names = {"vision_tower.head.probe",
                                    "vision_tower.head.attention.in_proj_weight",
                                    "vision_tower.head.attention.in_proj_bias"};
  for (const char* part : {"attention.out_proj", "layernorm", "mlp.fc1", "mlp.fc2"})
    for (const char* word : {"weight", "bias"})
      names.push_back(cat("vision_tower.head.", part, ".", word));
  return names;
}

TransformerConfig part_of(const ModelConfig& c, std::string_view ours) {
  return c.own.as_or_default<MimoConfig>().part(c.transformer, ours);
}

// The layers of CLIP behind the one whose output is taken, and the norm behind them.
std::vector<std::string> behind_clip(HfFields& f, const ModelConfig& c) {
  HfFields vision(f.part("vision_config"), f.name());
  const bool given = f.part("vision_config") != "{}";
  const TakenLayer taken = read_taken(f, vision, given ? 12 : 24);
  std::vector<std::string> names;
  const auto add = [&](std::string name) {
    const size_t at = name.find('@');
    for (const char* word : {"weight", "bias"})
      names.push_back(std::string(name).replace(at, 1, word));
  };
  for (int64_t i = c.own.as<MimoConfig>()->vision_num_layers; i < taken.all; ++i)
    for (const HfRow& row : kClip)
      for (const std::string_view theirs : row.theirs)
        if (theirs.find('*') != theirs.npos) add(with_indices(theirs, {&i, 1}));
  add("vision_tower.post_layernorm.@");
  return names;
}

}  // namespace

namespace {

HfFamily image_family(std::string_view type, std::string_view architecture,
                      std::vector<std::span<const HfRow>> rows,
                      void (*fields)(HfFields&, ModelConfig&)) {
  return {.model_type = type,
          .architecture = architecture,
          .rows = std::move(rows),
          .preset = [](TransformerConfig&) {},
          .fields = fields,
          .prefix = "",
          .layers = "language_model.model.layers.*",
          .waived = {"language_model.model.layers.*.self_attn.rotary_emb.inv_freq",
                     "vision_tower.embeddings.position_ids"},
          .type = "mimo",
          .our_layers = "language_model.decoder.layers.*",
          .beginnings = kBeginnings,
          .part = part_of,
          .carried = behind_clip};
}

}  // namespace

std::vector<HfFamily> multimodal_hf_families() {
  const std::span<const HfRow> language = language_rows();
  HfFamily internvl = image_family("internvl", "InternVLForConditionalGeneration",
                                   {language, kInternVit, kProjector}, internvl_fields);
  const auto nothing = [](HfFields&, const ModelConfig&) { return std::vector<std::string>(); };
  internvl.carried = nothing;
  HfFamily gemma3 =
      image_family("gemma3", "Gemma3ForConditionalGeneration",
                   {gemma3_language_rows(), kClip, kSiglipEnds, kGemma3Projector}, gemma3_fields);
  gemma3.carried = head_of_siglip;
  HfFamily qwen2_vl =
      image_family("qwen2_vl", "Qwen2VLForConditionalGeneration",
                   {qwen2_language_rows(), kQwenVision, kQwen2Mlps}, qwen2_vl_fields);
  HfFamily qwen2_5_vl =
      image_family("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration",
                   {qwen2_language_rows(), kQwenVision, kQwen25Mlps}, qwen2_5_vl_fields);
  for (HfFamily* family : {&qwen2_vl, &qwen2_5_vl}) {
    family->layers = "model.layers.*";
    family->waived = {"model.layers.*.self_attn.rotary_emb.inv_freq"};
    family->beginnings = {{"model.visual.", "visual."}, {"model.language_model.", "model."}};
    family->carried = nothing;
  }
  return {image_family("llava", "LlavaForConditionalGeneration",
                       {language, kClip, kClipEnds, kProjector}, llava_of_one_picture),
          image_family("llava_next", "LlavaNextForConditionalGeneration",
                       {language, kClip, kClipEnds, kNewline, kProjector}, llava_next_fields),
          std::move(internvl),
          std::move(gemma3),
          std::move(qwen2_vl),
          std::move(qwen2_5_vl)};
}

}  // namespace megatron
