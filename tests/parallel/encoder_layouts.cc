// The rows of the matrix with encoders and encoder-decoders.
#include "layout_flags.h"
#include "layouts.h"

namespace megatron {
namespace {

constexpr ModelFlags kEncoderModels[] = {
    // LayerNorm, biases, learned positions, tied head, token types and both losses, all dropouts.
    {"bert",
     "--task bert --num-layers 4 --hidden-size 48 --num-attention-heads 12 --seq-length 24 "
     "--max-position-embeddings 24 --attention-dropout 0.1 --hidden-dropout 0.1 --mask-prob 0.3"},
    // RoPE, own output layer, masked tokens alone.
    {"bert_rope",
     "--task bert --bert-no-binary-head --num-layers 4 --hidden-size 48 --num-attention-heads 12 "
     "--seq-length 24 --position-embedding-type rope --untie-embeddings-and-output-weights "
     "--attention-dropout 0.1 --hidden-dropout 0.1 --no-bias-gelu-fusion"},
    // Norms of sums and of the embeddings, positions behind that of the padding token, one token
    // type.
    {"bert_residual",
     "--task bert --bert-no-binary-head --bert-token-types 1 --norm-placement residual "
     "--bert-embedding-norm --bert-first-position 2 --num-layers 4 --hidden-size 48 "
     "--num-attention-heads 12 --seq-length 24 --max-position-embeddings 24 "
     "--attention-dropout 0.1 --hidden-dropout 0.1 --no-bias-gelu-fusion"},
    // As ModernBERT: windows on both sides and a rotary base of their own in some layers, gated MLP
    // with the exact GELU, no biases of linears and norms, no norm before the first attention.
    {"bert_modern",
     "--task bert --bert-no-binary-head --bert-no-head-bias --bert-embedding-norm --num-layers 4 "
     "--hidden-size 48 --ffn-hidden-size 96 --num-attention-heads 12 --seq-length 24 "
     "--position-embedding-type rope --rotary-base 1000 --rotary-base-local 50 --window-size 5 5 "
     "--window-attn-skip-freq [0,1,1,0] --exact-geglu --disable-bias-linear --disable-norm-bias "
     "--no-first-input-norm --attention-dropout 0.1 --hidden-dropout 0.1"},
    // Several documents in a sample, positions learned.
    {"bert_packed",
     "--task bert --bert-data packed --bert-no-binary-head --num-layers 4 --hidden-size 48 "
     "--num-attention-heads 12 --seq-length 24 --max-position-embeddings 24 --attention-dropout "
     "0.1 "
     "--hidden-dropout 0.1 --mask-prob 0.3"},
    // Classes of pairs of texts.
    {"bert_classes",
     "--task classify --bert-classes 3 --num-layers 4 --hidden-size 48 --num-attention-heads 12 "
     "--seq-length 24 --max-position-embeddings 24 --attention-dropout 0.1 --hidden-dropout 0.1"},
    // Choices of questions.
    {"bert_choices",
     "--task multichoice --bert-choices 2 --num-layers 4 --hidden-size 48 --num-attention-heads 12 "
     "--seq-length 24 --max-position-embeddings 24 --attention-dropout 0.1 --hidden-dropout 0.1"},
    // Stacks and sequences of different lengths, learned positions, tied head, all dropouts.
    {"t5",
     "--task t5 --encoder-num-layers 1 --decoder-num-layers 3 --hidden-size 48 "
     "--num-attention-heads 12 --seq-length 24 --decoder-seq-length 12 --attention-dropout 0.1 "
     "--hidden-dropout 0.1"},
    // The same lengths; RoPE, own output layer, gated MLP without biases.
    {"t5_rope",
     "--task t5 --num-layers 2 --hidden-size 48 --num-attention-heads 12 --seq-length 24 "
     "--ffn-hidden-size 96 --decoder-seq-length 24 --position-embedding-type rope "
     "--untie-embeddings-and-output-weights --attention-dropout 0.1 --hidden-dropout 0.1 "
     "--normalization RMSNorm --swiglu --disable-bias-linear --mask-prob 0.3"},
    // Relative positions, as the first T5 of Google: scaled tied head without a bias, no biases.
    {"t5_relative",
     "--task t5 --num-layers 2 --hidden-size 48 --num-attention-heads 12 --seq-length 24 "
     "--decoder-seq-length 12 --position-embedding-type relative --relative-attention-num-buckets "
     "8 --relative-attention-max-distance 7 --query-pre-attn-scalar 1 --normalization RMSNorm "
     "--disable-bias-linear --relu --t5-no-output-bias --t5-scale-output --attention-dropout 0.1 "
     "--hidden-dropout 0.1"},
    // The same lengths and depths; learned positions, tied head.
    {"t5_even",
     "--task t5 --num-layers 2 --hidden-size 48 --num-attention-heads 12 --seq-length 24 "
     "--decoder-seq-length 24 --attention-dropout 0.1 --hidden-dropout 0.1"},
    // Pairs of texts of many lengths.
    {"t5_pairs",
     "--task seq2seq --num-layers 2 --hidden-size 48 --num-attention-heads 12 --seq-length 24 "
     "--decoder-seq-length 12 --attention-dropout 0.1 --hidden-dropout 0.1"},
    // Neighbours, of some chunks none: learned positions, tied head, all dropouts.
    {"retro",
     "--task retro --num-layers 4 --retro-layers 2 3 --retro-chunk-length 8 --hidden-size 48 "
     "--num-attention-heads 12 --seq-length 24 --max-position-embeddings 24 --attention-dropout "
     "0.1 --hidden-dropout 0.1"},
    // One layer of the encoder, three neighbours; RoPE, own output layer, gated MLP without biases.
    // An epsilon of 0.1 keeps norms from multiplying rounding: with 1e-5, in fp32 one rank is
    // 1.1e-5 to 2.0e-5 from fp64 in steps 1 to 5, as far as three tensor ranks are (0.8e-5 to
    // 1.1e-5); so 0.4e-5 both.
    {"retro_rope",
     "--task retro --num-layers 4 --retro-layers 1 3 4 --retro-chunk-length 4 "
     "--retro-encoder-num-layers 1 --retro-num-neighbors 3 --hidden-size 48 "
     "--num-attention-heads 12 --seq-length 24 --ffn-hidden-size 96 --position-embedding-type rope "
     "--untie-embeddings-and-output-weights --attention-dropout 0.1 --hidden-dropout 0.1 "
     "--normalization RMSNorm --swiglu --disable-bias-linear --norm-epsilon 0.1"},
    // Neighbours for the last layer alone, one for each chunk.
    {"retro_last",
     "--task retro --num-layers 4 --retro-layers 4 --retro-chunk-length 12 --retro-num-neighbors 1 "
     "--hidden-size 48 --num-attention-heads 12 --seq-length 24 --max-position-embeddings 24 "
     "--attention-dropout 0.1 --hidden-dropout 0.1"},
};

constexpr LayoutRow kEncoderRows[] = {
    {"tp2_bert", "bert", 2, TP "2", "bert"},
    {"tp2_sp_bert", "bert", 2, TP "2 " SP, "bert"},
    {"tp4_sp_bert", "bert", 4, TP "4 " SP, "bert"},
    {"tp3_sp_bert_rope", "bert_rope", 3, TP "3 " SP, "bert"},
    {"tp2_bert_rope", "bert_rope", 2, TP "2", "bert"},
    {"dp2_bert", "bert", 2, "", "bert"},
    {"dp3_zero1_bert", "bert", 3, ZERO1 OVERLAP, "bert"},
    {"dp2_zero2_bert", "bert", 2, ZERO2 OVERLAP, "bert"},
    {"dp2_zero3_bert", "bert", 2, ZERO3 OVERLAP, "bert"},
    {"dp2_means_bert", "bert", 2, "--no-calculate-per-token-loss", "bert"},
    {"dp2_evaluation_bert", "bert", 2, EVALUATE, "bert"},
    {"pp2_bert", "bert", 2, PP "2", "bert"},
    {"pp4_bert", "bert", 4, PP "4", "bert"},
    {"pp2_vpp2_bert", "bert", 2, PP "2 " VPP "2", "bert"},
    {"pp2_zbh1_bert", "bert", 2, PP "2 --pipeline-schedule zb-h1", "bert"},
    {"pp2_zbv_bert", "bert", 2, PP "2 --pipeline-schedule zb-v", "bert"},
    {"pp2_zbauto_bert_rope", "bert_rope", 2, PP "2 --pipeline-schedule zb-auto", "bert"},
    {"cp2_bert", "bert", 2, CP "2", "bert"},
    {"cp3_gather_bert", "bert", 3, CP "3 --cp-comm-type all_gather", "bert"},
    {"cp2_a2a_bert_rope", "bert_rope", 2, CP "2 --cp-comm-type a2a", "bert"},
    {"cp4_hierarchy_bert", "bert", 4,
     CP "4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2", "bert"},
    {"tp2_sp_full_bert", "bert", 2, TP "2 " SP FULL "1", "bert"},
    {"tp2_sp_selective_bert", "bert", 2, TP "2 " SP SELECTIVE "core_attn layernorm mlp", "bert"},
    {"pp2_offload_bert", "bert", 2, PP "2 " OFFLOAD "qkv_linear core_attn mlp_norm mlp_act",
     "bert"},
    {"tp2_sp_pp2_cp2_bert", "bert", 8, TP "2 " SP PP "2 " CP "2", "bert"},
    {"tp2_bert_residual", "bert_residual", 2, TP "2", "bert"},
    {"tp2_sp_bert_residual", "bert_residual", 2, TP "2 " SP, "bert"},
    {"pp2_vpp2_bert_residual", "bert_residual", 2, PP "2 " VPP "2", "bert"},
    {"pp2_zbh1_bert_residual", "bert_residual", 2, PP "2 --pipeline-schedule zb-h1", "bert"},
    {"cp2_bert_residual", "bert_residual", 2, CP "2", "bert"},
    {"dp2_zero3_bert_residual", "bert_residual", 2, ZERO3 OVERLAP, "bert"},
    {"tp2_sp_full_bert_residual", "bert_residual", 2, TP "2 " SP FULL "1", "bert"},
    {"tp2_sp_pp2_dp2_bert_residual", "bert_residual", 8, TP "2 " SP PP "2 " ZERO1 OVERLAP, "bert"},
    {"tp4_sp_bert_modern", "bert_modern", 4, TP "4 " SP, "bert"},
    {"pp2_vpp2_bert_modern", "bert_modern", 2, PP "2 " VPP "2", "bert"},
    {"pp2_zbv_bert_modern", "bert_modern", 2, PP "2 --pipeline-schedule zb-v", "bert"},
    {"cp2_gather_bert_modern", "bert_modern", 2, CP "2 --cp-comm-type all_gather", "bert"},
    {"cp3_a2a_bert_modern", "bert_modern", 3, CP "3 --cp-comm-type a2a", "bert"},
    {"dp2_zero3_bert_modern", "bert_modern", 2, ZERO3 OVERLAP, "bert"},
    {"tp2_sp_full_bert_modern", "bert_modern", 2, TP "2 " SP FULL "1", "bert"},
    {"tp2_sp_selective_bert_modern", "bert_modern", 2,
     TP "2 " SP SELECTIVE "core_attn layernorm mlp", "bert"},
    {"pp2_offload_bert_modern", "bert_modern", 2,
     PP "2 " OFFLOAD "attn_norm qkv_linear core_attn mlp_norm mlp_act", "bert"},
    {"tp2_sp_pp2_cp2_bert_modern", "bert_modern", 8,
     TP "2 " SP PP "2 " CP "2 --cp-comm-type all_gather " ZERO1 OVERLAP, "bert"},
    {"tp2_sp_bert_packed", "bert_packed", 2, TP "2 " SP, "bert"},
    {"cp2_bert_packed", "bert_packed", 2, CP "2", "bert"},
    {"pp2_vpp2_bert_packed", "bert_packed", 2, PP "2 " VPP "2", "bert"},
    {"tp2_bert_classes", "bert_classes", 2, TP "2", "classify"},
    {"pp2_bert_classes", "bert_classes", 2, PP "2", "classify"},
    {"dp2_zero3_bert_classes", "bert_classes", 2, ZERO3 OVERLAP, "classify"},
    {"tp2_pp2_dp2_bert_classes", "bert_classes", 8, TP "2 " PP "2 " ZERO1 OVERLAP, "classify"},
    {"tp2_bert_choices", "bert_choices", 2, TP "2", "multichoice"},
    {"dp2_evaluation_bert_choices", "bert_choices", 2, EVALUATE, "multichoice"},
    {"tp2_pp2_dp2_bert_choices", "bert_choices", 8, TP "2 " PP "2 " ZERO1 OVERLAP, "multichoice"},
    // Adapters, and beside them new heads.
    {"tp2_sp_bert_lora", "bert", 2, TP "2 " SP LORA, "bert"},
    {"pp2_bert_classes_lora", "bert_classes", 2, PP "2 " LORA, "classify"},
    // The head's bias, which the softmax over choices does not see, has a gradient of rounding
    // alone: the others' must not be small.
    {"dp2_zero3_bert_choices_lora", "bert_choices", 2,
     ZERO3 OVERLAP "--lora-rank 3 --lora-alpha 30 ", "multichoice"},
    // Context ranks, with adapters and with what leaves the device.
    {"cp2_offload_bert_lora", "bert", 2,
     CP "2 " OFFLOAD "qkv_linear core_attn mlp_norm mlp_act " LORA, "bert"},
    {"cp2_a2a_t5_lora", "t5", 2, CP "2 " CP_A2A LORA, "t5"},
    {"cp2_gather_offload_t5_relative_lora", "t5_relative", 2,
     CP "2 " CP_GATHER OFFLOAD "attn_norm qkv_linear core_attn attn_proj mlp_fc2 " LORA, "t5"},
    // What several layers save leaves the device, but the encoder's output.
    {"pp2_offload_t5", "t5", 2,
     PP "2 " OFFLOAD "attn_norm qkv_linear core_attn attn_proj mlp_norm mlp_act", "t5"},
    {"tp2_offload_layers_t5_even", "t5_even", 2,
     TP "2 --cpu-offloading-num-layers 1 --min-offloaded-tensor-size 0", "t5"},
    // Layouts that compute padding, against one rank that does so, too; all others leave it out.
    {"tp2_sp_padded_bert", "bert", 2, TP "2 " SP "--remove-padding false", "bert"},
    {"pp2_dp2_padded_bert_residual", "bert_residual", 4,
     PP "2 " ZERO1 OVERLAP "--remove-padding false", "bert"},
    {"all_16_bert", "bert", 16, TP "2 " SP PP "2 " VPP "2 " CP "2 " ZERO1 OVERLAP, "bert"},
    {"tp2_t5", "t5", 2, TP "2", "t5"},
    {"tp2_sp_t5", "t5", 2, TP "2 " SP, "t5"},
    {"tp4_sp_t5_rope", "t5_rope", 4, TP "4 " SP, "t5"},
    {"tp3_t5_rope", "t5_rope", 3, TP "3", "t5"},
    {"dp2_t5", "t5", 2, "", "t5"},
    {"dp3_zero1_t5", "t5", 3, ZERO1 OVERLAP, "t5"},
    {"dp2_zero2_t5_rope", "t5_rope", 2, ZERO2 OVERLAP, "t5"},
    {"dp2_zero3_t5", "t5", 2, ZERO3 OVERLAP, "t5"},
    {"dp2_means_t5", "t5", 2, "--no-calculate-per-token-loss", "t5"},
    {"dp2_evaluation_t5", "t5", 2, EVALUATE, "t5"},
    {"tp2_sp_full_t5", "t5", 2, TP "2 " SP FULL "1", "t5"},
    {"dp2_zero3_full_t5_rope", "t5_rope", 2, ZERO3 OVERLAP FULL "1", "t5"},
    {"tp2_sp_selective_t5", "t5", 2, TP "2 " SP SELECTIVE "core_attn layernorm mlp", "t5"},
    {"tp2_sp_dp2_zero1_t5", "t5", 4, TP "2 " SP ZERO1 OVERLAP, "t5"},
    // The cut before, at and behind the border between the stacks; tables with two and three homes,
    // some of them in two chunks of one rank.
    {"pp2_t5", "t5", 2, PP "2", "t5"},
    {"pp4_t5", "t5", 4, PP "4", "t5"},
    {"pp2_t5_rope", "t5_rope", 2, PP "2", "t5"},
    {"pp3_homes_t5", "t5", 3, PP "3 --pipeline-model-parallel-layout Ee|t|ttL", "t5"},
    {"pp3_behind_t5_even", "t5_even", 3, PP "3 --pipeline-model-parallel-layout Ee|et|tL", "t5"},
    {"pp4_ends_t5_rope", "t5_rope", 4, PP "4 --pipeline-model-parallel-layout E|eet|t|L", "t5"},
    {"pp2_vpp2_t5", "t5", 2, PP "2 " VPP "2", "t5"},
    {"pp2_vpp2_t5_even", "t5_even", 2, PP "2 " VPP "2", "t5"},
    {"pp2_zbh1_t5", "t5", 2, PP "2 --pipeline-schedule zb-h1", "t5"},
    {"pp2_zbv_t5_even", "t5_even", 2, PP "2 --pipeline-schedule zb-v", "t5"},
    {"tp2_sp_pp2_full_t5", "t5", 4, TP "2 " SP PP "2 " FULL "1", "t5"},
    {"pp2_dp2_zero2_t5_even", "t5_even", 4, PP "2 " ZERO2 OVERLAP, "t5"},
    {"pp2_dp2_zero3_t5", "t5", 4, PP "2 " ZERO3 OVERLAP, "t5"},
    // Tables of both stacks on several stages, chunks and tensor ranks, in one another's order.
    {"tp2_t5_relative", "t5_relative", 2, TP "2", "t5"},
    {"tp4_sp_t5_relative", "t5_relative", 4, TP "4 " SP, "t5"},
    {"dp2_zero3_t5_relative", "t5_relative", 2, ZERO3 OVERLAP, "t5"},
    {"tp2_sp_full_t5_relative", "t5_relative", 2, TP "2 " SP FULL "1", "t5"},
    {"tp2_selective_t5_relative", "t5_relative", 2, TP "2 " SELECTIVE "core_attn layernorm", "t5"},
    {"pp2_t5_relative", "t5_relative", 2, PP "2 --pipeline-model-parallel-layout Eeet|tL", "t5"},
    {"pp3_homes_t5_relative", "t5_relative", 3, PP "3 --pipeline-model-parallel-layout Ee|et|tL",
     "t5"},
    {"pp4_t5_relative", "t5_relative", 4, PP "4 " ZERO1 OVERLAP, "t5"},
    {"pp2_vpp2_t5_relative", "t5_relative", 2, PP "2 " VPP "2", "t5"},
    {"pp2_zbv_t5_relative", "t5_relative", 2, PP "2 --pipeline-schedule zb-v", "t5"},
    {"tp2_sp_pp2_dp2_t5_relative", "t5_relative", 8, TP "2 " SP PP "2 " ZERO2 OVERLAP, "t5"},
    {"tp2_sp_t5_pairs", "t5_pairs", 2, TP "2 " SP, "seq2seq"},
    {"dp2_evaluation_t5_pairs", "t5_pairs", 2, EVALUATE, "seq2seq"},
    {"tp2_pp2_dp2_t5_pairs", "t5_pairs", 8, TP "2 " PP "2 " ZERO1 OVERLAP, "seq2seq"},
    {"tp2_sp_t5_lora", "t5", 2, TP "2 " SP LORA, "t5"},
    {"tp4_t5_rope_lora_parts", "t5_rope", 4, TP "4 " LORA "--lora-targets q v wi_1 wo", "t5"},
    {"pp3_homes_t5_relative_lora", "t5_relative", 3,
     PP "3 --pipeline-model-parallel-layout Ee|et|tL " LORA, "t5"},
    {"tp2_full_t5_lora", "t5", 2, TP "2 " FULL "1 " LORA, "t5"},
    {"tp2_sp_padded_t5", "t5", 2, TP "2 " SP "--remove-padding false", "t5"},
    {"tp2_pp2_padded_t5_relative", "t5_relative", 4, TP "2 " PP "2 --remove-padding false", "t5"},
    {"all_16_t5", "t5", 16, TP "2 " SP PP "4 " ZERO1 OVERLAP, "t5"},
    // Both sequences over context ranks; cross attention gathers keys and values.
    {"cp2_gather_t5", "t5", 2, CP "2 " CP_GATHER, "t5"},
    {"cp2_a2a_t5", "t5", 2, CP "2 " CP_A2A, "t5"},
    {"cp2_gather_t5_relative", "t5_relative", 2, CP "2 " CP_GATHER, "t5"},
    {"cp3_a2a_t5_relative", "t5_relative", 3, CP "3 " CP_A2A, "t5"},
    {"cp2_layers_t5_relative", "t5_relative", 2,
     CP "2 --cp-comm-type all_gather a2a a2a all_gather", "t5"},
    {"tp2_sp_cp2_a2a_t5_rope", "t5_rope", 4, TP "2 " SP CP "2 " CP_A2A, "t5"},
    {"pp2_cp2_gather_t5", "t5", 4, PP "2 " CP "2 " CP_GATHER, "t5"},
    {"cp2_gather_full_t5_relative", "t5_relative", 2, CP "2 " CP_GATHER FULL "1", "t5"},
    {"cp2_gather_t5_pairs", "t5_pairs", 2, CP "2 " CP_GATHER, "seq2seq"},

    // Encoded neighbours move beside the stream from the first layer that reads them to the last.
    {"tp2_retro", "retro", 2, TP "2", "retro"},
    {"tp3_retro_rope", "retro_rope", 3, TP "3", "retro"},
    {"tp2_sp_retro_rope", "retro_rope", 2, TP "2 " SP, "retro"},
    {"tp4_sp_retro", "retro", 4, TP "4 " SP, "retro"},
    {"dp3_zero1_retro", "retro", 3, ZERO1 OVERLAP, "retro"},
    {"dp2_zero2_retro_rope", "retro_rope", 2, ZERO2 OVERLAP, "retro"},
    {"dp2_zero3_retro", "retro", 2, ZERO3 OVERLAP, "retro"},
    {"dp2_evaluation_retro", "retro", 2, EVALUATE, "retro"},
    {"tp2_sp_full_retro", "retro", 2, TP "2 " SP FULL "1", "retro"},
    {"tp2_sp_selective_retro", "retro", 2, TP "2 " SP SELECTIVE "core_attn layernorm mlp", "retro"},
    {"pp2_retro", "retro", 2, PP "2", "retro"},
    {"pp2_retro_last", "retro_last", 2, PP "2", "retro"},
    {"pp4_retro_rope", "retro_rope", 4, PP "4", "retro"},
    {"pp4_ends_retro", "retro", 4, PP "4 --pipeline-model-parallel-layout E|tt|tt|L", "retro"},
    {"pp2_vpp2_retro", "retro", 2, PP "2 " VPP "2", "retro"},
    {"pp2_zbh1_retro", "retro", 2, PP "2 --pipeline-schedule zb-h1", "retro"},
    {"pp2_zbv_retro_rope", "retro_rope", 2, PP "2 --pipeline-schedule zb-v", "retro"},
    {"tp2_sp_pp2_full_retro", "retro", 4, TP "2 " SP PP "2 " FULL "1", "retro"},
    {"tp2_sp_pp2_dp2_retro", "retro", 8, TP "2 " SP PP "2 " ZERO2 OVERLAP, "retro"},
    {"tp2_sp_encoder_retro", "retro", 2, TP "2 " SP SELECTIVE "retro_encoder", "retro"},
};

// Joins of what the rows above show apart.
constexpr LayoutRow kMoreEncoderRows[] = {
    {"cp2_a2a_bert_packed", "bert_packed", 2, CP "2 " CP_A2A, "bert"},
    {"tp2_sp_pp2_cp2_bert_packed", "bert_packed", 8, TP "2 " SP PP "2 " CP "2 " CP_GATHER ZERO1,
     "bert"},
    {"cp4_gather_t5_rope", "t5_rope", 4, CP "4 " CP_GATHER, "t5"},
    {"tp2_cp2_gather_t5_relative", "t5_relative", 4, TP "2 " CP "2 " CP_GATHER, "t5"},
    {"pp2_zbh1_cp2_a2a_t5_relative", "t5_relative", 4,
     PP "2 --pipeline-schedule zb-h1 " CP "2 " CP_A2A, "t5"},
    {"cp2_gather_selective_t5_relative", "t5_relative", 2,
     CP "2 " CP_GATHER SELECTIVE "core_attn layernorm", "t5"},
    {"cp2_dp2_zero3_t5_relative", "t5_relative", 4, CP "2 " CP_GATHER ZERO3 OVERLAP, "t5"},
    {"cp2_dp2_evaluation_t5_pairs", "t5_pairs", 4, CP "2 " CP_A2A EVALUATE, "seq2seq"},
    {"all_16_cp2_t5_relative", "t5_relative", 16,
     TP "2 " SP PP "2 " VPP "2 " CP "2 " CP_GATHER ZERO1 OVERLAP, "t5"},
    {"pp2_zbh1_t5_lora_whole", "t5", 2,
     PP "2 --pipeline-schedule zb-h1 " LORA "--lora-targets linear_qkv linear_fc1", "t5"},
    {"dp2_zero3_t5_pairs_lora", "t5_pairs", 2, ZERO3 OVERLAP LORA, "seq2seq"},
    {"pp2_vpp2_bert_residual_lora", "bert_residual", 2, PP "2 " VPP "2 " LORA, "bert"},
    {"tp2_bert_classes_lora", "bert_classes", 2, TP "2 " LORA, "classify"},
    {"tp2_sp_offload_t5_relative", "t5_relative", 2,
     TP "2 " SP OFFLOAD "qkv_linear core_attn attn_proj mlp_fc2", "t5"},
};

}  // namespace

std::span<const LayoutRow> encoder_rows() { return kEncoderRows; }
std::span<const LayoutRow> more_encoder_rows() { return kMoreEncoderRows; }
std::span<const ModelFlags> encoder_models() { return kEncoderModels; }

}  // namespace megatron
