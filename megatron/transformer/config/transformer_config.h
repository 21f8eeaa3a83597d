// Shape and behavior of a transformer. Every field is a flag, spelled as in Megatron where Megatron
// has it; docs/flags.md lists them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/base/fields.h"
#include "megatron/nn/parameter.h"
#include "megatron/tensor/activation.h"
#include "megatron/tensor/attention/attention.h"
#include "megatron/tensor/norm.h"
#include "megatron/tensor/quantization_options.h"

namespace megatron {

// kYarn becomes kRope with RopeScaling::kYarn when the configuration is finalized.
enum class CrossEntropyFusion { kNative, kTe, kLinear };  // kTe: the same as kNative here
enum class PositionEmbedding { kLearnedAbsolute, kRope, kNone, kYarn };
// How rotary frequencies are scaled for sequences longer than a model was trained on. kLinear: all
// divided by the factor; kLlama3: long wavelengths only; kYarn: Peng et al. 2023
// (arXiv:2309.00071); kLongRope: Ding et al. 2024 (arXiv:2402.13753), one factor per frequency,
// from one list up to the original length and from another one beyond.
enum class RopeScaling { kNone, kLinear, kLlama3, kYarn, kLongRope };
// Where a layer normalises: the input of each sublayer, its output before the residual add, or
// both.
enum class NormPlacement { kPre, kPost, kSandwich };
enum class RecomputeGranularity { kNone, kFull, kSelective };
enum class RecomputeMethod { kUniform, kBlock };
// kHybrid: E4M3, but E5M2 for output gradients. kMxfp8 and kCustom are parsed and refused.
enum class Fp8Format { kNone, kE4M3, kHybrid };
enum class Fp8Recipe { kDelayed, kTensorwise, kBlockwise, kMxfp8, kCustom };
enum class AmaxAlgorithm { kMostRecent, kMax };
enum class Fp4Format { kNone, kE2M1 };
enum class Fp4Recipe { kNvfp4, kCustom };
enum class ContextParallelType { kP2P, kAllGather, kA2A, kA2AP2P };

struct TransformerConfig : Config {
  // -- shape
  int64_t num_layers = 0;
  int64_t hidden_size = 0;
  int64_t ffn_hidden_size = 0;  // 0: 4 * hidden_size; with swiglu: floor(8 h / 3 / 64) * 64
  int64_t num_attention_heads = 0;
  bool group_query_attention = false;
  int64_t num_query_groups = 1;  // ignored without group_query_attention; see query_groups()
  int64_t kv_channels = 0;       // 0: hidden_size / num_attention_heads
  int64_t seq_length = 0;
  int64_t max_position_embeddings = 0;  // 0: seq_length
  bool untie_embeddings_and_output_weights = false;

  // -- behavior
  PositionEmbedding position_embedding_type = PositionEmbedding::kLearnedAbsolute;
  bool use_rotary_position_embeddings = false;  // old alias of --position-embedding-type rope
  bool add_position_embedding = true;           // false: no learned position embedding
  double rotary_base = 10000.0;
  double rotary_percent = 1.0;
  bool rotary_interleaved = false;
  std::optional<int64_t> rotary_seq_len_interpolation_factor;
  // Base of windowed layers, which then use no RoPE scaling
  std::optional<double> rotary_base_local;
  bool use_rope_scaling = false;  // Megatron's spelling of rope_scaling_type llama3
  RopeScaling rope_scaling_type = RopeScaling::kNone;
  double rope_scaling_factor = 8.0;
  int64_t rope_original_max_position_embeddings = 8192;
  double rope_low_freq_factor = 1.0, rope_high_freq_factor = 4.0;  // llama3
  double yarn_beta_fast = 32.0, yarn_beta_slow = 1.0;
  bool yarn_correction_range_round_to_int = true;
  std::vector<double> longrope_short_factor, longrope_long_factor;  // one per rotated pair
  // Multiplies cos and sin; none: as the scaling type prescribes
  std::optional<double> rope_attention_factor;
  Normalization normalization = Normalization::kLayerNorm;
  double layernorm_epsilon = 1e-5;
  bool layernorm_zero_centered_gamma = false;
  bool add_bias_linear = true;
  bool add_qkv_bias = false;
  bool qk_layernorm = false;
  bool qk_layernorm_over_heads = false;  // one RMS over all heads of a token, not one per head
  NormPlacement norm_placement = NormPlacement::kPre;
  bool parallel_residual = false;  // x + attention(norm(x)) + mlp(norm(x))
  bool scale_embeddings = false;   // by sqrt(hidden_size)
  // Scores are divided by its square root; none: kv_channels
  std::optional<double> query_pre_attn_scalar;
  double attn_logit_softcapping = 0.0;   // c: scores become c tanh(score / c); 0: none
  double final_logit_softcapping = 0.0;  // the same for the logits
  std::vector<int64_t> window_size;      // {left, right}; empty: none
  // Integer n: every n-th layer attends fully; or a list "[1,0,...]", 1 = windowed; empty: all
  // layers are windowed.
  std::string window_attn_skip_freq;
  bool swiglu = false;
  bool geglu = false;
  bool quick_geglu = false;
  bool squared_relu = false;
  bool openai_gelu = false;
  // With biases: the tanh approximation, as Megatron's fused kernel computes
  bool bias_gelu_fusion = true;
  double glu_linear_offset = 0.0;
  double hidden_dropout = 0.1;
  double attention_dropout = 0.1;
  bool fp32_residual_connection = false;
  double z_loss_coeff = 0.0;  // weight of log(Z)^2 per token

