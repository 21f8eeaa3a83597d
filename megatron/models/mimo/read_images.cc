#include "megatron/models/mimo/read_images.h"

#include "megatron/base/check.h"

namespace megatron {

namespace {

using Family = MediaRules::Family;

void same(const char* flag, int64_t model, int64_t data, const std::string& folder,
          const char* what) {
  MEGATRON_CHECK(model == data, flag, " is ", model, ", ", folder, " has ", data, " as ", what,
                 "\nhint: the model and --media-model must be the same");
}

const char* read_by(bool sees, bool hears) {
  return sees && hears ? "images and sounds" : sees ? "images" : "sounds";
}

void check_sounds(const MediaRules& rules, const MimoConfig& own, const std::string& folder) {
  same("--audio-token-id", own.audio_token_id, rules.sound->id, folder, "the token of sounds");
  same("--audio-mel-bins", own.audio_mel_bins, rules.mel_bins, folder, "features of a frame");
  MEGATRON_CHECK(own.stacks() == (rules.heard == Family::kVoxtral), folder,
                 ": --audio-features stacked is for models of type voxtral, and needed for them");
}

void check_images(const MediaRules& rules, const MimoConfig& own, const std::string& folder) {
  MEGATRON_CHECK(rules.family == Family::kLlava || rules.family == Family::kLlavaNext ||
                     rules.family == Family::kInternVl || rules.family == Family::kGemma3 ||
                     rules.family == Family::kQwen2Vl,
                 folder,
                 ": images are built for models of type llava, llava_next, internvl, gemma3, "
                 "qwen2_vl and qwen2_5_vl");
  const auto equal = [&](const char* flag, int64_t model, int64_t data, const char* what) {
    same(flag, model, data, folder, what);
  };
  equal("--image-token-id", own.image_token_id, rules.image->id, "the token of images");
  equal("--patch-dim", own.patch_dim, rules.patch, "side of a patch");
  MEGATRON_CHECK(own.has_own_sizes() == (rules.family == Family::kQwen2Vl), folder,
                 ": --vision-model-type qwen2 and qwen2_5 are for models of type qwen2_vl and "
                 "qwen2_5_vl, and needed for them");
  if (own.has_own_sizes()) {
    equal("the side of a block of patches", 2, rules.block(), "merge_size");
    return equal("the number of frames of a patch", own.frames(), rules.frames(),
                 "temporal_patch_size");
  }
  constexpr ImageSize kAny = {64, 64};
  const ImageSize picture = plan_image(rules.processor, kAny).pictures.front().size;
  equal("--img-h", own.img_h, picture.height, "height of a picture");
  equal("--img-w", own.img_w, picture.width, "width of a picture");
  MEGATRON_CHECK(own.vision_newlines == (rules.family == Family::kLlavaNext), folder,
                 ": --vision-newlines is for models of type llava_next, and needed for them");
  if (rules.family == Family::kLlava)
    equal("the number of features of a picture", own.features(), own.patches() + rules.class_rows,
          "its tokens");
  MEGATRON_CHECK(own.bidirectional_images == (rules.family == Family::kGemma3), folder,
                 ": --bidirectional-images is for models of type gemma3, and needed for them");
  if (rules.family == Family::kInternVl || rules.family == Family::kGemma3)
    equal("the number of features of a picture", own.features(), rules.rows_of_a_picture,
          "its tokens");
}

}  // namespace

void check_media_rules(const MediaRules& rules, const MimoConfig& own, const std::string& folder) {
  MEGATRON_CHECK(rules.sees() == own.sees() && rules.hears() == own.hears(), folder,
                 ": its model reads ", read_by(rules.sees(), rules.hears()), ", this one ",
                 read_by(own.sees(), own.hears()));
  if (own.hears()) check_sounds(rules, own, folder);
  if (own.sees()) check_images(rules, own, folder);
}

SeenImage seen_image(int64_t sample, const SampleImage& image, int owner) {
  return {sample, image.rows, image.columns, image.pictures, image.grid, image.size, owner};
}

SeenSound seen_sound(int64_t sample, const SampleSound& sound, int owner) {
  return {sample, sound.frames, owner};
}

}  // namespace megatron
