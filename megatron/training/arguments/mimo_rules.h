// What the flags of a run that trains a model with images mean together. Columns of the table of
// tasks.
#pragma once

#include <optional>
#include <string>

#include "megatron/training/arguments/arguments.h"
#include "megatron/transformer/config/proof/proof_size.h"

namespace megatron {

// Images that cannot be decoded: end the run, or their samples count nothing.
enum class OnBadMedia { kError, kSkip };
inline constexpr int64_t kMostBadMedia = 100;

// Where images come from, and what becomes of rows with them.
struct MimoDataConfig : Config {
  std::string media_model;        // folder of a Hugging Face model
  std::string audio_media_model;  // of one that hears, beside one that sees
  std::string media_root;
  // Folders of Hugging Face whose encoders a new run starts from
  std::string pretrained_vision_model, pretrained_audio_model;
  bool escape_modality_text = false;
  bool loss_at_media = true;
  int64_t max_patches_per_sequence = 0;
  int64_t shuffle_window = 0;
  int64_t max_image_pixels = 89'478'485;
  int64_t max_images_per_sample = 64;
  OnBadMedia on_bad_media = OnBadMedia::kError;
  std::optional<int64_t> max_bad_media;  // default: kMostBadMedia
  bool balance_images = true;
  // Of made-up samples: how many images each has (0: none, one or two); of images of their own
  // sizes the median of their patches (0: a few) and the standard deviation of its logarithm
  int64_t mock_images = 0;
  int64_t mock_image_patches = 0;
  double mock_image_sigma = 0.0;
  void fields(FieldVisitor& visitor) override;
  void validate(Violations& violations) const override;
};

void validate_mimo(const Arguments& arguments, Violations& violations);

// The tiny model keeps the kind of encoder, several layers and heads, and pictures of several
// patches.
void shrink_mimo(Arguments& arguments, const Arguments& before, Shrinker& shrinker);

}  // namespace megatron
