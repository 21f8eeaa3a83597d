// The rows of the matrix with models that read images.
#include "layout_flags.h"
#include "layouts.h"

#define VISION_GPT                                                                            \
  "--task mimo --hidden-size 32 --num-attention-heads 4 --seq-length 24 --attention-dropout " \
  "0.1 --hidden-dropout 0.1 "
#define VISION_TOWER                                                           \
  "--vision-num-layers 2 --vision-hidden-size 16 --vision-ffn-hidden-size 24 " \
  "--vision-num-attention-heads 2 "
#define EACH_INPUT "attn_norm qkv_linear core_attn attn_proj mlp_norm mlp_fc1 mlp_act mlp_fc2 "
#define FROZEN_TOWER "--freeze vision_model "
#define LR_FACTORS "--lr-factors vision_model=0.1 vision_model.decoder=0.5 vision_projection=2 "
#define FROZEN_LANGUAGE "--freeze language_model "

namespace megatron {
namespace {

constexpr ModelFlags kVisionModels[] = {
    // CLIP without its class row, four tokens an image, I within the table.
    {"llava", VISION_GPT VISION_TOWER
     "--num-layers 4 --vision-model-type clip --img-h 8 --img-w 8 --patch-dim 4 "
     "--disable-vision-class-token --image-token-id 100 --position-embedding-type rope "
     "--untie-embeddings-and-output-weights --normalization RMSNorm --swiglu "
     "--disable-bias-linear"},
    // The output layer has the embedding's table, and no norm before it.
    {"llava_tied", VISION_GPT VISION_TOWER
     "--num-layers 2 --vision-model-type clip --img-h 8 --img-w 8 --patch-dim 4 "
     "--disable-vision-class-token --image-token-id 100 --position-embedding-type rope "
     "--normalization RMSNorm --norm-placement residual --disable-bias-linear"},
    // With the class row, pictures that are wider than high, I outside of the table; learned
    // positions, tied head.
    {"llava_full", VISION_GPT VISION_TOWER
     "--num-layers 2 --vision-model-type clip --img-h 4 --img-w 8 --patch-dim 4 "
     "--image-token-id 500 --max-position-embeddings 24"},
    // Tiles whose rows end with a vector of their own.
    {"llava_tiles", VISION_GPT VISION_TOWER
     "--num-layers 2 --vision-model-type clip --img-h 8 --img-w 8 --patch-dim 4 "
     "--disable-vision-class-token --vision-newlines --image-token-id 100 "
     "--position-embedding-type rope --untie-embeddings-and-output-weights"},
    // InternViT: factors of branches, a bias of patches, cells of two by two features, a norm
    // before the projector; tiles.
    {"internvl", VISION_GPT VISION_TOWER
     "--num-layers 2 --vision-model-type internvit --img-h 8 --img-w 8 --patch-dim 2 "
     "--disable-vision-class-token --pixel-shuffle --vision-projection-norm --image-token-id 100 "
     "--vision-activation gelu --position-embedding-type rope "
     "--untie-embeddings-and-output-weights"},
    // SigLIP, cells of two by two features as their means, a norm and one linear; a decoder as
    // Gemma 3 has it, in which images are longer than the window and seen in both directions.
    {"gemma3", VISION_GPT VISION_TOWER
     "--num-layers 2 --vision-model-type siglip --img-h 8 --img-w 8 --patch-dim 2 "
     "--vision-pooling 2 --disable-vision-class-token --vision-projection-type affine "
     "--vision-projection-norm --disable-vision-projection-bias --vision-activation gelu_tanh "
     "--bidirectional-images --image-token-id 100 --position-embedding-type rope "
     "--normalization RMSNorm --apply-layernorm-1p --norm-placement sandwich --qk-layernorm "
     "--scale-embeddings --geglu --disable-bias-linear --window-size 2 0 "
     "--window-attn-skip-freq 2"},
    // Pictures of their own sizes, positions of rows and columns in encoder and decoder.
    {"qwen2_vl", VISION_GPT VISION_TOWER
     "--num-layers 2 --vision-model-type qwen2 --patch-dim 2 --img-h 8 --img-w 8 --pixel-shuffle "
     "--disable-vision-class-token --image-token-id 100 --position-embedding-type mrope "
     "--mrope-section 1 2 1 --normalization RMSNorm --swiglu --add-qkv-bias --disable-bias-linear "
     "--untie-embeddings-and-output-weights"},
    // The same with windows of two by two features, within which the first layer attends, and gated
    // MLPs: pictures of two windows, and one of a part of one.
    {"qwen2_5_vl", VISION_GPT VISION_TOWER
     "--num-layers 2 --vision-model-type qwen2_5 --patch-dim 2 --img-h 8 --img-w 8 --pixel-shuffle "
     "--vision-window-size 8 --vision-whole-picture-layers 1 --vision-activation silu "
     "--disable-vision-class-token --image-token-id 100 --position-embedding-type mrope "
     "--mrope-section 1 2 1 --normalization RMSNorm --swiglu --add-qkv-bias --disable-bias-linear "
     "--untie-embeddings-and-output-weights"},
};

constexpr LayoutRow kVisionRows[] = {
    {"tp4_llava", "llava", 4, TP "4", "mimo"},
    {"tp4_sp_llava", "llava", 4, TP "4 " SP, "mimo"},
    {"dp2_llava", "llava", 2, "", "mimo"},
    {"dp3_zero1_llava", "llava", 3, ZERO1 OVERLAP, "mimo"},
    {"dp2_zero2_llava", "llava", 2, ZERO2 OVERLAP, "mimo"},
    {"dp2_zero3_llava", "llava", 2, ZERO3 OVERLAP "--no-balance-images", "mimo"},
    {"dp2_means_llava", "llava", 2, "--no-calculate-per-token-loss", "mimo"},
    {"dp2_evaluation_llava", "llava", 2, EVALUATE, "mimo"},
    {"pp2_llava", "llava", 2, PP "2", "mimo"},
    {"pp3_llava", "llava", 3, PP "3 --account-for-encoder-in-pipeline-split 2", "mimo"},
    {"pp2_vpp2_llava", "llava", 2, PP "2 " VPP "2", "mimo"},
    {"pp2_zbv_llava", "llava", 2, PP "2 --pipeline-schedule zb-v", "mimo"},
    {"pp2_zbv_ends_llava_tied", "llava_tied", 2, PP "2 " STAGES "E|t|t|L --pipeline-schedule zb-v",
     "mimo"},
    {"tp2_sp_full_llava", "llava", 2, TP "2 " SP FULL "1", "mimo"},
    {"tp2_sp_pp2_dp2_llava", "llava", 8, TP "2 " SP PP "2 " ZERO1 OVERLAP, "mimo"},
    {"dp2_frozen_encoder_llava", "llava", 2, FROZEN_TOWER ZERO3 OVERLAP, "mimo"},
    {"pp2_dp2_frozen_language_llava", "llava", 4, PP "2 " FROZEN_LANGUAGE, "mimo"},
    {"dp2_zero3_projector_alone_llava", "llava", 2,
     ZERO3 OVERLAP "--freeze-except vision_projection", "mimo"},
    {"tp2_sp_frozen_projector_llava", "llava", 2, TP "2 " SP "--freeze vision_projection", "mimo"},
    {"dp2_zero3_encoder_alone_llava", "llava", 2, ZERO3 OVERLAP "--freeze-except vision_model",
     "mimo"},
    {"dp2_zero3_factors_llava", "llava", 2, ZERO3 OVERLAP LR_FACTORS, "mimo"},
    {"tp2_sp_factors_llava", "llava", 2, TP "2 " SP LR_FACTORS, "mimo"},
    {"tp2_sp_llava_full", "llava_full", 2, TP "2 " SP, "mimo"},
    {"pp2_dp2_zero2_llava_full", "llava_full", 4, PP "2 " ZERO2 OVERLAP, "mimo"},
    {"tp2_sp_llava_tiles", "llava_tiles", 2, TP "2 " SP, "mimo"},
    {"tp2_llava_tiles", "llava_tiles", 2, TP "2", "mimo"},
    {"dp2_zero3_llava_tiles", "llava_tiles", 2, ZERO3 OVERLAP, "mimo"},
    {"tp2_internvl", "internvl", 2, TP "2", "mimo"},
    {"tp2_gemma3", "gemma3", 2, TP "2", "mimo"},
    {"tp2_sp_full_gemma3", "gemma3", 2, TP "2 " SP FULL "1", "mimo"},
    // In the last layer tokens of an image see later ones for nothing that counts: the second stage
    // has both.
    {"pp2_dp2_zero2_gemma3", "gemma3", 4,
     PP "2 --pipeline-model-parallel-layout E|ttL " ZERO2 OVERLAP, "mimo"},
    {"dp2_zero3_gemma3", "gemma3", 2, ZERO3 OVERLAP, "mimo"},
    {"tp2_qwen2_vl", "qwen2_vl", 2, TP "2", "mimo"},
    {"pp2_tp2_sp_qwen2_vl", "qwen2_vl", 4, PP "2 " TP "2 " SP, "mimo"},
    {"dp2_zero3_qwen2_vl", "qwen2_vl", 2, ZERO3 OVERLAP, "mimo"},
    {"tp2_qwen2_5_vl", "qwen2_5_vl", 2, TP "2", "mimo"},
    {"pp2_tp2_sp_qwen2_5_vl", "qwen2_5_vl", 4, PP "2 " TP "2 " SP, "mimo"},
    {"cp2_dp2_zero3_qwen2_5_vl", "qwen2_5_vl", 4, CP "2 " ZERO3 OVERLAP, "mimo"},
    {"cp2_llava", "llava", 2, CP "2", "mimo"},
    {"cp2_tp2_llava", "llava", 4, CP "2 " TP "2", "mimo"},
    {"cp2_tp2_sp_frozen_language_llava", "llava", 4, CP "2 " TP "2 " SP FROZEN_LANGUAGE, "mimo"},
    {"cp2_pp2_vpp2_llava", "llava", 4, CP "2 " PP "2 " VPP "2", "mimo"},
    {"cp3_gather_llava_full", "llava_full", 3, CP "3 " CP_GATHER, "mimo"},
    {"cp2_dp2_zero3_llava_tiles", "llava_tiles", 4, CP "2 " ZERO3 OVERLAP, "mimo"},
    {"cp2_a2a_internvl", "internvl", 2, CP "2 " CP_A2A, "mimo"},
    {"cp2_gather_gemma3", "gemma3", 2, CP "2 " CP_GATHER, "mimo"},
    {"cp2_a2a_pp2_gemma3", "gemma3", 4, CP "2 " CP_A2A PP "2", "mimo"},
    {"cp2_qwen2_vl", "qwen2_vl", 2, CP "2", "mimo"},
    {"cp2_a2a_tp2_sp_qwen2_vl", "qwen2_vl", 4, CP "2 " CP_A2A TP "2 " SP, "mimo"},
    {"dp3_zero3_internvl", "internvl", 3, ZERO3 OVERLAP, "mimo"},
    {"tp2_divided_llava", "llava", 2, TP "2 " ENCODER_TP "2", "mimo"},
    {"tp2_sp_divided_llava_tiles", "llava_tiles", 2, TP "2 " SP ENCODER_TP "2", "mimo"},
    {"tp2_sp_divided_again_llava_full", "llava_full", 2, TP "2 " SP ENCODER_TP "2 " ENCODER_AGAIN,
     "mimo"},
    {"tp2_sp_divided_frozen_encoder_llava", "llava", 2, TP "2 " SP ENCODER_TP "2 " FROZEN_TOWER,
     "mimo"},
    {"cp2_tp2_sp_divided_frozen_language_qwen2_vl", "qwen2_vl", 4,
     CP "2 " TP "2 " SP ENCODER_TP "2 " FROZEN_LANGUAGE, "mimo"},
    {"pp2_tp2_sp_divided_qwen2_5_vl", "qwen2_5_vl", 4, PP "2 " TP "2 " SP ENCODER_TP "2", "mimo"},
    {"cp2_gather_tp2_divided_gemma3", "gemma3", 4, CP "2 " CP_GATHER TP "2 " ENCODER_TP "2",
     "mimo"},
    {"tp2_dp2_zero3_divided_internvl", "internvl", 4,
     TP "2 " ENCODER_TP "2 " ZERO3 OVERLAP "--no-balance-images", "mimo"},
    {"dp2_zero3_again_llava", "llava", 2, ZERO3 OVERLAP ENCODER_AGAIN "--no-balance-images",
     "mimo"},
    {"pp2_zbv_again_llava", "llava", 2, PP "2 --pipeline-schedule zb-v " ENCODER_UNITS "2", "mimo"},
    {"tp2_sp_full_again_qwen2_5_vl", "qwen2_5_vl", 2, TP "2 " SP FULL "1 " ENCODER_AGAIN, "mimo"},
    {"cp2_gather_again_gemma3", "gemma3", 2,
     CP "2 " CP_GATHER ENCODER_UNITS "1 --encoder-recompute-method block", "mimo"},
    // Activations of encoders in host memory
    {"dp2_to_host_llava", "llava", 2, ENCODER_HOST EACH_INPUT, "mimo"},
    {"tp2_sp_divided_to_host_qwen2_5_vl", "qwen2_5_vl", 2,
     TP "2 " SP ENCODER_TP "2 " ENCODER_HOST EACH_INPUT, "mimo"},
    {"v_pp2_zbv_to_host_again_llava", "llava", 2,
     PP "2 " STAGES "V|V|Ettt|tL --pipeline-schedule zb-v " ENCODER_UNITS
        "1 --encoder-recompute-method block " ENCODER_HOST "attn_norm core_attn mlp_act",
     "mimo"},
    {"own1_dp2_to_host_internvl", "internvl", 3,
     ENCODER_DP "1 " ENCODER_HOST "core_attn attn_proj mlp_fc2 " OFFLOAD "core_attn mlp_act",
     "mimo"},
    // Features before their micro-batch's turn
    {"pp2_dp2_ahead_llava", "llava", 4, PP "2 " ZERO2 OVERLAP FROZEN_TOWER ENCODER_AHEAD, "mimo"},
    {"tp2_sp_ahead_frozen_ends_llava_tiles", "llava_tiles", 2,
     TP "2 " SP ENCODER_AHEAD "--freeze vision_model vision_projection", "mimo"},
    {"v_pp2_cp2_ahead_qwen2_5_vl", "qwen2_5_vl", 4,
     PP "2 " STAGES "V|EttL " CP "2 " FROZEN_TOWER ENCODER_AHEAD "--mimo-encoder-prefetch-depth 1",
     "mimo"},
    // Encoders on stages of their own
    {"v_pp4_llava", "llava", 4, PP "4 " STAGES "V|V|Et|tttL --freeze vision_model.conv1", "mimo"},
    {"v_pp3_tp2_llava", "llava", 6, PP "3 " STAGES "V|VEtt|ttL " TP "2", "mimo"},
    {"v_pp3_zb_llava", "llava", 3, PP "3 " STAGES "V|V|EttttL --pipeline-schedule zb-h1", "mimo"},
    {"v_pp2_dp2_zero3_llava", "llava", 4,
     PP "2 " STAGES "V|EttttL " ZERO3 OVERLAP "--no-balance-images", "mimo"},
    {"v_pp3_dp2_frozen_encoder_llava", "llava", 6,
     PP "3 " STAGES "V|V|EttttL " ZERO2 OVERLAP FROZEN_TOWER, "mimo"},
    {"v_pp2_frozen_language_llava", "llava", 2, PP "2 " STAGES "V|EttttL " FROZEN_LANGUAGE, "mimo"},
    {"v_pp2_frozen_ends_llava", "llava", 2,
     PP "2 " STAGES "V|EttttL --freeze vision_model vision_projection", "mimo"},
    {"v_pp3_dp2_llava_full", "llava_full", 6, PP "3 " STAGES "V|Et|tL " ZERO1 OVERLAP, "mimo"},
    {"v_pp3_dp2_zero2_llava_tiles", "llava_tiles", 6,
     PP "3 " STAGES "VV|Et|tL " ZERO2 OVERLAP "--no-balance-images", "mimo"},
    {"v_pp2_tp2_sp_again_internvl", "internvl", 4,
     PP "2 " STAGES "V|EttL " TP "2 " SP ENCODER_AGAIN, "mimo"},
    {"v_pp2_cp2_gather_gemma3", "gemma3", 4, PP "2 " STAGES "V|EttL " CP "2 " CP_GATHER, "mimo"},
    {"v_pp2_zbv_qwen2_vl", "qwen2_vl", 2, PP "2 " STAGES "V|V|Et|tL --pipeline-schedule zb-v",
     "mimo"},
    {"v_pp2_interleaved_tp2_sp_qwen2_5_vl", "qwen2_5_vl", 4, PP "2 " STAGES "V|V|Et|tL " TP "2 " SP,
     "mimo"},
    {"v_pp2_tp2_sp_divided_qwen2_5_vl", "qwen2_5_vl", 4,
     PP "2 " STAGES "V|EttL " TP "2 " SP ENCODER_TP "2", "mimo"},
    // Encoders on ranks of their own: these, and those of the language model
    {"own1_1_llava", "llava", 2, ENCODER_DP "1", "mimo"},
    {"own1_dp2_llava", "llava", 3, ENCODER_DP "1 --no-balance-images", "mimo"},
    {"own1_tp2_sp_llava", "llava", 3, ENCODER_DP "1 " TP "2 " SP, "mimo"},
    {"own1_tp2_llava_tiles", "llava_tiles", 3, ENCODER_DP "1 " TP "2", "mimo"},
    {"own2_1_llava", "llava", 3, ENCODER_DP "2 " ZERO3 OVERLAP, "mimo"},
    {"own_tp2_1_internvl", "internvl", 3, ENCODER_TP "2 " ENCODER_DP "1", "mimo"},
    {"own3_dp2_qwen2_vl", "qwen2_vl", 5, ENCODER_DP "3 " ZERO1 OVERLAP, "mimo"},
    {"own3_tp2_sp_qwen2_5_vl", "qwen2_5_vl", 5, ENCODER_DP "3 " TP "2 " SP, "mimo"},
    {"own1_pp2_llava", "llava", 3, ENCODER_DP "1 " PP "2", "mimo"},
    {"own1_pp2_vpp2_llava", "llava", 3, ENCODER_DP "1 " PP "2 " VPP "2", "mimo"},
    {"own1_pp2_zbv_llava", "llava", 3, ENCODER_DP "1 " PP "2 --pipeline-schedule zb-v", "mimo"},
    {"own_tp2_dp2_pp2_dp2_llava_full", "llava_full", 8,
     ENCODER_TP "2 " ENCODER_DP "2 " PP "2 " ZERO2 OVERLAP, "mimo"},
    {"own2_dp2_frozen_encoder_llava", "llava", 4, ENCODER_DP "2 " ZERO3 OVERLAP FROZEN_TOWER,
     "mimo"},
    {"own1_dp2_frozen_ends_llava", "llava", 3,
     ENCODER_DP "1 --freeze vision_model vision_projection", "mimo"},
    {"own1_dp2_frozen_language_gemma3", "gemma3", 3, ENCODER_DP "1 " FROZEN_LANGUAGE, "mimo"},
    {"own1_dp2_means_again_llava", "llava", 3,
     ENCODER_DP "1 --no-calculate-per-token-loss " ENCODER_AGAIN, "mimo"},
    {"own1_dp2_evaluation_llava", "llava", 3, ENCODER_DP "1 " EVALUATE, "mimo"},
};

}  // namespace

std::span<const LayoutRow> vision_rows() { return kVisionRows; }
std::span<const ModelFlags> vision_models() { return kVisionModels; }

}  // namespace megatron
