#include "megatron/interop/huggingface/hf_encoders.h"

#include <nlohmann/json.hpp>
#include <set>
#include <utility>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/format.h"
#include "megatron/interop/foreign_tensors.h"
#include "megatron/interop/huggingface/hf_folder.h"
#include "megatron/transformer/config/lora.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;
using Beginnings = std::vector<std::pair<std::string_view, std::string_view>>;

// An encoder alone, or beside one of texts: the family whose tables and keys are its own, too.
struct AloneRow {
  EncoderMedia media;
  std::string_view model_type;
  std::string_view part;  // the key of config.json under which the encoder is; empty: all of it
  std::string_view family;
  Json (*config)(Json encoder);  // of a model of the family with this encoder
  // {in the file, in the family's table}
  Beginnings beginnings;
};

Json with_clip(Json encoder) {
  encoder["model_type"] = "clip_vision_model";
  return {{"vision_config", std::move(encoder)}};
}

Json with_siglip(Json encoder) {
  constexpr int64_t kImage = 224, kPatch = 16;  // what transformers takes
  encoder["model_type"] = "siglip_vision_model";
  Json whole = {{"vision_config", encoder}};
  const auto size = [&](const char* key, int64_t missing) {
    const Json value = encoder.value(key, Json(missing));
    return value.is_number_integer() ? value.get<int64_t>() : 0;
  };
  const int64_t image = size("image_size", kImage), patch = size("patch_size", kPatch);
  if (image > 0 && patch > 0 && image / patch < (1 << 20))
    whole["mm_tokens_per_image"] = (image / patch) * (image / patch);
  return whole;
}

Json with_whisper(Json config) {
  Json encoder = {
      {"model_type", "qwen2_audio_encoder"}, {"d_model", 384},          {"encoder_layers", 4},
      {"encoder_attention_heads", 6},        {"encoder_ffn_dim", 1536}, {"num_mel_bins", 80}};
  for (const char* key :
       {"d_model", "encoder_layers", "encoder_attention_heads", "encoder_ffn_dim", "num_mel_bins",
        "max_source_positions", "activation_function", "scale_embedding"})
    if (config.contains(key) && !config[key].is_null()) encoder[key] = config[key];
  return {{"audio_config", std::move(encoder)}};  // dropout is that of the run
}

const std::vector<AloneRow>& alone_rows() {
  static const Beginnings of_images = {{"vision_model.", "vision_tower."}, {"", "vision_tower."}};
  static const Beginnings of_sounds = {
      {"model.encoder.", "audio_tower."}, {"encoder.", "audio_tower."}, {"", "audio_tower."}};
  constexpr EncoderMedia kImages = EncoderMedia::kImages;
  static const std::vector<AloneRow> rows = {
      {kImages, "clip", "vision_config", "llava", with_clip, of_images},
      {kImages, "clip_vision_model", "", "llava", with_clip, of_images},
      {kImages, "siglip", "vision_config", "gemma3", with_siglip, of_images},
      {kImages, "siglip_vision_model", "", "gemma3", with_siglip, of_images},
      {EncoderMedia::kSounds, "whisper", "", "qwen2_audio", with_whisper, of_sounds}};
  return rows;
}

const char* name_of(EncoderMedia media) {
  return media == EncoderMedia::kImages ? "images" : "sounds";
}

bool has_encoder(const MimoConfig& own, EncoderMedia media) {
  return media == EncoderMedia::kImages ? own.sees() : own.hears();
}

// What a folder says of its encoder.
struct Described {
  const HfFamily* family = nullptr;  // whose table has its names
  MimoConfig own;
  bool alone = false;
  Beginnings beginnings;  // of names, besides those of the table
};

std::string types_with(EncoderMedia media) {
  std::string names;
  for (const AloneRow& row : alone_rows())
    if (row.media == media) names += cat(row.model_type, ", ");
  return names + (media == EncoderMedia::kImages
                      ? "llava, llava_next, internvl, gemma3, qwen2_vl, qwen2_5_vl"
                      : "qwen2_audio, voxtral");
}

Described describe(const fs::path& folder, EncoderMedia media) {
  const std::string name = (folder / kHfConfig).string();
  MEGATRON_CHECK(is_hf_folder(folder), folder.string(), ": is no folder of Hugging Face with a ",
                 kHfConfig, ", of which an encoder of ", name_of(media), " is read");
  const std::string text = read_file(folder / kHfConfig);
  std::string type;
  HfFields(text, name).text("model_type", type, "");
  Described found;
  for (const AloneRow& row : alone_rows()) {
    if (row.media != media || row.model_type != type) continue;
    const Json part =
        row.part.empty() ? Json::parse(text) : Json::parse(HfFields(text, name).part(row.part));
    Json whole = row.config(part);
    whole["model_type"] = row.family;
    HfModel model = parse_hf_config(whole.dump(), name);
    found = {model.family, *model.config.own.as<MimoConfig>(), true, row.beginnings};
  }
  const HfFamily* family = find_hf_family(type);
  if (found.family == nullptr && family != nullptr && family->type == "mimo") {
    HfModel model = read_hf_config(folder);
    found = {model.family, *model.config.own.as<MimoConfig>(), false, {}};
  }
  MEGATRON_CHECK(found.family != nullptr && has_encoder(found.own, media), folder.string(),
                 ": holds no encoder of ", name_of(media), ": its model is of the type \"", type,
                 "\"\nhint: types that hold one are: ", types_with(media));
  return found;
}

