// Images and sounds of prompts: --image, --audio, and rows that name theirs, for commands that read
// prompts.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "megatron/base/fields.h"
#include "megatron/datasets/multimodal/multimodal_source.h"
#include "megatron/inference/images/image_prompts.h"
#include "megatron/interop/load_model.h"

namespace megatron {

struct ImageConfig {
  std::vector<std::string> image, audio;
  std::string media_model, audio_media_model;

  void fields(FieldVisitor& visitor);
  bool given() const { return !image.empty() || !audio.empty(); }
  const char* flag() const { return image.empty() ? "--audio" : "--image"; }  // that is given
  std::vector<RowMedium> read() const;  // images, then sounds, as read_files() does
};

// The files, as media with their bytes. Throws Error that names the file.
std::vector<RowMedium> read_files(MediaKind kind, const std::vector<std::string>& files);

// Whether a row names media, or has a place for one.
bool names_media(std::string_view json);

// The row with the bytes of its media that are files, and names of those that it held. Throws Error
// that names the medium.
MultimodalRow row_with_bytes(const SourceSample& sample);

// The messages of a row, or the media of a prompt, with the bytes of the media. `media_root`:
// their folder; empty: that of `file`. Throws Error that begins with `where`.
MultimodalRow read_row_with_media(const std::string& json, const std::string& file,
                                  const std::string& media_root, const std::string& where);
std::vector<RowMedium> read_media_of_row(const std::string& json, const std::string& file,
                                         const std::string& media_root, const std::string& where);

// Throws Error unless the model reads media of these kinds.
void check_reads(const std::vector<MediaKind>& kinds, const ModelConfig& config,
                 const std::string& model);
// Of the media of a row, and those that --image and --audio give.
std::vector<MediaKind> kinds_of(const std::vector<RowMedium>& media);

inline constexpr char kAudioMediaModelHelp[] =
    "folder of a Hugging Face model that hears, which says what sounds become: of a model that "
    "reads images and sounds, beside --media-model for its images";

// The folders that say what media become: --media-model, or else the model's own, and
// --audio-media-model of a model that reads both. Throws Error if they are not those of the model.
MediaFolders media_folders(const ImageConfig& config, const LoadedModel& model);
bool has_media_folders(const ImageConfig& config, const LoadedModel& model);

}  // namespace megatron
