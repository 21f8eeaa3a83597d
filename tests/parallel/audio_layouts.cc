// The rows of the matrix with models that hear, and with one that sees, too.
#include "layout_flags.h"
#include "layouts.h"

#define MODULES_LORA                                                               \
  LORA "--lora-targets linear_q linear_v linear_fc2 vision_model.all-linear "      \
       "vision_projection.all-linear audio_model.linear_q audio_model.linear_fc1 " \
       "audio_projection.linear_fc2 "

#define AUDIO_GPT                                                                                 \
  "--task mimo --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 24 "          \
  "--attention-dropout 0.1 --hidden-dropout 0.1 --position-embedding-type rope "                  \
  "--audio-model-type whisper --audio-num-layers 2 --audio-hidden-size 16 "                       \
  "--audio-ffn-hidden-size 24 --audio-num-attention-heads 2 --audio-mel-bins 4 --audio-token-id " \
  "100 "

namespace megatron {
namespace {

constexpr ModelFlags kAudioModels[] = {
    // Sounds of one token, two and three; one linear.
    {"qwen2_audio", AUDIO_GPT
     "--untie-embeddings-and-output-weights --normalization RMSNorm --swiglu --add-qkv-bias "
     "--disable-bias-linear"},
    // Images and sounds in samples; two linears without biases behind the encoder of sounds, whose
    // token lies outside of the table.
    {"image_and_sound", AUDIO_GPT
     "--audio-token-id 500 --audio-projection-type mlp --disable-audio-projection-bias "
     "--vision-num-layers 2 --vision-hidden-size 16 --vision-ffn-hidden-size 24 "
     "--vision-num-attention-heads 2 --vision-model-type clip --img-h 8 --img-w 8 --patch-dim 4 "
     "--disable-vision-class-token --image-token-id 100"},
};

constexpr LayoutRow kAudioRows[] = {
    {"tp2_qwen2_audio", "qwen2_audio", 2, TP "2", "mimo"},
    {"pp2_tp2_sp_qwen2_audio", "qwen2_audio", 4, PP "2 " TP "2 " SP, "mimo"},
    {"cp2_qwen2_audio", "qwen2_audio", 2, CP "2", "mimo"},
    {"dp2_zero3_qwen2_audio", "qwen2_audio", 2, ZERO3 OVERLAP, "mimo"},
    {"dp2_zero2_frozen_audio", "qwen2_audio", 2, ZERO2 OVERLAP "--freeze audio_model", "mimo"},
    {"dp2_projector_alone_audio", "qwen2_audio", 2, "--freeze-except audio_projection", "mimo"},
    {"tp2_sp_image_and_sound", "image_and_sound", 2, TP "2 " SP, "mimo"},
    {"pp2_cp2_image_and_sound", "image_and_sound", 4, PP "2 " CP "2", "mimo"},
    {"dp2_zero3_image_and_sound", "image_and_sound", 2, ZERO3 OVERLAP, "mimo"},
    {"cp2_tp2_divided_qwen2_audio", "qwen2_audio", 4, CP "2 " TP "2 " ENCODER_TP "2", "mimo"},
    {"tp2_sp_dp2_divided_image_and_sound", "image_and_sound", 4,
     TP "2 " SP ENCODER_TP "2 " ZERO1 OVERLAP, "mimo"},
    {"pp2_tp2_again_image_and_sound", "image_and_sound", 4, PP "2 " TP "2 --recompute-vision",
     "mimo"},
    {"pp2_tp2_to_host_image_and_sound", "image_and_sound", 4,
     PP "2 " TP "2 " ENCODER_HOST "attn_norm core_attn attn_proj mlp_norm mlp_act", "mimo"},
    {"pp2_vpp2_ahead_image_and_sound", "image_and_sound", 2,
     PP "2 " STAGES "E|t|t|L --freeze audio_model " ENCODER_AHEAD, "mimo"},
    {"v_pp2_cp2_qwen2_audio", "qwen2_audio", 4, PP "2 " STAGES "V|EttL " CP "2", "mimo"},
    {"v_pp3_tp2_sp_image_and_sound", "image_and_sound", 6, PP "3 " STAGES "V|V|EttL " TP "2 " SP,
     "mimo"},
    {"v_pp2_dp2_zero3_image_and_sound", "image_and_sound", 4,
     PP "2 " STAGES "V|EttL " ZERO3 OVERLAP, "mimo"},
    // Adapters of all modules, and of an encoder alone
    {"tp2_image_and_sound_lora", "image_and_sound", 2, TP "2 " MODULES_LORA, "mimo"},
    {"pp2_tp2_sp_image_and_sound_lora", "image_and_sound", 4, PP "2 " TP "2 " SP MODULES_LORA,
     "mimo"},
    {"dp2_zero3_image_and_sound_lora", "image_and_sound", 2, ZERO3 OVERLAP MODULES_LORA, "mimo"},
    {"cp2_tp2_divided_qwen2_audio_lora", "qwen2_audio", 4,
     CP "2 " TP "2 " ENCODER_TP "2 " LORA "--lora-targets audio_model.all-linear", "mimo"},
    {"v_pp3_image_and_sound_lora", "image_and_sound", 3, PP "3 " STAGES "V|V|EttL " MODULES_LORA,
     "mimo"},
};

}  // namespace

std::span<const LayoutRow> audio_rows() { return kAudioRows; }
std::span<const ModelFlags> audio_models() { return kAudioModels; }

}  // namespace megatron
