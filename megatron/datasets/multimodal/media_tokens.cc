#include "megatron/datasets/multimodal/media_tokens.h"

#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/media/log_mel.h"
#include "megatron/media/tiling.h"
#include "megatron/tokenizers/rendered_text.h"

namespace megatron {
namespace {

using Family = MediaRules::Family;
using Json = nlohmann::json;

constexpr std::pair<const char*, Family> kFamilies[] = {{"llava", Family::kLlava},
                                                        {"llava_next", Family::kLlavaNext},
                                                        {"internvl", Family::kInternVl},
                                                        {"gemma3", Family::kGemma3},
                                                        {"qwen2_vl", Family::kQwen2Vl},
                                                        {"qwen2_5_vl", Family::kQwen2Vl},
                                                        {"qwen2_audio", Family::kQwen2Audio},
                                                        {"voxtral", Family::kVoxtral}};

// Members of config.json, with the file's name for messages.
struct ModelFile {
  std::string path;
  Json json;

  template <class T>
  T get(const Json& object, const char* key, T otherwise) const {
    if (!object.is_object() || !object.contains(key) || object[key].is_null()) return otherwise;
    try {
      return object[key].get<T>();
    } catch (const Json::exception&) {
      throw_error(cat(path, ": \"", key, "\" is ", object[key].type_name()));
    }
  }
  // A side that is given alone or as both sides.
  int64_t side(const Json& object, const char* key, int64_t otherwise) const {
    if (object.is_object() && object.contains(key) && object[key].is_array() &&
        object[key].size() == 2 && object[key][0] == object[key][1] && object[key][0].is_number())
      return object[key][0].get<int64_t>();
    return get(object, key, otherwise);
  }
  // The id of a token that is given by one of two keys.
  int64_t id(const char* key, const char* older, int64_t otherwise) const {
    return get(json, key, get(json, older, otherwise));
  }
};

ModelFile model_file(const std::filesystem::path& folder) {
  const std::string path = (folder / "config.json").string();
  ModelFile out{path, Json::parse(read_file(path, uint64_t{64} << 20), nullptr, false)};
  MEGATRON_CHECK(out.json.is_object(), path, ": is no JSON object");
  return out;
}

Family family_of(const ModelFile& file) {
  const auto type = file.get(file.json, "model_type", std::string());
  for (const auto& [name, family] : kFamilies)
    if (type == name) return family;
  throw_error(cat(file.path, ": model_type is \"", type,
                  "\", expected llava, llava_next, internvl, gemma3, qwen2_vl, qwen2_5_vl, "
                  "qwen2_audio or voxtral"));
}

std::string token_of(const Tokenizer& tokenizer, int64_t id, const std::string& where) {
  MEGATRON_CHECK(id >= 0 && id < tokenizer.vocab_size(), where, ": the token of media ", id,
                 " is missing in the tokenizer, which has ", tokenizer.vocab_size(), " ids");
  const std::string token = tokenizer.id_to_token(static_cast<int32_t>(id));
  MEGATRON_CHECK(
      tokenizer.is_special(static_cast<int32_t>(id)) &&
          encode_rendered(tokenizer, token) == std::vector<int32_t>{static_cast<int32_t>(id)},
      where, ": the token of media ", id, " (\"", token,
      "\") is no special token that the tokenizer finds in text");
  return token;
}

ModalityRule rule_of(const Tokenizer& tokenizer, int64_t id, const std::string& where) {
  const std::string token = token_of(tokenizer, id, where);
  return {token, token, static_cast<int32_t>(id)};
}

ImageProcessorConfig processor_of(const std::filesystem::path& folder, std::string& text) {
  std::filesystem::path path = folder / "preprocessor_config.json";
  if (!std::filesystem::exists(path)) path = folder / "processor_config.json";
  text = read_file(path, uint64_t{1} << 20);
  return read_image_processor(text, path.string());
}

void read_image_rules(const ModelFile& file, const Tokenizer& tokenizer, MediaRules& out) {
  const Json vision = file.json.value("vision_config", Json::object());
  using Kind = ImageProcessorConfig::Kind;
  constexpr std::pair<Family, Kind> kKinds[] = {{Family::kLlava, Kind::kPlain},
                                                {Family::kLlavaNext, Kind::kLlavaNext},
                                                {Family::kInternVl, Kind::kInternVl},
                                                {Family::kGemma3, Kind::kGemma3},
                                                {Family::kQwen2Vl, Kind::kQwen2Vl}};
  for (const auto& [family, kind] : kKinds)
    MEGATRON_CHECK(family != out.family || kind == out.processor.kind, file.path,
                   ": the image processor ", out.processor.type, " is not one of this model");
  out.patch = file.side(vision, "patch_size", 14);
  switch (out.family) {
    case Family::kInternVl: {
      out.image =
          rule_of(tokenizer, file.id("image_token_id", "image_token_index", 151667), file.path);
      const int64_t side = file.side(vision, "image_size", 448) / out.patch;
      const auto ratio = file.get(file.json, "downsample_ratio", 0.5);
      const auto merged = static_cast<int64_t>(static_cast<double>(side) * ratio);
      out.rows_of_a_picture = merged * merged;
      out.before = "<img>";
      out.after = "</img>";
      break;
    }
    case Family::kGemma3:
      out.image =
          rule_of(tokenizer, file.id("image_token_index", "image_token_id", 262144), file.path);
      out.image->placeholder =
          token_of(tokenizer, file.id("boi_token_index", "boi_token_id", 255999), file.path);
      out.before = "\n\n" + out.image->placeholder;
      out.after =
          token_of(tokenizer, file.id("eoi_token_index", "eoi_token_id", 256000), file.path) +
          "\n\n";
      out.rows_of_a_picture = file.get(file.json, "mm_tokens_per_image", int64_t{256});
      break;
    case Family::kQwen2Vl:
      out.image =
          rule_of(tokenizer, file.id("image_token_id", "image_token_index", 151655), file.path);
      break;
    default: {
      out.image =
          rule_of(tokenizer, file.id("image_token_id", "image_token_index", 32000), file.path);
      const auto selected =
          file.get(file.json, "vision_feature_select_strategy", std::string("default"));
      MEGATRON_CHECK(selected == "default" || (selected == "full" && out.family == Family::kLlava),
                     file.path, ": vision_feature_select_strategy is \"", selected,
                     "\", expected default", out.family == Family::kLlava ? " or full" : "");
      if (selected == "full") out.class_rows = 1;
    }
  }
}

int64_t rows_of_size(const MediaRules& rules, ImageSize size) {
  return size.height / rules.patch * (size.width / rules.patch) + rules.class_rows;
}

MediumText image_text(const MediaRules& rules, ImageSize size) {
  const ImageProcessorConfig& processor = rules.processor;
  const ImagePlan plan = plan_image(processor, size);
  const std::string& token = rules.image->token;
  const auto pictures = std::ssize(plan.pictures);
  switch (rules.family) {
    case Family::kInternVl:
      return {rules.before + token + rules.after, {pictures * rules.rows_of_a_picture}};
    case Family::kGemma3: {
      const std::string one = rules.before + token + rules.after;
      MediumText out{one, std::vector<int64_t>(plan.pictures.size(), rules.rows_of_a_picture)};
      if (pictures == 1) return out;
      out.text = cat("Here is the original image ", one,
                     " and here are some crops to help you see better ");
      for (int64_t i = 1; i < pictures; ++i) out.text += (i > 1 ? " " : "") + one;
      return out;
    }
    case Family::kQwen2Vl: {
      const ImageSize resized = plan.pictures.at(0).size;
      const int64_t side = processor.patch * processor.merge;
      return {token, {resized.height / side * (resized.width / side)}};
    }
    case Family::kLlavaNext:
      return {token,
              {llava_next_tokens(size, processor.pinpoints, processor.size.height,
                                 processor.size.height / rules.patch)}};
    default:
      return {token, {rows_of_size(rules, plan.pictures.at(0).size)}};
  }
}

MediumText sound_text(const MediaRules& rules, int64_t samples, const std::string& where) {
  const bool voxtral = rules.heard == Family::kVoxtral;
  MEGATRON_CHECK(voxtral || samples <= kMelClip, where, ": the sound has ", samples,
                 " samples, more than the ", kMelClip, " of 30 s that the model hears");
  const int64_t rows = voxtral ? voxtral_tokens(samples) : qwen2_audio_tokens(mel_frames(samples));
  MEGATRON_CHECK(rows > 0, where, ": the sound has ", samples,
                 " samples, too few for one token of the model");
  return {rules.sound->token, {rows}};
}

}  // namespace

MediaRules read_media_rules(const std::filesystem::path& folder, const Tokenizer& tokenizer) {
  const ModelFile file = model_file(folder);
  MediaRules out;
  out.family = family_of(file);
  std::string processor;
  if (out.family == Family::kQwen2Audio || out.family == Family::kVoxtral) {
    out.heard = out.family;
    out.sound = rule_of(tokenizer,
                        file.id("audio_token_id", "audio_token_index",
                                out.family == Family::kVoxtral ? int64_t{24} : int64_t{151646}),
                        file.path);
    out.mel_bins =
        file.get(file.json.value("audio_config", Json::object()), "num_mel_bins", int64_t{128});
    MEGATRON_CHECK(out.mel_bins > 0, file.path, ": num_mel_bins is ", out.mel_bins);
  } else {
    out.processor = processor_of(folder, processor);
    read_image_rules(file, tokenizer, out);
  }
  out.description = cat(file.json.value("model_type", ""), " ", processor, " ", out.patch, " ",
                        out.class_rows, " ", out.rows_of_a_picture, " ",
                        out.image ? out.image->id : -1, " ", out.sound ? out.sound->id : -1);
  if (out.hears()) out.description += cat(" ", out.mel_bins);
  Json details = {{"model_type", file.json.value("model_type", "")}};
  if (out.sees()) {
    details.update(Json{{"image_processor", Json::parse(processor, nullptr, false)},
                        {"patch_size", out.patch},
                        {"class_rows", out.class_rows},
                        {"rows_of_a_picture", out.rows_of_a_picture},
                        {"image_token_id", out.image->id}});
  } else {
    details.update(Json{{"audio_token_id", out.sound->id}, {"num_mel_bins", out.mel_bins}});
  }
  out.details = details.dump();
  return out;
}

MediaRules read_media_rules(const std::filesystem::path& folder,
                            const std::filesystem::path& sounds, const Tokenizer& tokenizer) {
  MediaRules out = read_media_rules(folder, tokenizer);
  if (sounds.empty()) return out;
  MEGATRON_CHECK(out.sees() && !out.hears(), folder.string(),
                 ": its model reads sounds, expected one that reads images beside ",
                 sounds.string());
  const MediaRules heard = read_media_rules(sounds, tokenizer);
  MEGATRON_CHECK(heard.hears() && !heard.sees(), sounds.string(),
                 ": its model reads images, expected one that reads sounds");
  MEGATRON_CHECK(heard.sound->id != out.image->id, folder.string(), " and ", sounds.string(), ": ",
                 out.image->token, " is the token of images and of sounds");
  out.sound = heard.sound;
  out.heard = heard.heard;
  out.mel_bins = heard.mel_bins;
  out.description += cat("; ", heard.description);
  out.details.replace(out.details.size() - 1, 1, cat(",\"sounds\":", heard.details, "}"));
  return out;
}

MediumText medium_text(const MediaRules& rules, const MediumFacts& medium,
                       const std::string& where) {
  const bool known =
      medium.kind == MediaKind::kImage ? rules.image.has_value() : rules.sound.has_value();
  MEGATRON_CHECK(known, where, ": there is ",
                 medium.kind == MediaKind::kImage ? "an image" : "a sound",
                 ", which the model does not read");
  if (medium.kind == MediaKind::kSound) return sound_text(rules, medium.samples, where);
  try {
    return image_text(rules, medium.size);
  } catch (const Error& error) {
    throw_error(cat(where, ": ", error.what()));
  }
}

}  // namespace megatron