// The encoder alone, with the defaults of features and projector.
void take_encoder(const VisionConfig& from, VisionConfig& to) {
  to = VisionConfig();
  to.vision_model_type = from.vision_model_type;
  to.vision_num_layers = from.vision_num_layers;
  to.vision_hidden_size = from.vision_hidden_size;
  to.vision_ffn_hidden_size = from.vision_ffn_hidden_size;
  to.vision_num_attention_heads = from.vision_num_attention_heads;
  to.vision_layernorm_epsilon = from.vision_layernorm_epsilon;
  to.vision_activation = from.vision_activation;
  to.img_h = from.img_h;
  to.img_w = from.img_w;
  to.patch_dim = from.patch_dim;
  to.vision_class_token = from.vision_class_token;
  to.vision_qkv_bias = from.vision_qkv_bias;
}

void take_encoder(const AudioConfig& from, AudioConfig& to) {
  to = AudioConfig();
  to.audio_model_type = from.audio_model_type;
  to.audio_num_layers = from.audio_num_layers;
  to.audio_hidden_size = from.audio_hidden_size;
  to.audio_ffn_hidden_size = from.audio_ffn_hidden_size;
  to.audio_num_attention_heads = from.audio_num_attention_heads;
  to.audio_mel_bins = from.audio_mel_bins;
}

template <class Part>
void take(const Described& found, MimoConfig& own) {
  if (found.alone)
    take_encoder(static_cast<const Part&>(found.own), static_cast<Part&>(own));
  else
    static_cast<Part&>(own) = found.own;
}

// The name of a tensor of the family's table in the files.
std::string name_in_files(const std::string& name, const Described& found,
                          const TensorFiles& files) {
  if (files.places().contains(name)) return name;
  for (const Beginnings* beginnings : {&found.family->beginnings, &found.beginnings})
    for (const auto& [theirs, known] : *beginnings)
      if (name.starts_with(known))
        if (std::string other = cat(theirs, name.substr(known.size()));
            files.places().contains(other))
          return other;
  return name;
}

void add(const HfTensor& tensor, const std::string& name, const TensorFiles& files,
         ForeignManifest& manifest) {
  const auto place = files.places().find(name);
  if (place == files.places().end())
    return manifest.add_problem(cat(name, " is not in the files, the encoder of this run has it"));
  const SafetensorsEntry& entry = *place->second.entry;
  if (entry.shape != tensor.stored_shape())
    return manifest.add_problem(cat(name, " has shape ", format_shape(entry.shape),
                                    ", by the flags of this run it is ",
                                    format_shape(tensor.stored_shape())));
  manifest.add_zeros(tensor.ours, tensor.our_shape, entry.dtype, tensor.zeros);
  manifest.add_rows(tensor.ours, tensor.our_shape, place->second, view_of(tensor), tensor.runs);
}

}  // namespace

void read_hf_encoder_config(const fs::path& folder, EncoderMedia media, MimoConfig& own) {
  const Described found = describe(folder, media);
  if (media == EncoderMedia::kImages)
    take<VisionConfig>(found, own);
  else
    take<AudioConfig>(found, own);
}

HfEncoder open_hf_encoder(const fs::path& folder, EncoderMedia media, const ModelConfig& config,
                          const ParameterShapes& parameters) {
  const bool images = media == EncoderMedia::kImages;
  const Described found = describe(folder, media);
  const auto& own = config.own.as_or_default<MimoConfig>();
  MEGATRON_CHECK(images ? own.vision_model_type == found.own.vision_model_type
                        : own.audio_model_type == found.own.audio_model_type,
                 folder.string(), ": its encoder of ", name_of(media),
                 " is of another type than that of this run\nhint: leave ",
                 images ? "--vision-model-type" : "--audio-model-type",
                 " out: the folder says which it is");
  const std::string_view module = images ? "vision_model." : "audio_model.";
  ParameterShapes wanted;
  for (const auto& parameter : parameters)
    if (parameter.first.starts_with(module) && !is_lora_parameter(parameter.first))
      wanted.push_back(parameter);
  const TensorFiles files = TensorFiles::of_hf_folder(folder);
  const TransformerConfig part =
      images ? own.encoder(config.transformer) : own.audio_encoder(config.transformer);
  const std::vector<HfTensor> tensors =
      hf_tensors(*found.family, part, wanted, [&](const std::string& name) {
        return files.places().contains(name_in_files(name, found, files));
      });
  ForeignManifest manifest(folder.string());
  manifest.set_files(files.stored());
  std::set<std::string> read;
  for (const HfTensor& tensor : tensors) {
    const std::string name = name_in_files(tensor.name, found, files);
    if (files.places().contains(name)) read.insert(name);
    add(tensor, name, files, manifest);
  }
  MEGATRON_CHECK(!read.empty(), folder.string(), ": its files hold no encoder of ", name_of(media),
                 ": none of the tensors has a name such as ", tensors.front().name);
  HfEncoder encoder{std::move(manifest).open(folder)};
  for (const auto& [name, place] : files.places()) {
    if (read.contains(name)) continue;
    if (encoder.num_unread++ == 0) encoder.unread = name;
  }
  return encoder;
}

}  // namespace megatron