  // -- precision of linear layers; the head, the embedding and attention stay in the model's type
  Fp8Format fp8_format = Fp8Format::kNone;
  Fp8Recipe fp8_recipe = Fp8Recipe::kDelayed;
  int64_t fp8_margin = 0;            // delayed: scales are divided by 2^margin
  int64_t fp8_amax_history_len = 1;  // delayed: steps
  AmaxAlgorithm fp8_amax_compute_algo = AmaxAlgorithm::kMostRecent;
  bool fp8_wgrad = true;  // false: weight-gradient GEMMs use operands in the model's type
  Fp4Format fp4_format = Fp4Format::kNone;
  Fp4Recipe fp4_recipe = Fp4Recipe::kNvfp4;
  bool first_last_layers_bf16 = false;  // layers at both ends are not quantised; how many:
  int64_t num_layers_at_start_in_bf16 = 1, num_layers_at_end_in_bf16 = 1;
  // -- adapters (LoRA): Hu et al. 2021 (arXiv:2106.09685)
  int64_t lora_rank = 0;             // 0: no adapters; above 0 only adapters are trained
  std::optional<double> lora_alpha;  // adapter outputs are multiplied by lora_alpha / lora_rank
  std::vector<std::string> lora_targets;  // see transformer/config/lora.h; finalize() expands them

  // -- initialisation
  double init_method_std = 0.02;
  std::optional<double> embedding_init_method_std;
  bool init_method_xavier_uniform = false;
  int64_t seed = 1234;

  // -- performance
  CrossEntropyFusion cross_entropy_fusion_impl = CrossEntropyFusion::kNative;
  // Chunk of kLinear; 0: chosen by the memory of the logits
  int64_t cross_entropy_chunk_tokens = 0;
  AttentionBackend attention_backend = AttentionBackend::kAuto;
  bool fast = false;  // allows nondeterministic kernels
  RecomputeGranularity recompute_granularity = RecomputeGranularity::kNone;
  RecomputeMethod recompute_method = RecomputeMethod::kUniform;
  int64_t recompute_num_layers = 1;
  // core_attn, layernorm, mlp, mlp_act; empty with selective: core_attn. Megatron has no mlp_act;
  // it does for the MLP what moe_act does for experts.
  std::vector<std::string> recompute_modules;
  bool recompute_activations = false;  // old spelling of --recompute-granularity selective
  // Each tensor-parallel rank keeps 1/t of the saved inputs of recomputed layers.
  bool distribute_saved_activations = false;
  bool fine_grained_activation_offloading = false;
  // Which saved activations of a layer are offloaded to host memory, named by the module whose
  // input they are: attn_norm, qkv_linear, core_attn, attn_proj, mlp_norm, and mlp_fc1, mlp_act,
  // mlp_fc2, which Megatron has for experts only.
  std::vector<std::string> offload_modules;
  int64_t min_offloaded_tensor_size = 1048576;  // elements; smaller tensors stay on the device
  double activation_offload_fraction = 1.0;     // this share of a chunk's layers, from the first
  // Half layers whose transfer to the host may be in flight at one time.
  int64_t fine_grained_offloading_max_inflight_offloads = 1;
  int64_t cpu_offloading_num_layers = 0;            // the first layers, all saved activations
  std::vector<std::string> cp_comm_type = {"p2p"};  // one for all layers, or one per layer

  void fields(FieldVisitor& visitor) override;
  void validate(Violations& violations) const override;

  // Derives fields that were left at 0 or given by an alias. Idempotent; called after parsing.
  void finalize();

  // -- derived
  int64_t query_groups() const {
    return group_query_attention ? num_query_groups : num_attention_heads;
  }
  Activation activation() const;
  double softmax_scale() const;
  int64_t rotary_width() const;  // rotated features of a head
  bool has_pre_norm() const { return norm_placement != NormPlacement::kPost; }
  bool has_post_norm() const { return norm_placement != NormPlacement::kPre; }
  // Whether the layer (numbered from 1) uses rotary_base_local.
  bool is_rotary_local(int64_t layer_number) const {
    return rotary_base_local.has_value() && !window(layer_number).empty();
  }
  bool qkv_bias() const { return add_bias_linear || add_qkv_bias; }
  // {left, right} of the layer (numbered from 1), or empty when it attends fully.
  std::vector<int64_t> window(int64_t layer_number) const;
  // Whether selective recomputation includes this one of recompute_modules.
  bool recomputes(std::string_view module) const;
  bool offloads_activations() const {
    return fine_grained_activation_offloading || cpu_offloading_num_layers > 0;
  }
  // Whether an offloaded layer offloads this one of offload_modules.
  bool offloads(std::string_view module) const;
  // How many layers of a chunk are offloaded, from the first. The last layer of the model never is,
  // as its backward comes first.
  int64_t num_offloaded_layers(int64_t chunk_layers, bool last_chunk) const;
  bool is_quantized() const {
    return fp8_format != Fp8Format::kNone || fp4_format != Fp4Format::kNone;
  }
  // Quantisation of the linears of a layer; layers count from 1.
  QuantizationOptions quantization(int64_t layer_number) const;
  void remove_quantization();  // all GEMMs in the model's type, as in inference
  ContextParallelType context_parallel_type(int64_t layer_number) const;  // layers count from 1
  // Initialisation of a weight [rows, columns]; `output` is for linear_proj and linear_fc2, whose
  // std is divided by sqrt(2 num_layers).
  Init weight_init(int64_t rows, int64_t columns, bool output = false) const;
  Init embedding_init(int64_t rows) const;

 private:
  void validate_quantization(Violations& violations) const;
  void validate_rope_scaling(Violations& violations) const;
  void validate_lora(Violations& violations) const;
};

}  // namespace megatron
