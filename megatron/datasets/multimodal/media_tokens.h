// What a medium becomes in a text: how many rows of features, and which tokens around them, as the
// processors of transformers write it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "megatron/datasets/multimodal/multimodal_row.h"
#include "megatron/media/image_processor.h"
#include "megatron/tokenizers/tokenizer.h"

namespace megatron {

// What is known of a medium without decoding it.
struct MediumFacts {
  MediaKind kind = MediaKind::kImage;
  ImageSize size;                // after its orientation
  int64_t samples = 0;           // of sound, at 16 kHz
  bool bad_orientation = false;  // ImageHeader's, as it is read: an index counts it, and keeps none
};

// A medium as text in which `token` occurs once for each run of rows.
struct MediumText {
  std::string text;
  std::vector<int64_t> rows;  // of each run
};

// How media of one kind are written.
struct ModalityRule {
  std::string placeholder;  // in the text of a chat template
  std::string token;        // I, whose rows are features; one token of the tokenizer
  int32_t id = -1;
};

// The rules of a model: those of its config.json, and of its image processor; or of a model that
// sees and hears, those of two.
struct MediaRules {
  enum class Family { kLlava, kLlavaNext, kInternVl, kGemma3, kQwen2Vl, kQwen2Audio, kVoxtral };
  Family family = Family::kLlava;            // of images; of a model that only hears, as `heard`
  Family heard = Family::kQwen2Audio;        // of sounds
  std::optional<ModalityRule> image, sound;  // nullopt: not of this model
  ImageProcessorConfig processor;
  int64_t patch = 14;
  int64_t class_rows = 0;           // of a picture, beside its patches
  int64_t rows_of_a_picture = 256;  // InternVL's tiles, Gemma 3's pictures
  int64_t mel_bins = 128;           // features of a frame of sound
  std::string before, after;        // InternVL, Gemma 3: tokens around the rows
  std::string description;          // all of it, for fingerprints
  std::string details;              // the same as a JSON object, for messages

  // Of the encoder's patches: sides of blocks that become one feature, and how often a still image
  // is repeated.
  bool sees() const { return image.has_value(); }
  bool hears() const { return sound.has_value(); }
  const std::optional<ModalityRule>& of(MediaKind kind) const {
    return kind == MediaKind::kImage ? image : sound;
  }
  int64_t block() const { return family == Family::kQwen2Vl ? processor.merge : 1; }
  int64_t frames() const { return family == Family::kQwen2Vl ? processor.frames : 1; }
};

// Reads config.json and preprocessor_config.json (or processor_config.json) of a folder of
// transformers. Throws Error: another model, a token that the tokenizer does not have, what is not
// built.
MediaRules read_media_rules(const std::filesystem::path& folder, const Tokenizer& tokenizer);
// The rules of images of `folder` and those of sounds of `sounds`; empty: those of `folder` alone.
// Throws Error if one of them is the other's, and for one token of both.
MediaRules read_media_rules(const std::filesystem::path& folder,
                            const std::filesystem::path& sounds, const Tokenizer& tokenizer);

// Throws Error that begins with `where`: a medium of a kind that the model does not have, sound
// that is too short or too long, an image that the processor cannot resize.
MediumText medium_text(const MediaRules& rules, const MediumFacts& medium,
                       const std::string& where);

}  // namespace megatron
