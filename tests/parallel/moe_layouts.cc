// The rows of the matrix with experts.
#include "layout_flags.h"
#include "layouts.h"

namespace megatron {
namespace {

// A dense model's flags without those of the MLP.
#define TRUNK                                                                            \
  "--num-layers 4 --hidden-size 48 --num-attention-heads 12 --group-query-attention "    \
  "--num-query-groups 6 --seq-length 24 --position-embedding-type rope --normalization " \
  "RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights "        \
  "--attention-dropout 0 --hidden-dropout 0 "

constexpr ModelFlags kExpertModels[] = {
    // Eight experts in every layer, softmax over the two that are chosen.
    {"mixtral", TRUNK "--ffn-hidden-size 24 --num-experts 8 --moe-router-topk 2"},
    // Softmax over all experts, four choices, a gated shared expert, and a dense layer.
    {"qwen_moe",
     TRUNK "--ffn-hidden-size 48 --moe-ffn-hidden-size 12 --num-experts 8 --moe-router-topk 4 "
           "--moe-router-pre-softmax --moe-shared-expert-intermediate-size 24 "
           "--moe-shared-expert-gate --moe-layer-freq [0]+[1]*3 --qk-layernorm"},
    // Latent attention, sigmoid scores with a bias, groups, scaling, a shared expert.
    {"deepseek",
     "--num-layers 4 --hidden-size 48 --ffn-hidden-size 48 --num-attention-heads 4 --seq-length 24 "
     "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
     "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0.1 "
     "--multi-latent-attention --q-lora-rank 12 --kv-lora-rank 8 --qk-head-dim 8 "
     "--qk-pos-emb-head-dim 4 --v-head-dim 6 --qk-layernorm --moe-ffn-hidden-size 12 "
     "--num-experts 8 --moe-router-topk 4 --moe-router-score-function sigmoid "
     "--moe-router-enable-expert-bias --moe-router-num-groups 4 --moe-router-group-topk 2 "
     "--moe-router-topk-scaling-factor 2.5 --moe-shared-expert-intermediate-size 12 "
     "--moe-layer-freq ([0]+[1])*2"},
    // Biases, experts without a gate on latents, one choice whose weight multiplies the input.
    {"switch",
     "--num-layers 4 --hidden-size 48 --ffn-hidden-size 24 --num-attention-heads 12 "
     "--seq-length 24 --max-position-embeddings 24 --attention-dropout 0.1 --hidden-dropout 0.1 "
     "--num-experts 6 --moe-router-topk 1 --moe-router-pre-softmax --moe-apply-probs-on-input "
     "--moe-latent-size 20 --moe-layer-freq 2 --moe-input-jitter-eps 0.1"},
    // Sinks, windows in every other layer, YaRN, biases everywhere, a bounded gate.
    {"gpt_oss",
     "--num-layers 4 --hidden-size 48 --ffn-hidden-size 24 --num-attention-heads 12 "
     "--group-query-attention --num-query-groups 6 --kv-channels 6 --seq-length 24 "
     "--position-embedding-type yarn --rope-scaling-factor 4 "
     "--yarn-original-max-position-embeddings 8 --no-yarn-correction-range-round-to-int "
     "--normalization RMSNorm --quick-geglu --glu-linear-offset 1 "
     "--activation-func-clamp-value 0.05 --softmax-type learnable --window-size 5 0 "
     "--window-attn-skip-freq 2 --untie-embeddings-and-output-weights --attention-dropout 0 "
     "--hidden-dropout 0 --num-experts 8 --moe-router-topk 4"},
};

#define FP8_BLOCKS "--bf16 --fp8-format hybrid --fp8-recipe blockwise --no-fp8-wgrad "
#define FP8_DELAYED "--bf16 --fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 3 "
#define WIDE \
  "--num-layers 2 --hidden-size 128 --seq-length 64 --moe-ffn-hidden-size 128 --num-experts 4 "

// Rows of an expert from several ranks change scales of its tensors, but not those of blocks along
// a row; of weight gradients they do.
constexpr LayoutRow kQuantizedExpertRows[] = {
    {"moe_dp2_fp8", "mixtral", 2, FP8_DELAYED "--ffn-hidden-size 32"},
    {"moe_pp2_zbh1_fp8", "mixtral", 2,
     PP "2 --pipeline-schedule zb-h1 " FP8_DELAYED "--ffn-hidden-size 32"},
    {"moe_ep2_a2a_fp8", "mixtral", 2,
     EP "2 " A2A FP8_BLOCKS WIDE "--num-attention-heads 4 --num-query-groups 2"},
    {"moe_ep2_dp4_zero1_fp8", "mixtral", 4,
     EP "2 " ZERO1 OVERLAP FP8_BLOCKS WIDE "--num-attention-heads 4 --num-query-groups 2"},
};

constexpr LayoutRow kExpertRows[] = {
    {"moe_ep2_gpt_oss", "gpt_oss", 2, EP "2 " A2A},
    {"moe_tp2_sp_ep2_gpt_oss", "gpt_oss", 2, TP "2 " SP EP "2 " ETP "1 " A2A},
    {"moe_cp2_gather_ep2_gpt_oss", "gpt_oss", 2, CP "2 --cp-comm-type all_gather " EP "2 " A2A},
    {"moe_pp2_dp2_zero3_gpt_oss", "gpt_oss", 4, PP "2 " ZERO3 OVERLAP},
    // Without expert ranks.
    {"moe_dp2", "mixtral", 2, ""},
    {"moe_tp2_sp", "mixtral", 2, TP "2 " SP},
    {"moe_tp2_sp_etp1", "mixtral", 2, TP "2 " SP ETP "1"},
    {"moe_cp2_dp2_zero1", "qwen_moe", 4, CP "2 " ZERO1 OVERLAP},
    {"moe_tp2_sp_etp1_jitter", "switch", 2, TP "2 " SP ETP "1"},
    {"moe_pp2", "deepseek", 2, PP "2"},
    // A stage without experts.
    {"moe_pp2_dense_stage", "mixtral", 2, PP "2 --moe-layer-freq [0]*2+[1]*2 " MICRO},
    // Expert ranks over data, context and tensor ranks.
    {"moe_ep2", "mixtral", 2, EP "2"},
    {"moe_ep2_a2a", "mixtral", 2, EP "2 " A2A},
    {"moe_ep4_a2a", "mixtral", 4, EP "4 " A2A},
    {"moe_ep3_switch", "switch", 3, EP "3"},
    {"moe_ep2_dp4_a2a", "switch", 4, EP "2 " A2A},
    {"moe_ep2_cp2", "mixtral", 2, EP "2 " CP "2"},
    {"moe_ep4_cp2_dp2_a2a", "qwen_moe", 4, EP "4 " CP "2 " A2A},
    {"moe_ep2_tp2_sp", "mixtral", 2, TP "2 " SP EP "2 " ETP "1"},
    {"moe_ep2_tp2_sp_forced", "mixtral", 2,
     TP "2 " SP EP "2 " ETP "1 --moe-router-force-load-balancing " A2A},
    {"moe_ep4_tp2_sp_a2a", "qwen_moe", 4, TP "2 " SP EP "4 " ETP "1 " A2A},
    {"moe_ep8_tp2_sp_cp2_dp2", "mixtral", 8, TP "2 " SP CP "2 " EP "8 " ETP "1 " A2A},
    // Expert-tensor ranks, as many as tensor ranks and others.
    {"moe_ep2_etp2_tp2_sp", "mixtral", 4, TP "2 " SP EP "2 "},
    {"moe_ep2_etp2_tp2_sp_a2a", "deepseek", 4, TP "2 " SP EP "2 " A2A},
    {"moe_etp2_dp4", "mixtral", 4, ETP "2"},
    {"moe_etp4_tp2_sp_a2a", "mixtral", 4, TP "2 " SP ETP "4 " A2A},
    {"moe_ep2_etp3_tp3_sp_a2a", "mixtral", 6, TP "3 " SP EP "2 " A2A},
    {"moe_ep2_etp2_cp4", "qwen_moe", 4, CP "4 " EP "2 " ETP "2 " A2A},
    {"moe_ep2_etp2_tp4_sp_dp4", "deepseek", 16, TP "4 " SP EP "2 " ETP "2 " A2A},
    // Sharding strategies.
    {"moe_ep2_dp4_zero1", "mixtral", 4, EP "2 " ZERO1 OVERLAP "--ddp-bucket-size 3000 " A2A},
    {"moe_ep2_dp4_zero2", "qwen_moe", 4, EP "2 " ZERO2 A2A},
    {"moe_ep2_dp4_zero3", "deepseek", 4, EP "2 " ZERO3 OVERLAP A2A},
    {"moe_ep2_tp2_sp_dp2_zero3", "mixtral", 4, TP "2 " SP EP "2 " ETP "1 " ZERO3 OVERLAP A2A},
    {"moe_ep2_dp6_instances3", "mixtral", 6,
     EP "2 " ZERO1 OVERLAP "--num-distributed-optimizer-instances 3 " A2A},
    {"moe_etp2_tp2_sp_dp2_zero1", "deepseek", 4, TP "2 " SP ZERO1 OVERLAP},
    // Pipelines.
    {"moe_ep2_pp2", "mixtral", 4, EP "2 " PP "2 " A2A},
    {"moe_ep2_pp2_vpp2", "qwen_moe", 4, EP "2 " PP "2 " VPP "2 " A2A},
    {"moe_ep2_pp2_zbh1", "deepseek", 4, EP "2 " PP "2 --pipeline-schedule zb-h1 " A2A},
    {"moe_ep2_pp2_zbv", "mixtral", 4, EP "2 " PP "2 " VPP "2 --pipeline-schedule zb-v " A2A},
    {"moe_ep2_pp4_zb_auto", "switch", 8, EP "2 " PP "4 --pipeline-schedule zb-auto " A2A},
    {"moe_ep4_pp2_tp2_sp_tp_pp_dp", "mixtral", 8,
     EP "2 " PP "2 " TP "2 " SP ETP "1 --use-tp-pp-dp-mapping " A2A},
    {"moe_ep2_pp2_zbh1_rounds", "qwen_moe", 4,
     EP "2 " PP "2 --pipeline-schedule zb-h1 " A2A ROUNDS},
    // Losses.
    {"moe_dp3_micro", "mixtral", 3, MICRO},
    {"moe_tp2_sp_cp2_micro_z", "mixtral", 4, TP "2 " SP CP "2 " MICRO Z},
    {"moe_ep2_cp2_sequence", "qwen_moe", 4, EP "2 " CP "2 " SEQ},
    {"moe_tp2_sp_dp2_sequence_z", "deepseek", 4, TP "2 " SP EP "2 " SEQ Z A2A},
    {"moe_dp4_global", "mixtral", 4, EP "2 " GLOBAL},
    {"moe_tp2_sp_cp2_dp2_global_z", "qwen_moe", 8,
     TP "2 " SP CP "2 " EP "4 " ETP "1 " GLOBAL Z A2A},
    {"moe_pp2_vpp2_global_sequence", "mixtral", 4,
     PP "2 " VPP "2 --moe-router-load-balancing-type global_aux_loss seq_aux_loss "
        "--moe-aux-loss-coeff 0.1 0.05"},
    {"moe_pp2_dp2_micro_per_batch", "mixtral", 4, PP "2 --no-calculate-per-token-loss " MICRO Z},
    {"moe_ep2_documents_sequence", "qwen_moe", 2,
     EP "2 --reset-position-ids --reset-attention-mask --eod-mask-loss " SEQ},
    // Recomputation, which makes the same choices.
    {"moe_ep2_full", "mixtral", 2, EP "2 " FULL "1 " MICRO A2A},
    {"moe_ep2_tp2_sp_full2_z", "deepseek", 4, TP "2 " SP EP "2 " FULL "2 " SEQ Z A2A},
    {"moe_ep2_global_full", "mixtral", 2, EP "2 " FULL "1 " GLOBAL A2A},
    {"moe_ep2_pp2_moe", "mixtral", 4, EP "2 " PP "2 " SELECTIVE "moe " MICRO A2A},
    {"moe_ep2_moe_act", "qwen_moe", 2, EP "2 " SELECTIVE "moe_act core_attn " A2A},
    {"moe_ep2_switch_moe", "switch", 2, EP "2 " SELECTIVE "moe " Z A2A},
    // Memory bounded by rounds.
    {"moe_ep2_rounds", "mixtral", 2, EP "2 " ROUNDS A2A},
    {"moe_ep4_rounds_allgather", "qwen_moe", 4, EP "4 " ROUNDS},
    {"moe_ep2_etp2_rounds_full", "deepseek", 4, TP "2 " SP EP "2 " ROUNDS FULL "1 " A2A},
    {"moe_ep2_zero3_rounds", "switch", 4, EP "2 " ZERO3 OVERLAP ROUNDS A2A},
    // Rows written into the memory of other ranks.
    {"moe_ep2_flex", "mixtral", 2, EP "2 " FLEX},
    {"moe_ep4_flex_rounds", "qwen_moe", 4, EP "4 " FLEX ROUNDS FULL "1 "},
    {"moe_ep2_etp2_tp2_sp_flex", "deepseek", 4, TP "2 " SP EP "2 " FLEX SHARED_OVERLAP},
    {"moe_ep2_pp2_zbh1_flex", "switch", 4, EP "2 " PP "2 --pipeline-schedule zb-h1 " FLEX},
    // The shared expert computed beside the exchange, or again.
    {"moe_ep2_overlap", "qwen_moe", 2, EP "2 " A2A SHARED_OVERLAP},
    {"moe_ep4_tp2_sp_overlap_rounds", "qwen_moe", 4,
     TP "2 " SP EP "4 " ETP "1 " A2A SHARED_OVERLAP ROUNDS SEQ},
    {"moe_ep2_overlap_full", "deepseek", 2, EP "2 " A2A SHARED_OVERLAP FULL "1 "},
    {"moe_ep2_pp2_shared_again", "qwen_moe", 4,
     EP "2 " PP "2 " A2A SELECTIVE "shared_experts layernorm moe_act "},
    {"moe_tp2_sp_shared_again", "deepseek", 2,
     TP "2 " SP SHARED_OVERLAP A2A SELECTIVE "shared_experts "},
    // Saved tensors in host memory.
    {"moe_ep2_offload", "qwen_moe", 2, EP "2 " A2A OFFLOAD "mlp_norm expert_fc1 moe_act mlp_act"},
    {"moe_pp2_offload_recomputed", "deepseek", 2,
     PP "2 " OFFLOAD "expert_fc1 moe_act " SELECTIVE "layernorm moe_act shared_experts"},
    {"moe_dp2_offload_layers", "mixtral", 2,
     "--cpu-offloading-num-layers 2 --min-offloaded-tensor-size 0"},
    // Documents on as many ranks as they need.
    {"moe_dp4_dynamic_cp", "deepseek", 4, "--reset-attention-mask " DYNAMIC_CP "12 " Z},
    {"moe_tp2_sp_dp2_dynamic_cp", "qwen_moe", 4,
     TP "2 " SP ETP "1 --reset-attention-mask " DYNAMIC_CP "12 " ZERO1},
    // Adapters of attention, of dense layers and of shared experts.
    {"moe_ep2_lora", "qwen_moe", 2, EP "2 " A2A LORA},
    {"moe_ep2_tp2_sp_latent_lora", "deepseek", 4, TP "2 " SP EP "2 " A2A SEQ LORA},
    {"moe_ep2_zero3_lora", "mixtral", 4, EP "2 " ZERO3 OVERLAP A2A LORA},
    // What each rank applies to its own rows, where these are a micro-batch.
    {"moe_ep2_capacity", "mixtral", 2, EP "2 --moe-expert-capacity-factor 0.8 " A2A},
    {"moe_ep2_capacity_position", "qwen_moe", 4,
     EP "2 --moe-expert-capacity-factor 0.6 --moe-token-drop-policy position"},
    {"moe_dp2_capacity_padded", "mixtral", 2, PADDED "0.9 "},
    {"moe_ep2_capacity_padded", "deepseek", 2, EP "2 " PADDED "1.2 " SEQ A2A},
    {"moe_ep2_etp2_capacity_padded", "qwen_moe", 4,
     EP "2 " ETP "2 " PADDED "0.6 --moe-token-drop-policy position "},
    {"moe_ep2_capacity_padded_rounds", "switch", 4, EP "2 " PADDED "1.5 " ROUNDS FULL "1 " A2A},
    {"moe_ep2_sinkhorn", "mixtral", 2,
     EP "2 --moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0 " A2A},
    // Layers of multi-token prediction with experts of their own.
    {"moe_ep2_pp2_mtp", "deepseek", 4, EP "2 " PP "2 " MTP A2A},
    {"moe_ep2_cp2_mtp_repeated", "deepseek", 2, CP "2 " EP "2 " MTP_REPEATED SEQ A2A},
    // Everything together.
    {"moe_ep2_etp1_tp2_sp_cp2_pp2", "deepseek", 8,
     TP "2 " SP CP "2 " PP "2 " EP "2 " ETP "1 " SEQ Z A2A},
    {"moe_ep4_etp2_tp2_sp_cp2_dp2_pp2", "mixtral", 16,
     TP "2 " SP CP "2 " PP "2 " EP "4 " ETP "2 " MICRO ZERO1 OVERLAP A2A},
};

}  // namespace

std::span<const LayoutRow> quantized_expert_rows() { return kQuantizedExpertRows; }
std::span<const LayoutRow> expert_rows() { return kExpertRows; }
std::span<const ModelFlags> expert_models() { return kExpertModels; }

}  // namespace megatron
