// The rows of the matrix whose layers are letters of --hybrid-layer-pattern.
#include "layout_flags.h"
#include "layouts.h"

namespace megatron {
namespace {

#define PATTERN "--hybrid-layer-pattern "
#define MAMBA                                                                       \
  "--hidden-size 48 --seq-length 24 --normalization RMSNorm --disable-bias-linear " \
  "--squared-relu --mamba-num-heads 8 --mamba-head-dim 6 --mamba-state-dim 4 "      \
  "--mamba-chunk-size 3 "

#define DELTA                                                                       \
  "--hidden-size 48 --seq-length 24 --normalization RMSNorm --disable-bias-linear " \
  "--swiglu --linear-num-key-heads 4 --linear-num-value-heads 8 "                   \
  "--linear-key-head-dim 6 --linear-value-head-dim 4 --linear-chunk-size 2 --norm-epsilon 0.1 "

constexpr ModelFlags kHybridModels[] = {
    // Unequal numbers of attention and MLPs, biases, all dropouts, tied head.
    {"letters",
     PATTERN "*-*--*- --hidden-size 48 --num-attention-heads 12 --seq-length 24 "
             "--max-position-embeddings 24 --attention-dropout 0.1 --hidden-dropout 0.1"},
    // Experts, documents that do not see each other, own head.
    {"letters_experts", PATTERN
     "*E-*-E --hidden-size 48 --ffn-hidden-size 48 --num-attention-heads 12 "
     "--group-query-attention --num-query-groups 6 --seq-length 24 --position-embedding-type rope "
     "--normalization RMSNorm --swiglu --disable-bias-linear "
     "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
     "--moe-ffn-hidden-size 24 --num-experts 8 --moe-router-topk 2 --reset-position-ids "
     "--reset-attention-mask --eod-mask-loss"},
    // Mamba-2 beside attention and MLPs, two groups, documents, dropout.
    {"mamba", PATTERN
     "M-M*M- " MAMBA "--mamba-num-groups 2 --num-attention-heads 12 --position-embedding-type none "
     "--attention-dropout 0 --hidden-dropout 0.1 --reset-position-ids --reset-attention-mask "
     "--eod-mask-loss"},
    // Nothing but Mamba-2, one group, no documents, limits that some time steps meet.
    {"mamba_alone",
     PATTERN "MMMM " MAMBA "--mamba-num-groups 1 --hidden-dropout 0 --position-embedding-type none "
             "--mamba-dt-limit 0.01 0.06 --untie-embeddings-and-output-weights"},
    // Gated delta nets beside attention, several heads of values for each of keys, documents.
    {"delta",
     PATTERN "G-G*G- " DELTA
             "--num-attention-heads 12 --position-embedding-type none --attention-dropout 0 "
             "--hidden-dropout 0.1 --reset-position-ids --reset-attention-mask --eod-mask-loss"},
    // Both kinds of states, and attention whose heads are gated.
    {"states",
     PATTERN "GM*-MG- " DELTA
             "--mamba-num-heads 4 --mamba-head-dim 6 --mamba-state-dim 4 --mamba-num-groups 2 "
             "--mamba-chunk-size 3 --num-attention-heads 12 --group-query-attention "
             "--num-query-groups 6 --attention-output-gate --position-embedding-type none "
             "--attention-dropout 0 --hidden-dropout 0"},
    // Granite's multipliers of embeddings, branches, scores and logits.
    {"multipliers", PATTERN
     "M-*-M- " MAMBA "--mamba-num-groups 2 --num-attention-heads 12 --position-embedding-type none "
     "--attention-dropout 0 --hidden-dropout 0.1 --embedding-multiplier 3 "
     "--residual-multiplier 0.6 --query-pre-attn-scalar 11 --logits-scaling 1.5 "
     "--untie-embeddings-and-output-weights"},
    // Latent attention.
    {"letters_latent", PATTERN
     "+-+-- --hidden-size 48 --ffn-hidden-size 96 --num-attention-heads 12 --seq-length 24 "
     "--multi-latent-attention --q-lora-rank 20 --kv-lora-rank 14 --qk-head-dim 6 "
     "--qk-pos-emb-head-dim 4 --v-head-dim 8 --position-embedding-type rope --normalization "
     "RMSNorm --disable-bias-linear --attention-dropout 0 --hidden-dropout 0.1"},
};

constexpr LayoutRow kHybridRows[] = {
    {"letters_tp2", "letters", 2, TP "2"},
    {"letters_tp4_sp_gate", "letters", 4,
     TP "4 " SP "--attention-output-gate --group-query-attention --num-query-groups 2"},
    {"letters_latent_tp2_sp", "letters_latent", 2, TP "2 " SP},
    // Segments of the pattern, also without a layer, and of equal cost.
    {"letters_pp2_bars", "letters", 2, PP "2 " PATTERN "*-|*--*-"},
    {"letters_pp2_vpp2_bars", "letters", 2, PP "2 " PATTERN "*-*|-|-*|-"},
    {"letters_pp2_vpp2_bars_empty", "letters", 2, PP "2 " PATTERN "*-||*--|*-"},
    {"letters_pp3", "letters", 3, PP "3"},
    {"letters_pp2_vpp3_zero1", "letters", 4, PP "2 " VPP "3 " ZERO1 OVERLAP},
    {"letters_pp2_zbh1_latent", "letters_latent", 2, PP "2 --pipeline-schedule zb-h1"},
    {"letters_pp2_zbv", "letters", 2, PP "2 --pipeline-schedule zb-v"},
    {"letters_tp2_sp_dp2_zero3_full3", "letters", 4, TP "2 " SP ZERO3 OVERLAP FULL "3"},
    {"letters_cp2_zero2_selective", "letters_latent", 4,
     CP "2 " ZERO2 SELECTIVE "mlp core_attn layernorm"},
    {"letters_dp2_offload", "letters", 2,
     OFFLOAD "qkv_linear core_attn attn_proj mlp_norm mlp_act"},
    {"letters_ep2_pp2_bars", "letters_experts", 4, EP "2 " PP "2 " A2A MICRO PATTERN "*E-|*-E"},
    {"letters_tp2_sp_cp2_ep4", "letters_experts", 4, TP "2 " SP CP "2 " EP "4 " ETP "1 " A2A},
    // Mamba-2: heads and groups over tensor ranks.
    {"mamba_tp2", "mamba", 2, TP "2"},
    // States over context ranks.
    {"mamba_cp2", "mamba", 2, CP "2"},
    {"mamba_cp4_alone", "mamba_alone", 4, CP "4"},
    // Stages.
    {"mamba_pp2_vpp2_bars", "mamba", 2, PP "2 " PATTERN "M-|M|*|M-"},
    {"mamba_pp3_cost", "mamba", 3, PP "3"},
    {"mamba_pp2_zbh1", "mamba", 2, PP "2 --pipeline-schedule zb-h1"},
    {"mamba_pp2_zbv_alone", "mamba_alone", 2, PP "2 --pipeline-schedule zb-v"},
    // Sharding.
    {"mamba_dp2_zero2_alone", "mamba_alone", 2, ZERO2 OVERLAP},
    {"mamba_tp2_dp2_zero3", "mamba", 4, TP "2 " ZERO3 OVERLAP},
    // Recomputation, offloading, adapters.
    {"mamba_tp2_sp_full2", "mamba", 2, TP "2 " SP FULL "2"},
    {"mamba_pp2_again", "mamba", 2, PP "2 " SELECTIVE "mamba core_attn"},
    {"mamba_cp2_norm_again", "mamba", 2, CP "2 " SELECTIVE "mamba_norm layernorm"},
    {"mamba_dp2_offload", "mamba", 2, OFFLOAD "attn_norm mlp_act"},
    {"mamba_tp2_lora", "mamba", 2, TP "2 " LORA},
    // Gated delta nets, and both.
    {"delta_tp2", "delta", 2, TP "2"},
    {"delta_cp2", "delta", 2, CP "2"},
    {"delta_pp2_bars_norm_again", "delta", 2, PP "2 " PATTERN "G-|G*G- " SELECTIVE "gdn_norm_out"},
    {"delta_tp2_gate_lora", "delta", 2, TP "2 --attention-output-gate " LORA},
    {"delta_dp2_zero3_full", "delta", 2, ZERO3 OVERLAP FULL "1"},
    {"states_tp2_dp2_zero1", "states", 4, TP "2 " ZERO1 OVERLAP},
    {"states_pp3_cost", "states", 3, PP "3"},
    {"states_dp4_dynamic_cp", "states", 4, "--reset-attention-mask " DYNAMIC_CP "12 "},
    {"states_pp2_zbh1", "states", 2, PP "2 --pipeline-schedule zb-h1"},
    // Inputs of recomputed layers in host memory, and all that the first layers save.
    {"delta_pp2_full_offload", "delta", 2, PP "2 " OFFLOAD "attn_norm " FULL "1"},
    {"mamba_dp2_offload_layers", "mamba", 2,
     "--cpu-offloading-num-layers 3 --min-offloaded-tensor-size 0"},
    {"states_8", "states", 8, TP "2 " SP PP "2 " CP "2 " ZERO1 OVERLAP},
    {"multipliers_tp2_sp_pp2_vocabulary", "multipliers", 4,
     TP "2 " SP PP "2 --pipeline-vocab-parallel"},
    {"multipliers_cp2_linear_loss", "multipliers", 2, CP "2 --cross-entropy-fusion-impl linear"},
    {"letters_8", "letters", 8, TP "2 " SP PP "2 " CP "2 " ZERO1 OVERLAP},
};

// More tensor ranks, and what differs from the rows above in a part that unit tests have, too.
constexpr LayoutRow kMoreHybridRows[] = {
    {"mamba_tp2_groups4", "mamba", 2, TP "2 --mamba-num-groups 4"},
    {"mamba_tp4_sp", "mamba", 4, TP "4 " SP},
    {"mamba_tp4_group1", "mamba", 4, TP "4 --mamba-num-groups 1"},
    {"mamba_tp2_sp_alone", "mamba_alone", 2, TP "2 " SP},
    {"mamba_cp4", "mamba", 4, CP "4"},
    {"mamba_tp4_sp_cp2", "mamba", 8, TP "4 " SP CP "2"},
    {"mamba_dp4_dynamic_cp", "mamba", 4, DYNAMIC_CP "12 "},
    {"mamba_pp2_bars", "mamba", 2, PP "2 " PATTERN "M-|M*M-"},
    {"mamba_pp2_zbauto_bars", "mamba", 2, PP "2 --pipeline-schedule zb-auto " PATTERN "M-M*M|-"},
    {"mamba_dp2_zero1", "mamba", 2, ZERO1 "--ddp-bucket-size 3000 " OVERLAP},
    {"mamba_8", "mamba", 8, TP "2 " SP PP "2 " CP "2 " ZERO1 OVERLAP},
    {"delta_tp4_sp", "delta", 4, TP "4 " SP},
    {"delta_cp4_tp2", "delta", 8, TP "2 " CP "4"},
};

}  // namespace

std::span<const LayoutRow> hybrid_rows() { return kHybridRows; }
std::span<const LayoutRow> more_hybrid_rows() { return kMoreHybridRows; }
std::span<const ModelFlags> hybrid_models() { return kHybridModels; }

}  // namespace megatron
