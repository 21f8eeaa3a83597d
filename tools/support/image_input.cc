#include "tools/support/image_input.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/datasets/multimodal/media_files.h"
#include "megatron/datasets/multimodal/multimodal_source.h"
#include "megatron/interop/huggingface/hf_folder.h"
#include "megatron/media/media_source.h"
#include "megatron/models/mimo/mimo_config.h"
#include "megatron/models/model_table.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;

}  // namespace

void ImageConfig::fields(FieldVisitor& v) {
  v.field("image", image,
          "one or more image files (JPEG, PNG, WebP) of the prompt, in the order of their "
          "placeholders; a prompt without placeholders has them first");
  v.field("audio", audio,
          "one or more sound files (WAV, FLAC, Ogg; one channel, 16 kHz) of the prompt, likewise; "
          "without placeholders they come behind the images");
  v.field("media_model", media_model,
          "folder of a Hugging Face model, whose config.json and image processor say what media "
          "become; empty: the model's own folder");
  v.field("audio_media_model", audio_media_model, kAudioMediaModelHelp);
}

std::vector<RowMedium> ImageConfig::read() const {
  std::vector<RowMedium> out = read_files(MediaKind::kImage, image);
  for (RowMedium& sound : read_files(MediaKind::kSound, audio)) out.push_back(std::move(sound));
  return out;
}

std::vector<RowMedium> read_files(MediaKind kind, const std::vector<std::string>& files) {
  std::vector<RowMedium> out;
  for (const std::string& file : files)
    out.push_back(
        {kind, file, read_file(file, static_cast<uint64_t>(MediaLimits().max_file_bytes))});
  return out;
}

bool names_media(std::string_view json) {
  const auto row = nlohmann::json::parse(json, nullptr, /*allow_exceptions=*/false);
  if (!row.is_object()) return false;
  for (const char* key : {"image", "images", "audio", "audios"})
    if (row.contains(key) && !row[key].is_null() && !(row[key].is_array() && row[key].empty()))
      return true;
  if (!row.contains("messages") || !row["messages"].is_array()) return false;
  return std::ranges::any_of(row["messages"], [](const nlohmann::json& message) {
    if (!message.is_object() || !message.contains("content") || !message["content"].is_array())
      return false;
    return std::ranges::any_of(message["content"], [](const nlohmann::json& part) {
      return part.is_object() && part.contains("type") && part["type"] != "text";
    });
  });
}

MultimodalRow row_with_bytes(const SourceSample& sample) {
  MultimodalRow row = sample.row;
  for (size_t i = 0; i < row.media.size(); ++i) {
    RowMedium& medium = row.media[i];
    if (medium.path.empty())
      medium.path = cat(name_of(medium.kind), " ", i + 1);
    else
      medium.bytes = read_range(sample.places[i], cat(sample.name, ": ", medium.path));
  }
  return row;
}

MultimodalRow read_row_with_media(const std::string& json, const std::string& file,
                                  const std::string& media_root, const std::string& where) {
  SourceRow source;
  source.name = where;
  source.json = json;
  return row_with_bytes(read_sample(source, media_root_of(media_root, file)));
}

std::vector<RowMedium> read_media_of_row(const std::string& json, const std::string& file,
                                         const std::string& media_root, const std::string& where) {
  SourceSample sample{where, {}, {}};
  sample.row.media = parse_row_media(json, where);
  const fs::path root = media_root_of(media_root, file);
  for (const RowMedium& medium : sample.row.media)
    sample.places.push_back(medium.path.empty() ? FileRange()
                                                : file_below(root, medium.path, where));
  return row_with_bytes(sample).media;
}

void check_reads(const std::vector<MediaKind>& kinds, const ModelConfig& config,
                 const std::string& model) {
  for (const MediaKind kind : kinds) {
    const std::string name = kind == MediaKind::kImage ? "images" : "sounds";
    MEGATRON_CHECK(
        reads_media(config, kind), model, ": a model of type ", find_model_type(config.type).title,
        config.own.as<MimoConfig>() == nullptr ? "" : " without an encoder of them", " reads no ",
        name, "\nhint: leave them out, or give a model with an encoder of ", name);
  }
}

std::vector<MediaKind> kinds_of(const std::vector<RowMedium>& media) {
  std::vector<MediaKind> out;
  for (const RowMedium& medium : media) out.push_back(medium.kind);
  return out;
}

namespace {

// Empty: there is none.
fs::path find_media_folder(const ImageConfig& config, const LoadedModel& model) {
  if (!config.media_model.empty()) return config.media_model;
  if (reads_both_media(model.config)) return {};  // no folder has such a model
  for (const char* file : {"preprocessor_config.json", "processor_config.json"})
    if (fs::exists(model.directory / file) && is_hf_folder(model.directory)) return model.directory;
  if (reads_media(model.config, MediaKind::kSound) && is_hf_folder(model.directory))
    return model.directory;
  return {};
}

}  // namespace

bool has_media_folders(const ImageConfig& config, const LoadedModel& model) {
  return !find_media_folder(config, model).empty() || !config.audio_media_model.empty();
}

MediaFolders media_folders(const ImageConfig& config, const LoadedModel& model) {
  const std::string& sounds = config.audio_media_model;
  const bool both = reads_both_media(model.config);
  MEGATRON_CHECK(both || sounds.empty(), "--audio-media-model ", sounds, ": ",
                 model.directory.string(), " does not read both images and sounds",
                 "\nhint: --media-model names the folder of a model that reads one of them");
  MEGATRON_CHECK(
      !both || (!sounds.empty() && !config.media_model.empty()), model.directory.string(),
      ": reads images and sounds, and ",
      config.media_model.empty() ? "--media-model" : "--audio-media-model",
      " is not given\nhint: --media-model names a folder of Hugging Face of a model that "
      "reads images, --audio-media-model one of a model that reads sounds");
  fs::path folder = find_media_folder(config, model);
  MEGATRON_CHECK(!folder.empty(), model.directory.string(),
                 ": has no image processor (preprocessor_config.json)",
                 "\nhint: --media-model names a folder of Hugging Face that has one");
  return {std::move(folder), sounds};
}

}  // namespace megatron
