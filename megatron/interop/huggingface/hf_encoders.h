// The encoder of images or of sounds of a Hugging Face folder, read as a part of a model with
// media, by the tables of the families that have such encoders.
//
//   images   clip, clip_vision_model, siglip, siglip_vision_model, and the encoders of llava,
//            llava_next, internvl, gemma3, qwen2_vl and qwen2_5_vl
//   sounds   whisper, and the encoders of qwen2_audio and voxtral
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "megatron/dist_checkpointing/checkpoint.h"
#include "megatron/models/mimo/mimo_config.h"
#include "megatron/models/model_table.h"

namespace megatron {

enum class EncoderMedia : uint8_t { kImages, kSounds };

// Makes the encoder of `own` that of the folder's config.json. Of CLIP alone the layers up to the
// last but one, as in LLaVA. Of a model with media around the encoder also what it says of
// features and projector; of an encoder alone these are the defaults. Throws Error, naming the
// folder, if it describes no such encoder, and for features that are not built.
void read_hf_encoder_config(const std::filesystem::path& folder, EncoderMedia media,
                            MimoConfig& own);

struct HfEncoder {
  Checkpoint checkpoint;    // its tensors by our names, vision_model.* or audio_model.*
  int64_t num_unread = 0;   // tensors of the folder that are no part of it
  std::string unread = {};  // the name of one
};

// Opens the encoder of the folder for a model with media, whose parameters are `parameters`; reads
// headers alone. Throws Error naming the folder and each tensor that is missing or of another
// shape than the model's.
HfEncoder open_hf_encoder(const std::filesystem::path& folder, EncoderMedia media,
                          const ModelConfig& config, const ParameterShapes& parameters);

}  // namespace megatron
