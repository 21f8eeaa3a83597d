// What the tables of Hugging Face families have in common: rows of names, presets, and keys of
// config.json. Only for the files that hold families.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/interop/huggingface/hf_families.h"

namespace megatron {

// Families by the kind of their layers; hf_families() has all.
std::vector<HfFamily> dense_hf_families();
std::vector<HfFamily> moe_hf_families();
std::vector<HfFamily> encoder_hf_families();
std::vector<HfFamily> t5_hf_families();
std::vector<HfFamily> hybrid_hf_families();
std::vector<HfFamily> multimodal_hf_families();
std::vector<HfFamily> audio_hf_families();

namespace hf {

// To so many significant decimal digits.
double rounded(double value, int digits);

using Rope = HfFields::Rope;

// -- names, as HfRow has them

inline const HfRow kBody[] = {{"embedding.word_embeddings.weight", {"model.embed_tokens.weight"}},
                              {".self_attention.linear_proj.@", {".self_attn.o_proj.@"}},
                              {"decoder.final_layernorm.@", {"model.norm.@"}}};

inline const HfRow kHead[] = {{"output_layer.weight", {"lm_head.weight"}}};

inline const HfRow kSeparateQKV[] = {
    {".self_attention.linear_qkv.@",
     {".self_attn.q_proj.@", ".self_attn.k_proj.@", ".self_attn.v_proj.@"},
     HfLayout::kSeparateQKV}};

inline const HfRow kGatedMlp[] = {
    {".mlp.linear_fc1.@", {".mlp.gate_proj.@", ".mlp.up_proj.@"}, HfLayout::kStacked},
    {".mlp.linear_fc2.@", {".mlp.down_proj.@"}}};

inline const HfRow kPreNorms[] = {
    {".self_attention.linear_qkv.layer_norm_@", {".input_layernorm.@"}},
    {".mlp.linear_fc1.layer_norm_@", {".post_attention_layernorm.@"}}};

inline const HfRow kSandwichNorms[] = {
    {".self_attention.linear_qkv.layer_norm_weight", {".input_layernorm.weight"}},
    {".post_self_attn_layernorm.weight", {".post_attention_layernorm.weight"}},
    {".mlp.linear_fc1.layer_norm_weight", {".pre_feedforward_layernorm.weight"}},
    {".post_mlp_layernorm.weight", {".post_feedforward_layernorm.weight"}}};

inline const HfRow kQKNorms[] = {
    {".self_attention.q_layernorm.weight", {".self_attn.q_norm.weight"}},
    {".self_attention.k_layernorm.weight", {".self_attn.k_norm.weight"}}};

// -- presets

// RMSNorm, SwiGLU, rotary positions and no biases, as Llama and its descendants.
void rms_norm_gated(TransformerConfig& t);

// -- keys that several families share

void layers(HfFields& f, std::string_view key, TransformerConfig& t);
void query_groups(HfFields& f, TransformerConfig& t, std::optional<int64_t> missing = {});
// Default: hidden_size / num_attention_heads. Not written if it equals the default, unless
// `always`.
void head_dim(HfFields& f, TransformerConfig& t, bool always = true,
              std::optional<int64_t> missing = {});
void tied(HfFields& f, TransformerConfig& t, bool missing);
// attention_bias and mlp_bias, of which a model has both or none.
void linear_biases(HfFields& f, TransformerConfig& t);
void plain_activation(HfFields& f, TransformerConfig& t, std::string_view key, const char* missing);

// In `windowed` layers a token attends to the last `width` tokens, itself included.
void set_windows(const std::string& name, TransformerConfig& t, std::optional<int64_t> width,
                 const std::vector<bool>& windowed);
// sliding_window, the same for all layers, or null.
void one_window(HfFields& f, TransformerConfig& t, std::optional<int64_t> missing);
std::optional<int64_t> window_width(const TransformerConfig& t);
// layer_types; if that key is absent, `is_windowed(layer)`, layers from 0.
void layer_windows(HfFields& f, TransformerConfig& t, std::optional<int64_t> width,
                   const std::function<bool(int64_t layer)>& is_windowed);
void sizes(HfFields& f, ModelConfig& c);

// Defaults of Llama and its descendants, without the rotary ones.
struct CommonDefaults {
  double norm_eps = 1e-6;
  bool tied = false;
  int64_t max_positions = 2048;
  std::optional<int64_t> groups = {};
};
void common(HfFields& f, ModelConfig& c, const CommonDefaults& missing);

}  // namespace hf
}  // namespace megatron
