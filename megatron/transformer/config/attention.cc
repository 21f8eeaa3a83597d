#include "megatron/transformer/config/attention.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/transformer/config/detail/layer_list.h"

namespace megatron {
namespace {

constexpr std::string_view kSoftmaxTypes[] = {"vanilla", "off-by-one", "learnable"};

}  // namespace

void AttentionConfig::fields(FieldVisitor& v) {
  v.role(FieldRole::kArchitecture);
  v.group("network behavior");
  v.field("query_pre_attn_scalar", query_pre_attn_scalar,
          "divide attention scores by the square root of this instead of kv_channels'");
  v.field("attn_logit_softcapping", attn_logit_softcapping,
          "bound attention scores smoothly: c tanh(score / c); 0: not. Uses unfused attention");
  v.field("window_size", window_size, "sliding window: tokens to the left and to the right");
  v.field("window_attn_skip_freq", window_attn_skip_freq,
          "every n-th layer attends fully, or a list such as [1,1,0] with 1 for windowed layers");
  v.choice("softmax_type", softmax_type, kSoftmaxTypes,
           "what the softmax of attention sums beside the scores: nothing, 1, or the exponential "
           "of a learnable score of each head (attention sinks, gpt-oss)");
  v.field("attention_output_gate", attention_output_gate,
          "multiply each head's output by the sigmoid of a gate, which the input is projected to "
          "beside its query (Qwen 3.5)");
  v.role(FieldRole::kNumerics);
  v.group("regularization");
  v.field("attention_dropout", attention_dropout, "dropout of attention probabilities");
}

void AttentionConfig::validate(Violations& v, const ShapeConfig& shape) const {
  v.require(
      !query_pre_attn_scalar || *query_pre_attn_scalar > 0,
      cat("--query-pre-attn-scalar ", query_pre_attn_scalar.value_or(0), " must be positive"));
  v.require(attn_logit_softcapping >= 0,
            cat("--attn-logit-softcapping ", attn_logit_softcapping, " is negative"), "0: none");
  v.require(attention_dropout >= 0 && attention_dropout < 1,
            cat("--attention-dropout ", attention_dropout, " is outside [0, 1)"));
  v.require(window_size.empty() || window_size.size() == 2,
            cat("--window-size takes two values (left, right), got ", window_size.size()));
  for (int64_t w : window_size)
    v.require(w >= -1, cat("--window-size ", w, ": expected -1 (no limit) or more"));
  v.require(window_attn_skip_freq.empty() || !window_size.empty(),
            "--window-attn-skip-freq has an effect only with --window-size");
  if (!window_attn_skip_freq.empty()) {
    const auto list = parse_layer_list(window_attn_skip_freq);
    v.require(
        parse_layer_period(window_attn_skip_freq) ||
            (list && static_cast<int64_t>(list->size()) == shape.num_layers &&
             std::all_of(list->begin(), list->end(), [](int64_t e) { return e == 0 || e == 1; })),
        cat("--window-attn-skip-freq ", window_attn_skip_freq,
            ": expected a positive integer, or a list of ", shape.num_layers, " zeros and ones"));
  }
}

std::vector<int64_t> AttentionConfig::window(int64_t layer_number) const {
  if (window_size.empty() || window_attn_skip_freq.empty()) return window_size;
  if (const auto list = parse_layer_list(window_attn_skip_freq))
    return list->at(static_cast<size_t>(layer_number - 1)) ? window_size : std::vector<int64_t>{};
  return layer_number % *parse_layer_period(window_attn_skip_freq) == 0 ? std::vector<int64_t>{}
                                                                        : window_size;
}

bool AttentionConfig::attends_within_parts(int64_t layer_number) const {
  return whole_sample_layers &&
         std::ranges::find(*whole_sample_layers, layer_number) == whole_sample_layers->end();
}

}  // namespace megatron
