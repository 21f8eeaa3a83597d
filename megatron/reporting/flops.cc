#include "megatron/reporting/flops.h"

#include <algorithm>
#include <utility>

#include "megatron/base/check.h"

namespace megatron {

namespace {

// One matrix product costs 2 per multiply-add, three times (forward, input gradient, weight
// gradient).
constexpr double kForwardBackward = 3.0;
constexpr double kPerParameter = 2.0 * kForwardBackward;

double gate_factor(const ModelFlops& m) { return m.gated ? 3.0 : 2.0; }

// Weights that one token is multiplied with in one MoE layer.
double moe_weights_per_token(const ModelFlops& m, const MoEFlops& moe) {
  const double h = m.hidden_size, f = gate_factor(m);
  const double routed = static_cast<double>(moe.ffn_hidden_size) * f * moe.topk;
  const double latent = moe.latent_size;
  const double experts = latent > 0 ? h * (routed * latent / h + 2.0 * latent) : h * routed;
  return experts + h * moe.shared_ffn_hidden_size * f;
}

// Attention of one layer: projections of T tokens, and the two GEMMs with the scores.
double attention_flops(const ModelFlops& m, const IterationTokens& work) {
  const double h = m.hidden_size, heads = m.num_attention_heads;
  if (m.mla) {
    const MLAFlops& a = *m.mla;
    const double qk = a.qk_head_dim, rope = a.qk_pos_emb_head_dim, v = a.v_head_dim;
    const double q_term =
        a.q_lora_rank > 0 ? a.q_lora_rank * (h + heads * (qk + rope) + 1) : h * heads * (qk + rope);
    const double kv_term = a.kv_lora_rank * (h + heads * (qk + v) + 1) + h * rope;
    return kPerParameter * work.tokens * (q_term + kv_term + heads * v * h) +
           kPerParameter * work.squared_lengths * heads * ((qk + rope) / 2 + v / 2);
  }
  const double q = static_cast<double>(m.kv_channels) * heads;
  const double kv = 2.0 * m.kv_channels * m.num_query_groups;
  const double qkv = q + kv + (m.attention_output_gate ? q : 0.0);
  return kPerParameter * work.tokens * (h * qkv + q * h) + kPerParameter * work.squared_lengths * q;
}

double logits_flops(const ModelFlops& m, const IterationTokens& work) {
  return kPerParameter * work.tokens * m.hidden_size * m.padded_vocab_size *
         (1.0 + m.mtp_num_layers);
}

// Layers by kind, multi-token prediction layers included: they are of the kind of the last layer.
std::pair<int64_t, int64_t> dense_and_moe_layers(const ModelFlops& m) {
  int64_t moe = 0;
  bool last_is_moe = false;
  if (m.moe && m.moe->num_experts > 0) {
    const std::vector<bool>& flags = m.moe->is_moe_layer;
    moe = flags.empty() ? m.num_layers : std::count(flags.begin(), flags.end(), true);
    last_is_moe = flags.empty() || flags.back();
  }
  int64_t dense = m.num_layers - moe;
  (last_is_moe ? moe : dense) += m.mtp_num_layers;
  return {dense, moe};
}

double transformer_flops(const ModelFlops& m, const IterationTokens& work) {
  const double h = m.hidden_size, mtp = m.mtp_num_layers;
  const auto [dense, moe] = dense_and_moe_layers(m);
  double weights = h * m.ffn_hidden_size * gate_factor(m) * dense;
  if (moe > 0) weights += moe_weights_per_token(m, *m.moe) * moe;
  weights += mtp * (3 * h + 2 * h * h);  // norms and the input projection of the prediction layers
  return kPerParameter * work.tokens * weights +
         attention_flops(m, work) * static_cast<double>(m.num_layers + m.mtp_num_layers) +
         logits_flops(m, work);
}

// Forward cost of one layer of a hybrid model, by its letter.
double hybrid_layer_flops(const ModelFlops& m, const IterationTokens& work, char kind) {
  const double h = m.hidden_size, t = work.tokens, gate = m.gated ? 1.5 : 1.0;
  if (kind == '*') {
    const double heads = m.num_attention_heads;
    const double p = m.kv_channels * heads / h;
    return 4 * t * h * p * (h + h * m.num_query_groups / heads) + 2 * work.squared_lengths * h * p;
  }
  if (kind == '-') return 4 * t * h * m.ffn_hidden_size * gate;
  if (kind == 'E') {
    MEGATRON_CHECK(m.moe, "the hybrid pattern ", m.hybrid_pattern,
                   " has an E layer but no experts are described");
    return 4 * t * h * gate *
           (m.moe->ffn_hidden_size * m.moe->topk + m.moe->shared_ffn_hidden_size);
  }
  MEGATRON_CHECK(kind == 'M', "the hybrid pattern ", m.hybrid_pattern, " has the unknown layer '",
                 std::string(1, kind), "', expected M, *, - or E");
  const double d = 2 * h, state = m.mamba.state_dim;
  const double heads = d / m.mamba.head_dim;
  return 2 * t * h * (2 * d + 2 * m.mamba.num_groups * state + heads) + 7 * t * d * state +
         2 * t * d * h;
}

}  // namespace

IterationTokens IterationTokens::unpacked(int64_t samples, int64_t sequence_length) {
  const double s = sequence_length;
  return {samples * s, samples * s * s};
}

double iteration_flops(const ModelFlops& model, const IterationTokens& work) {
  if (model.hybrid_pattern.empty()) return transformer_flops(model, work);
  double forward = 0;
  for (char kind : model.hybrid_pattern) forward += hybrid_layer_flops(model, work, kind);
  return kForwardBackward * forward + logits_flops(model, work);
}

double peak_bf16_flops(const std::string& device_name) {
  // Data sheets, dense, SXM variants.
  static constexpr std::pair<const char*, double> kPeaks[] = {
      {"H100 PCIe", 756e12}, {"H200", 989e12},    {"H100", 989e12},  {"GH200", 989e12},
      {"H20", 148e12},       {"B200", 2250e12},   {"B100", 1750e12}, {"GB200", 2500e12},
      {"A100", 312e12},      {"A800", 312e12},    {"L40S", 362e12},  {"L4", 121e12},
      {"A10", 125e12},       {"RTX 4090", 165e12}};
  const std::pair<const char*, double>* best = nullptr;
  size_t best_length = 0;
  for (const auto& entry : kPeaks) {
    const std::string name = entry.first;
    if (device_name.find(name) != std::string::npos && name.size() > best_length) {
      best = &entry;
      best_length = name.size();
    }
  }
  return best ? best->second : 0.0;
}

}  // namespace megatron
