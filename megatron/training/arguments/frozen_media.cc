#include "megatron/training/arguments/frozen_media.h"

#include <string>

#include "megatron/models/mimo/mimo_model.h"
#include "megatron/transformer/config/lora.h"

namespace megatron {

void find_frozen_media(const StartConfig& start, const TransformerConfig& language,
                       MimoConfig& own) {
  const auto frozen = [&](Module&& module, const char* name) {
    bool all = true;
    module.visit([&](const std::string& path, Parameter&) { all = all && start.freezes(path); },
                 name);
    if (!language.has_adapters()) return all;
    all = true;  // others are frozen beside them
    module.visit(
        [&](const std::string& path, Parameter&) {
          all = all && (!is_lora_parameter(path) || start.freezes(path));
        },
        name);
    return all;
  };
  if (own.sees()) {
    own.frozen_vision = frozen(VisionEncoder(own, language), "vision_model");
    own.frozen_vision_projection =
        frozen(FeatureProjector(image_projector(own), language), "vision_projection");
  }
  if (!own.hears()) return;
  own.frozen_audio = frozen(AudioEncoder(own, language), "audio_model");
  own.frozen_audio_projection =
      frozen(FeatureProjector(sound_projector(own), language), "audio_projection");
}

}  // namespace megatron
