#include "megatron/training/arguments/encoder_offload_rules.h"

#include "megatron/training/arguments/frozen_media.h"

namespace megatron {

bool offloads_activations(const Arguments& arguments) {
  return arguments.transformer.offloads_activations() ||
         (arguments.training.task == "mimo" &&
          own_config<MimoConfig>(arguments.own).offloads_encoders());
}

void validate_encoder_offload(const Arguments& arguments, MimoConfig own, Violations& v) {
  if (!own.offloads_encoders() || !v.empty()) return;
  find_frozen_media(arguments.training, arguments.transformer, own);
  v.require((own.sees() && !own.frozen_vision) || (own.hears() && !own.frozen_audio),
            "--encoder-offload-modules has no effect: no encoder is trained, and one that is "
            "frozen as a whole saves nothing",
            "leave it out");
}

}  // namespace megatron
