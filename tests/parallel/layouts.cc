#include "layouts.h"

#include <array>
#include <cstring>

#include "layout_flags.h"
#include "megatron/base/check.h"

namespace megatron {
namespace {

// Sizes are small and odd where they may be. Vocabulary 101 is padded by a layout-dependent number
// of rows.
constexpr ModelFlags kModels[] = {
    // LayerNorm, biases, learned positions, tied head, all dropouts.
    {"gpt",
     "--num-layers 4 --hidden-size 48 --num-attention-heads 12 --seq-length 24 "
     "--max-position-embeddings 24 "
     "--attention-dropout 0.1 --hidden-dropout 0.1"},
    // RMSNorm, SwiGLU, RoPE, groups, no biases, own head.
    {"llama",
     "--num-layers 4 --hidden-size 48 --ffn-hidden-size 96 --num-attention-heads 12 "
     "--group-query-attention "
     "--num-query-groups 6 --seq-length 24 --position-embedding-type rope --normalization RMSNorm "
     "--swiglu "
     "--disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 "
     "--hidden-dropout 0"},
    // QK norms, biases of queries, 2 groups, tied head, documents that do not see each other.
    {"qwen",
     "--num-layers 4 --hidden-size 48 --ffn-hidden-size 96 --num-attention-heads 12 "
     "--group-query-attention "
     "--num-query-groups 2 --seq-length 24 --position-embedding-type rope --normalization RMSNorm "
     "--swiglu "
     "--disable-bias-linear --add-qkv-bias --qk-layernorm --attention-dropout 0 --hidden-dropout "
     "0.1 "
     "--reset-position-ids --reset-attention-mask --eod-mask-loss"},
    // Norms before and after, soft caps, windows in every other layer with a rotary base of their
    // own, scaled embeddings.
    {"gemma",
     "--num-layers 4 --hidden-size 48 --ffn-hidden-size 96 --num-attention-heads 12 "
     "--group-query-attention "
     "--num-query-groups 6 --seq-length 24 --position-embedding-type rope --normalization RMSNorm "
     "--geglu "
     "--disable-bias-linear --apply-layernorm-1p --norm-placement sandwich --scale-embeddings "
     "--query-pre-attn-scalar 6 "
     "--attn-logit-softcapping 2 --final-logit-softcapping 3 --window-size 5 0 "
     "--window-attn-skip-freq 2 "
     "--rotary-base-local 100 --rope-scaling-type linear --rope-scaling-factor 4 --qk-layernorm "
     "--attention-dropout 0.1 "
     "--hidden-dropout 0.1"},
    // Norms after only, one QK norm over all heads.
    {"olmo",
     "--num-layers 4 --hidden-size 48 --ffn-hidden-size 96 --num-attention-heads 12 "
     "--group-query-attention "
     "--num-query-groups 6 --seq-length 24 --position-embedding-type rope --normalization RMSNorm "
     "--swiglu "
     "--disable-bias-linear --norm-placement post --qk-layernorm --qk-layernorm-over-heads "
     "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"},
    // Both branches read the layer's input; half of each head is rotated, by YaRN.
    {"neox",
     "--num-layers 4 --hidden-size 48 --num-attention-heads 12 --seq-length 24 "
     "--position-embedding-type yarn "
     "--rotary-percent 0.5 --rope-scaling-factor 4 --yarn-original-max-position-embeddings 8 "
     "--parallel-residual "
     "--no-bias-gelu-fusion --untie-embeddings-and-output-weights --attention-dropout 0.1 "
     "--hidden-dropout 0.1"},
    // SwiGLU with biases, groups of heads by fours.
    {"gated",
     "--num-layers 4 --hidden-size 48 --ffn-hidden-size 32 --num-attention-heads 16 "
     "--kv-channels 4 --group-query-attention --num-query-groups 4 --seq-length 24 "
     "--position-embedding-type rope --swiglu --attention-dropout 0 --hidden-dropout 0"},
    // Normed latents of queries, keys and values; values narrower than keys; YaRN.
    {"latent",
     "--num-layers 4 --hidden-size 48 --ffn-hidden-size 96 --num-attention-heads 12 --seq-length "
     "24 "
     "--multi-latent-attention --q-lora-rank 20 --kv-lora-rank 14 --qk-head-dim 6 "
     "--qk-pos-emb-head-dim 4 --v-head-dim 8 --qk-layernorm --position-embedding-type rope "
     "--rotary-scaling-factor 4 --yarn-original-max-position-embeddings 8 --mscale 0.7 "
     "--mscale-all-dim 0.5 --normalization RMSNorm --swiglu --disable-bias-linear "
     "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"},
    // Queries without a latent, no norms of latents, wide values, biases, documents, dropouts.
    {"latent_direct",
     "--num-layers 4 --hidden-size 48 --num-attention-heads 12 --seq-length 24 "
     "--multi-latent-attention --kv-lora-rank 14 --qk-head-dim 6 --qk-pos-emb-head-dim 4 "
     "--v-head-dim 12 --rope-type rope --position-embedding-type rope --attention-dropout 0.1 "
     "--hidden-dropout 0.1 --reset-position-ids --reset-attention-mask --eod-mask-loss"},
};

constexpr LayoutRow kRows[] = {
    // Every axis alone.
    {"tp2", "gpt", 2, TP "2"},
    {"tp2_llama", "llama", 2, TP "2"},
    {"tp4_sp", "gpt", 4, TP "4 " SP},
    {"tp2_sp_pp2_norms_of_sums", "gpt", 4, TP "2 " SP PP "2 --norm-placement residual"},
    {"tp2_sp_positions", "gpt", 2, TP "2 " SP "--reset-position-ids --reset-attention-mask"},
    {"tp2_z_loss", "llama", 2, TP "2 --z-loss-coeff 0.01"},
    {"tp2_linear_loss", "gpt", 2,
     TP "2 --cross-entropy-fusion-impl linear --cross-entropy-chunk-tokens 5"},
    {"tp2_sp_linear_loss", "llama", 2,
     TP "2 " SP "--cross-entropy-fusion-impl linear --cross-entropy-chunk-tokens 7"},
    {"pp2_dp2_zero1_linear_loss", "llama", 4,
     PP "2 " ZERO1 OVERLAP "--cross-entropy-fusion-impl linear --cross-entropy-chunk-tokens 20"},
    {"dp2_zero3_linear_loss", "qwen", 2,
     ZERO3 OVERLAP "--cross-entropy-fusion-impl linear --cross-entropy-chunk-tokens 9"},
    {"tp3_sp_llama", "llama", 3, TP "3 " SP},
    {"tp2_gated", "gated", 2, TP "2"},
    {"tp4_sp_gated", "gated", 4, TP "4 " SP},
    {"tp4_groups2", "qwen", 4, TP "4"},
    {"tp4_groups2_sp", "qwen", 4, TP "4 " SP},
    {"dp2", "gpt", 2, ""},
    {"dp3_llama", "llama", 3, ""},
    {"dp2_documents", "qwen", 2, ""},
    // Frozen parts.
    {"tp2_sp_pp2_frozen_table", "gpt", 4,
     TP "2 " SP PP "2 --freeze embedding *.layers.1.mlp *.linear_proj.bias"},
    {"dp2_zero1_frozen", "gpt", 2,
     ZERO1 "--ddp-bucket-size 3000 " OVERLAP "--freeze *.layers.[02] *layernorm*"},
    {"dp2_zero2_frozen", "llama", 2, ZERO2 "--freeze-except *.linear_fc2 *.layers.3"},
    {"tp2_dp2_zero3_frozen", "gpt", 4, TP "2 " ZERO3 OVERLAP "--freeze embedding *.linear_qkv"},
    // Adapters: of parts, of some parts, of whole linears, with fewer groups than ranks.
    {"tp2_lora", "llama", 2, TP "2 " LORA},
    {"tp3_sp_lora_parts", "llama", 3,
     TP "3 " SP LORA "--lora-targets q_proj v_proj up_proj o_proj"},
    {"tp4_sp_lora_groups2", "qwen", 4, TP "4 " SP LORA},
    {"tp2_lora_whole", "gpt", 2, TP "2 " LORA "--lora-targets linear_qkv linear_fc1 linear_fc2"},
    {"tp2_sp_lora_mlp_act", "llama", 2, TP "2 " SP SELECTIVE "mlp_act layernorm " LORA},
    {"dp2_zero1_lora", "llama", 2, ZERO1 OVERLAP "--ddp-bucket-size 500 " LORA},
    {"dp2_zero3_lora", "qwen", 2, ZERO3 OVERLAP LORA},
    {"pp2_zbh1_lora", "llama", 2, PP "2 --pipeline-schedule zb-h1 " LORA},
    {"pp2_vpp2_lora_full", "gpt", 2, PP "2 " VPP "2 " LORA FULL "1"},
    {"cp2_lora", "llama", 2, CP "2 " LORA},
    {"tp2_sp_pp2_dp2_lora", "gpt", 8, TP "2 " SP PP "2 " ZERO1 OVERLAP LORA},
    {"tp2_sp_dp2_zero3_lora", "llama", 4, TP "2 " SP ZERO3 LORA},
    // Attention sinks: packed and separate heads, every kernel and exchange.
    {"tp2_sinks", "gpt", 2, TP "2 " SINKS},
    {"tp4_sp_groups2_sinks", "qwen", 4, TP "4 " SP SINKS},
    {"pp2_dp2_zero1_sinks", "llama", 4, PP "2 " ZERO1 OVERLAP SINKS},
    {"dp2_zero3_sinks", "gemma", 2, ZERO3 OVERLAP SINKS},
    {"cp2_sinks", "llama", 2, CP "2 " SINKS},
    {"cp2_gather_window_sinks", "llama", 2,
     CP "2 --cp-comm-type all_gather --window-size 7 0 --window-attn-skip-freq 2 " SINKS},
    {"cp3_a2a_sinks", "qwen", 3, CP "3 --cp-comm-type a2a " SINKS},
    {"cp4_levels_sinks", "llama", 4,
     CP "4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2 " SINKS},
    {"tp2_sp_cp2_sinks_core", "llama", 4, TP "2 " SP CP "2 " SELECTIVE "core_attn " SINKS},
    {"tp2_off_by_one", "llama", 2, TP "2 --softmax-type off-by-one"},
    // Preferences, with a frozen copy as the reference, and with adapters.
    {"tp2_sp_dpo", "llama", 2, TP "2 " SP, "dpo"},
    {"cp2_dpo", "llama", 2, CP "2", "dpo"},
    {"dp2_zero3_dpo", "llama", 2, ZERO3 OVERLAP, "dpo"},
    {"pp2_vpp2_dpo", "gpt", 2, PP "2 " VPP "2", "dpo"},
    {"pp2_zbv_dpo", "llama", 2, PP "2 --pipeline-schedule zb-v", "dpo"},
    {"tp2_pp2_dp2_dpo_lora", "llama", 8, TP "2 " SP PP "2 " ZERO1 OVERLAP LORA, "dpo"},
    {"cp2_dpo_lora_means", "llama", 2, CP "2 --no-calculate-per-token-loss " LORA, "dpo"},
    {"dp2_means", "qwen", 2, "--no-calculate-per-token-loss"},
    // Evaluation of two sets, each ending in its second one; of a whole set.
    {"dp2_evaluation", "gpt", 2, EVALUATE},
    {"tp2_sp_pp2_evaluation", "qwen", 4, TP "2 " SP PP "2 " EVALUATE},
    {"pp2_evaluation", "gpt", 2, PP "2 " EVALUATE},
    {"cp2_dp2_evaluation", "qwen", 4, CP "2 " ZERO1 OVERLAP EVALUATE},
    {"dp2_zero3_dpo_evaluation", "llama", 2, ZERO3 OVERLAP EVALUATE, "dpo"},
    {"dp3_full_validation", "llama", 3, EVALUATE "--full-validation"},
    {"cp2_dp2_full_validation", "qwen", 4, CP "2 " EVALUATE "--full-validation"},
    {"pp2_decoupled", "gpt", 2, PP "2 --decoupled-lr 3e-2"},
    {"dp4_overlap", "gpt", 4, "--overlap-grad-reduce --ddp-bucket-size 5000"},
    {"dp4_zero1", "gpt", 4, ZERO1},
    {"dp4_zero1_overlap", "qwen", 4, ZERO1 OVERLAP "--ddp-bucket-size 5000"},
    {"dp3_zero1_llama", "llama", 3, ZERO1 OVERLAP},
    {"dp4_zero1_instances2", "gpt", 4, ZERO1 "--num-distributed-optimizer-instances 2"},
    {"dp2_zero2", "gpt", 2, ZERO2},
    {"dp2_zero2_buckets", "llama", 2, ZERO2 OVERLAP "--ddp-bucket-size 3000"},
    {"dp3_zero2_overlap", "llama", 3, ZERO2 OVERLAP},
    {"dp2_zero3", "gpt", 2, ZERO3},
    {"dp4_zero3_overlap", "llama", 4, ZERO3 OVERLAP},
    {"dp4_zero3_instances2", "qwen", 4, ZERO3 OVERLAP "--num-distributed-optimizer-instances 2"},
    {"pp2", "gpt", 2, PP "2"},
    {"pp2_gpipe", "llama", 2, PP "2 --pipeline-schedule gpipe"},
    {"pp4_llama", "llama", 4, PP "4"},
    {"pp2_qwen", "qwen", 2, PP "2"},
    {"pp2_vpp2", "gpt", 2, PP "2 " VPP "2"},
    {"pp2_window3", "llama", 2, PP "2 " WINDOW3 "--num-layers 10"},
    {"pp2_vpp2_window3", "llama", 2, PP "2 " VPP "2 " WINDOW3},
    {"pp2_vpp2_llama", "llama", 2,
     PP "2 " VPP "2 --microbatch-group-size-per-virtual-pipeline-stage 3"},
    {"pp4_zbh1", "gpt", 4, PP "4 --pipeline-schedule zb-h1"},
    {"pp2_zbauto", "llama", 2, PP "2 --pipeline-schedule zb-auto"},
    {"pp2_zbv", "gpt", 2, PP "2 --pipeline-schedule zb-v"},
    {"pp2_zbv_llama", "llama", 2, PP "2 --pipeline-schedule zb-v"},
    {"pp2_uneven", "gpt", 2, PP "2 --decoder-first-pipeline-num-layers 1"},
    {"pp3_layout", "llama", 3, PP "3 --pipeline-model-parallel-layout Et|ttt|L"},
    {"pp3_accounted", "gpt", 3,
     PP "3 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"},
    {"pp2_vocab", "llama", 2, PP "2 " VOCAB},
    {"pp4_vocab", "olmo", 4, PP "4 " VOCAB "--z-loss-coeff 0.01"},
    {"pp3_vocab_means", "llama", 3,
     PP "3 --pipeline-model-parallel-layout Et|ttt|L " VOCAB "--no-calculate-per-token-loss"},
    {"pp2_vocab_no_overlap", "neox", 2, PP "2 --no-overlap-p2p-communication " VOCAB},
    {"pp2_no_overlap", "gpt", 2, PP "2 --no-overlap-p2p-communication"},
    {"cp2", "gpt", 2, CP "2"},
    {"cp3_llama", "llama", 3, CP "3"},
    {"cp2_gather", "qwen", 2, CP "2 --cp-comm-type all_gather"},
    {"cp2_documents", "qwen", 2, CP "2"},
    {"cp2_positions", "gpt", 2, CP "2 --reset-position-ids --reset-attention-mask"},
    {"cp2_gather_window", "llama", 2, CP "2 --cp-comm-type all_gather --window-size 7 0"},
    {"cp3_a2a_window", "llama", 3,
     CP "3 --cp-comm-type a2a --window-size 7 0 --window-attn-skip-freq 2"},
    {"cp2_layers", "llama", 2, CP "2 --cp-comm-type p2p a2a all_gather p2p"},
    {"cp2_means", "qwen", 2, CP "2 --no-calculate-per-token-loss"},
    {"dp2_dynamic_cp", "qwen", 2, DYNAMIC_CP "12"},
    {"dp4_dynamic_cp_gather", "qwen", 4, DYNAMIC_CP "6 --cp-comm-type all_gather"},
    {"dp3_dynamic_cp_documents", "qwen", 3, DYNAMIC_CP "16"},
    {"dp2_dynamic_cp_llama", "llama", 2, "--reset-attention-mask " DYNAMIC_CP "12"},
    {"cp3_a2a", "llama", 3, CP "3 --cp-comm-type a2a"},
    {"cp4_a2a_groups2", "gated", 4, CP "4 --cp-comm-type a2a --num-query-groups 2"},
    {"cp4_hierarchy", "gpt", 4,
     CP "4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2"},
    {"cp2_a2a_dropout", "gpt", 2, CP "2 --cp-comm-type a2a"},
    // Pairs.
    {"tp2_dp2", "gpt", 4, TP "2"},
    {"tp2_sp_dp2_zero1", "qwen", 4, TP "2 " SP ZERO1 OVERLAP},
    {"tp2_dp2_zero3", "llama", 4, TP "2 " ZERO3 OVERLAP},
    {"tp2_sp_dp2_zero3", "gpt", 4, TP "2 " SP ZERO3},
    {"tp2_pp2", "gpt", 4, TP "2 " PP "2"},
    {"tp2_sp_pp2_vpp2", "gpt", 4, TP "2 " SP PP "2 " VPP "2"},
    {"tp4_sp_pp2_qwen", "qwen", 8, TP "4 " SP PP "2"},
    {"tp2_sp_pp2_zbh1", "qwen", 4, TP "2 " SP PP "2 --pipeline-schedule zb-h1"},
    {"tp2_cp2", "gpt", 4, TP "2 " CP "2"},
    {"tp2_sp_cp2_qwen", "qwen", 4, TP "2 " SP CP "2"},
    {"tp2_cp3_a2a", "llama", 6, TP "2 " CP "3 --cp-comm-type a2a"},
    {"tp2_cp4_a2a_groups4", "gated", 8, TP "2 " CP "4 --cp-comm-type a2a"},
    {"tp2_pp2_vocab", "llama", 4, TP "2 " PP "2 " VOCAB},
    {"tp2_sp_pp2_vocab", "neox", 4, TP "2 " SP PP "2 " VOCAB},
    {"pp2_dp2_vocab_zero1", "llama", 4, PP "2 " ZERO1 OVERLAP VOCAB},
    {"pp2_dp2_vocab_zero3", "olmo", 4, PP "2 " ZERO3 OVERLAP VOCAB},
    {"pp2_dp2_vocab_zero2_order", "neox", 4, PP "2 --use-tp-pp-dp-mapping " ZERO2 OVERLAP VOCAB},
    {"pp2_cp2_vocab", "llama", 4, PP "2 " CP "2 " VOCAB},
    {"pp2_dp2", "gpt", 4, PP "2"},
    {"pp2_dp2_order", "qwen", 4, PP "2 --use-tp-pp-dp-mapping"},
    {"pp2_vpp2_dp3_zero1", "gpt", 6, PP "2 " VPP "2 " ZERO1 OVERLAP},
    {"pp2_dp2_zero1_late", "gpt", 4, PP "2 " ZERO1},
    {"pp2_dp2_zero2", "llama", 4, PP "2 " ZERO2 OVERLAP},
    {"pp2_dp2_zero3", "gpt", 4, PP "2 " ZERO3 OVERLAP},
    {"pp2_zbv_dp2_zero1", "gpt", 4, PP "2 --pipeline-schedule zb-v " ZERO1 OVERLAP},
    {"pp2_cp2", "llama", 4, PP "2 " CP "2"},
    {"cp2_dp2_dynamic_cp_zero1", "qwen", 4, CP "2 " DYNAMIC_CP "6 " ZERO1},
    {"tp2_sp_dp2_dynamic_cp", "qwen", 4, TP "2 " SP DYNAMIC_CP "12 " ZERO1},
    {"dp2_dynamic_cp_full", "qwen", 2, DYNAMIC_CP "12 " FULL "1"},
    {"cp2_dp2_zero1", "qwen", 4, CP "2 " ZERO1 OVERLAP},
    {"cp2_dp2_zero3", "gpt", 4, CP "2 " ZERO3 OVERLAP},
    // Blocks of other families.
    {"tp2_gemma", "gemma", 2, TP "2"},
    {"tp3_sp_gemma", "gemma", 3, TP "3 " SP},
    {"cp2_gather_gemma", "gemma", 2, CP "2 --cp-comm-type all_gather"},
    {"cp3_a2a_gemma", "gemma", 3, CP "3 --cp-comm-type a2a"},
    {"pp2_vpp2_gemma_full", "gemma", 2, PP "2 " VPP "2 " FULL "1"},
    {"tp2_sp_dp2_zero3_gemma", "gemma", 4, TP "2 " SP ZERO3 OVERLAP},
    {"tp2_olmo", "olmo", 2, TP "2"},
    {"tp3_sp_olmo", "olmo", 3, TP "3 " SP},
    {"cp2_olmo", "olmo", 2, CP "2"},
    {"tp2_sp_pp2_zbh1_olmo", "olmo", 4, TP "2 " SP PP "2 --pipeline-schedule zb-h1"},
    {"dp2_zero3_olmo_full", "olmo", 2, ZERO3 OVERLAP FULL "2"},
    {"tp2_sp_neox", "neox", 2, TP "2 " SP},
    {"cp2_neox", "neox", 2, CP "2"},
    {"pp2_dp2_zero1_neox", "neox", 4, PP "2 " ZERO1 OVERLAP},
    // Multi-latent attention.
    {"tp2_latent", "latent", 2, TP "2"},
    {"tp3_sp_latent", "latent", 3, TP "3 " SP},
    {"tp2_latent_direct", "latent_direct", 2, TP "2"},
    {"tp4_sp_latent_direct", "latent_direct", 4, TP "4 " SP},
    {"cp2_latent", "latent", 2, CP "2"},
    {"cp2_latent_direct", "latent_direct", 2, CP "2"},
    {"cp3_gather_latent", "latent", 3, CP "3 --cp-comm-type all_gather"},
    {"cp2_a2a_latent_direct", "latent_direct", 2, CP "2 --cp-comm-type a2a"},
    {"cp4_hierarchy_latent", "latent", 4,
     CP "4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2"},
    {"dp2_dynamic_cp_latent", "latent", 2, "--reset-attention-mask " DYNAMIC_CP "12"},
    {"pp2_zbh1_latent", "latent", 2, PP "2 --pipeline-schedule zb-h1"},
    {"pp2_vpp2_latent_full", "latent_direct", 2, PP "2 " VPP "2 " FULL "1"},
    {"tp2_sp_latent_selective", "latent", 2,
     TP "2 " SP SELECTIVE "core_attn layernorm mla_up_proj mlp_act"},
    {"cp2_latent_selective", "latent_direct", 2, CP "2 " SELECTIVE "layernorm mla_up_proj"},
    {"pp2_zbh1_latent_selective", "latent", 2,
     PP "2 --pipeline-schedule zb-h1 " SELECTIVE "layernorm mla_up_proj"},
    {"tp2_sp_latent_offload", "latent", 2,
     TP "2 " SP OFFLOAD "attn_norm qkv_linear core_attn attn_proj"},
    {"dp2_zero3_latent", "latent", 2, ZERO3 OVERLAP},
    {"tp2_sp_pp2_cp2_dp2_latent", "latent", 16, TP "2 " SP PP "2 " CP "2 " ZERO1 OVERLAP},
    // Recomputation.
    {"tp2_sp_full", "gpt", 2, TP "2 " SP FULL "1"},
    {"tp2_sp_selective", "qwen", 2, TP "2 " SP SELECTIVE "core_attn layernorm"},
    {"tp2_sp_mlp", "qwen", 2, TP "2 " SP SELECTIVE "mlp core_attn"},
    {"tp2_mlp_act", "llama", 2, TP "2 " SELECTIVE "mlp_act layernorm"},
    {"pp2_zbh1_mlp", "gpt", 2, PP "2 --pipeline-schedule zb-h1 " SELECTIVE "mlp"},
    {"pp2_zbh1_mlp_act", "llama", 2, PP "2 --pipeline-schedule zb-h1 " SELECTIVE "mlp_act"},
    {"tp4_full_distributed", "qwen", 4, TP "4 " FULL "2 --distribute-saved-activations"},
    {"tp2_pp2_distributed", "gpt", 4, TP "2 " PP "2 " FULL "1 --distribute-saved-activations"},
    {"tp2_sp_offload", "qwen", 2,
     TP "2 " SP OFFLOAD "attn_norm core_attn attn_proj mlp_act mlp_fc2"},
    {"pp2_offload", "gpt", 2, PP "2 " OFFLOAD "qkv_linear core_attn mlp_norm mlp_fc1 mlp_act"},
    {"pp2_vpp2_offload_full", "llama", 2, PP "2 " VPP "2 " OFFLOAD "attn_norm " FULL "1"},
    {"pp2_zbh1_offload_mlp", "gpt", 2,
     PP "2 --pipeline-schedule zb-h1 " OFFLOAD "attn_norm core_attn mlp_norm " SELECTIVE "mlp"},
    {"cp2_a2a_offload", "gpt", 2, CP "2 --cp-comm-type a2a " OFFLOAD "core_attn attn_proj"},
    {"cp2_dp2_zero3_offload", "llama", 4,
     CP "2 " ZERO3 OVERLAP OFFLOAD "core_attn attn_proj mlp_act"},
    {"dp2_offload_layers", "gpt", 2, "--cpu-offloading-num-layers 2 --min-offloaded-tensor-size 0"},
    {"dp4_zero1_cpu_optimizer", "gpt", 4, ZERO1 OVERLAP "--optimizer-cpu-offload"},
    {"tp2_pp2_cpu_optimizer", "llama", 4,
     TP "2 " PP "2 --optimizer-cpu-offload --optimizer-offload-fraction 0.5"},
    {"dp2_zero3_cpu_optimizer", "qwen", 2, ZERO3 "--optimizer-cpu-offload"},
    {"dp2_zero3_mlp", "gpt", 2, ZERO3 OVERLAP SELECTIVE "mlp"},
    {"cp2_selective", "gpt", 2, CP "2 " SELECTIVE "core_attn"},
    {"pp2_vpp2_full", "gpt", 2, PP "2 " VPP "2 " FULL "1"},
    {"dp2_zero3_full", "llama", 2, ZERO3 OVERLAP FULL "2"},
    {"cp2_full_block", "gpt", 2,
     CP "2 --recompute-granularity full --recompute-method block --recompute-num-layers 2"},
    {"pp4_vocab_full", "neox", 4, PP "4 " VOCAB FULL "1"},
    {"pp2_vocab_selective", "llama", 2, PP "2 " VOCAB SELECTIVE "core_attn mlp"},
    {"pp2_vocab_offload", "llama", 2,
     PP "2 " VOCAB OFFLOAD "qkv_linear core_attn mlp_norm mlp_fc1 mlp_act"},
    {"pp2_zbh1_full", "gpt", 2, PP "2 --pipeline-schedule zb-h1 " FULL "2"},
    // Three axes and more.
    {"tp2_pp2_dp2", "gpt", 8, TP "2 " SP PP "2 " ZERO1 OVERLAP},
    {"tp2_pp2_cp2", "qwen", 8, TP "2 " SP PP "2 " CP "2"},
    {"tp2_cp2_dp2_zero3", "llama", 8, TP "2 " SP CP "2 " ZERO3 OVERLAP},
    {"pp2_cp2_dp2_zero1", "gpt", 8, PP "2 " VPP "2 " CP "2 " ZERO1 OVERLAP FULL "1"},
    {"tp2_sp_pp4_dp2_vocab", "llama", 16, TP "2 " SP PP "4 " ZERO1 OVERLAP VOCAB},
    {"all_16", "gpt", 16, TP "2 " SP PP "2 " VPP "2 " CP "2 " ZERO1 OVERLAP},
    {"all_16_order", "qwen", 16, TP "2 " SP PP "2 " CP "2 --use-tp-pp-dp-mapping " ZERO2 OVERLAP},
    {"all_16_zero3", "llama", 16,
     TP "2 " SP PP "2 " CP "2 --cp-comm-type a2a " ZERO3 OVERLAP FULL "1"},
    // Multi-token prediction.
    {"tp2_mtp", "gpt", 2, TP "2 " MTP},
    {"tp4_sp_mtp", "gpt", 4, TP "4 " SP MTP},
    {"tp3_sp_mtp_repeated", "llama", 3, TP "3 " SP MTP_REPEATED},
    {"tp2_mtp_linear_loss", "llama", 2,
     TP "2 " MTP "--cross-entropy-fusion-impl linear --cross-entropy-chunk-tokens 5"},
    {"cp2_mtp", "gpt", 2, CP "2 " MTP},
    {"cp2_mtp_documents", "qwen", 2, CP "2 " MTP},
    {"cp3_a2a_mtp_repeated", "llama", 3, CP "3 --cp-comm-type a2a " MTP_REPEATED},
    {"cp2_mtp_means", "qwen", 2, CP "2 --no-calculate-per-token-loss " MTP},
    {"pp2_mtp", "gpt", 2, PP "2 " MTP},
    {"pp4_mtp", "llama", 4, PP "4 " MTP},
    {"pp2_vpp2_mtp", "gpt", 2, PP "2 " VPP "2 " MTP},
    {"pp2_vpp2_mtp_repeated", "llama", 2, PP "2 " VPP "2 " MTP_REPEATED},
    {"pp2_zbh1_mtp", "gpt", 2, PP "2 --pipeline-schedule zb-h1 " MTP},
    {"pp2_zbauto_mtp", "llama", 2, PP "2 --pipeline-schedule zb-auto " MTP_REPEATED},
    {"pp2_zbv_mtp", "llama", 2, PP "2 --pipeline-schedule zb-v " MTP},
    {"pp2_zbv_mtp_tied", "qwen", 2, PP "2 --pipeline-schedule zb-v " MTP},
    {"pp3_layout_mtp", "llama", 3, PP "3 --pipeline-model-parallel-layout Ett|tt|mmL " MTP},
    {"dp2_zero1_mtp", "gpt", 2, ZERO1 OVERLAP "--ddp-bucket-size 3000 " MTP},
    {"dp2_zero2_mtp", "qwen", 2, ZERO2 OVERLAP MTP},
    {"dp2_zero3_mtp", "llama", 2, ZERO3 OVERLAP MTP_REPEATED},
    {"dp2_mtp_evaluation", "gpt", 2, MTP EVALUATE},
    {"pp2_dp2_zero1_mtp", "gpt", 4, PP "2 " ZERO1 OVERLAP MTP},
    {"pp2_dp2_zero3_mtp", "qwen", 4, PP "2 " ZERO3 OVERLAP MTP},
    {"tp2_sp_mtp_full", "gpt", 2, TP "2 " SP FULL "1 " MTP},
    {"cp2_mtp_full", "qwen", 2, CP "2 " FULL "2 " MTP_REPEATED},
    {"pp2_zbh1_mtp_full", "llama", 2, PP "2 --pipeline-schedule zb-h1 " FULL "1 " MTP},
    {"tp2_sp_mtp_selective", "qwen", 2, TP "2 " SP SELECTIVE "mlp core_attn layernorm " MTP},
    {"pp2_mtp_offload", "gpt", 2, PP "2 " OFFLOAD "qkv_linear core_attn mlp_norm mlp_act " MTP},
    {"tp2_pp2_cp2_mtp", "qwen", 8, TP "2 " SP PP "2 " CP "2 " MTP},
    {"all_16_mtp", "gpt", 16, TP "2 " SP PP "2 " VPP "2 " CP "2 " ZERO1 OVERLAP MTP},
};

#define FP8 "--bf16 --fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 3 "

constexpr LayoutRow kQuantizedRows[] = {
    // Encoders compute padding here, since the run on one rank does, where it takes part in scales.
    {"dp2_fp8", "llama", 2, FP8},
    {"dp3_zero1_fp8", "llama", 3, ZERO1 OVERLAP FP8},
    {"dp2_zero3_fp8", "llama", 2, ZERO3 OVERLAP FP8},
    {"pp2_fp8", "llama", 2, PP "2 " FP8},
    {"pp2_vpp2_fp8", "llama", 2, PP "2 " VPP "2 " FP8},
    {"pp2_zbh1_fp8_full", "llama", 2, PP "2 --pipeline-schedule zb-h1 " FULL "1 " FP8},
    {"pp2_dp2_zero1_fp8", "llama", 4, PP "2 " ZERO1 OVERLAP FP8},
    {"dp2_fp8_bert", "bert", 2, FP8 "--remove-padding false", "bert"},
    {"dp2_zero1_fp8_t5", "t5", 2,
     ZERO1 OVERLAP FP8 "--decoder-seq-length 16 --remove-padding false", "t5"},
    {"pp2_fp8_t5_relative", "t5_relative", 2,
     PP "2 " FP8 "--decoder-seq-length 16 --remove-padding false", "t5"},
    {"pp3_homes_fp8_t5", "t5", 3,
     PP "3 --pipeline-model-parallel-layout Ee|t|ttL --decoder-seq-length 16 --remove-padding "
        "false " FP8,
     "t5"},
};

}  // namespace

std::span<const LayoutRow> layout_rows() { return kRows; }
std::span<const LayoutRow> quantized_rows() { return kQuantizedRows; }

const char* model_flags(const char* name) {
  for (const std::span<const ModelFlags> models :
       {std::span<const ModelFlags>(kModels), expert_models(), encoder_models(), hybrid_models(),
        vision_models(), audio_models()})
    for (const ModelFlags& model : models)
      if (std::strcmp(model.name, name) == 0) return model.flags;
  throw_error(cat("the matrix has no model ", name));
}

}  // namespace megatron
