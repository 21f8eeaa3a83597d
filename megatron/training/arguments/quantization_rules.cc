#include "megatron/training/arguments/quantization_rules.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/models/t5/t5_config.h"
#include "megatron/training/arguments/t5_rules.h"

namespace megatron {
namespace {

class Sizes {
 public:
  Sizes(const Arguments& a, Violations& v)
      : a_(a),
        t_(a.transformer),
        v_(v),
        flag_(t_.fp8_format != Fp8Format::kNone ? "--fp8-format" : "--fp4-format"),
        // a quantised layer
        unit_(t_.quantization(t_.num_layers_at_start_in_bf16 + 1).alignment()),
        tp_(std::max<int64_t>(1, a.parallel.tensor_model_parallel_size)),
        cp_(std::max<int64_t>(1, a.parallel.context_parallel_size)) {}

  void check() {
    if (!a_.optimizer.bf16)
      v_.add(cat(flag_, " needs --bf16"),
             "the operands are rounded from bf16, and the rest stays there");
    check("--hidden-size", t_.hidden_size);
    if (t_.has_letter('-')) check("--ffn-hidden-size" + by_tp(), t_.ffn_hidden_size, tp_);
    if (t_.multi_latent_attention)
      check_latent_attention();
    else if (t_.attends())
      check_attention();
    if (t_.has_moe()) check_experts();
    check_states();
    check_rows();
  }

 private:
  std::string by_tp() const { return tp_ > 1 ? " / --tensor-model-parallel-size" : ""; }

  // `size` is divided by `ranks`.
  void check(const std::string& what, int64_t size, int64_t ranks = 1) {
    ranks = std::max<int64_t>(1, ranks);
    const int64_t own = size / ranks;
    if (own <= 0 || own % unit_ == 0) return;
    std::string hint;
    for (const int64_t near : {own / unit_ * unit_, (own / unit_ + 1) * unit_})
      if (near > 0) hint += cat(hint.empty() ? "nearest that fit: " : ", ", near * ranks);
    if (unit_ > 16) hint += "; --fp8-recipe tensorwise or delayed needs multiples of 16";
    v_.add(cat(what, " is ", own, ", which ", flag_, " needs to be a multiple of ", unit_), hint);
  }

  void check_attention() {
    check("--num-attention-heads x --kv-channels" + by_tp(),
          t_.num_attention_heads * t_.kv_channels, tp_);
    check("the rows of queries, keys and values" + by_tp(),
          (t_.num_attention_heads + 2 * t_.query_groups()) * t_.kv_channels, tp_);
  }

  void check_latent_attention() {
    const int64_t heads = t_.num_attention_heads;
    if (t_.q_lora_rank) check("--q-lora-rank", *t_.q_lora_rank);
    check("--kv-lora-rank", t_.kv_lora_rank);
    check("--kv-lora-rank + --qk-pos-emb-head-dim", t_.kv_lora_rank + t_.qk_pos_emb_head_dim);
    check("--num-attention-heads x (--qk-head-dim + --qk-pos-emb-head-dim)" + by_tp(),
          heads * t_.query_head_size(), tp_);
    check("--num-attention-heads x (--qk-head-dim + --v-head-dim)" + by_tp(),
          heads * (t_.qk_head_dim + t_.v_head_dim), tp_);
    check("--num-attention-heads x --v-head-dim" + by_tp(), heads * t_.v_head_dim, tp_);
  }

  void check_experts() {
    const int64_t etp = a_.parallel.expert_tensor_size();
    check(cat(t_.moe_ffn_hidden_size ? "--moe-ffn-hidden-size" : "--ffn-hidden-size of an expert",
              etp > 1 ? " / --expert-tensor-parallel-size" : ""),
          t_.expert_ffn_size(t_), etp);
    if (t_.moe_latent_size) check("--moe-latent-size", *t_.moe_latent_size);
    if (t_.moe_shared_expert_intermediate_size)
      check("--moe-shared-expert-intermediate-size" + by_tp(),
            *t_.moe_shared_expert_intermediate_size, tp_);
  }

  // Layers M and G of a pattern.
  void check_states() {
    if (t_.has_letter('M')) {
      check("--mamba-num-heads x --mamba-head-dim" + by_tp(), t_.mamba_width(t_), tp_);
      check("the rows of in_proj of a Mamba-2 layer" + by_tp(),
            2 * (t_.mamba_width(t_) + t_.mamba_states()) + t_.mamba_heads(t_), tp_);
    }
    if (t_.has_letter('G')) {
      check("--linear-num-value-heads x --linear-value-head-dim" + by_tp(), t_.linear_value_width(),
            tp_);
      check("the rows of in_proj of a gated delta net" + by_tp(),
            2 * (t_.linear_key_width() + t_.linear_value_width() + t_.linear_num_value_heads), tp_);
    }
  }

  // Projections that are not divided multiply the rows that a tensor rank has.
  void check_rows() {
    const bool undivided = t_.multi_latent_attention || t_.moe_latent_size;
    const int64_t ranks = undivided && a_.parallel.sequence_parallel ? cp_ * tp_ : cp_;
    const std::string by = cat(cp_ > 1 ? " / --context-parallel-size" : "",
                               ranks > cp_ ? " / --tensor-model-parallel-size" : "");
    if (trains_t5(a_.training.task))
      check("--micro-batch-size x --decoder-seq-length" + by,
            a_.training.micro_batch_size * own_config<T5Config>(a_.own).decoder_seq_length, ranks);
    const int64_t length = t_.seq_length;
    check("--micro-batch-size x --seq-length" + by, a_.training.micro_batch_size * length, ranks);
    if (a_.training.eval_iters > 0 && a_.eval_micro_batch_size() != a_.training.micro_batch_size)
      check("--eval-micro-batch-size x --seq-length" + by, a_.eval_micro_batch_size() * length,
            ranks);
  }

  const Arguments& a_;
  const TransformerConfig& t_;
  Violations& v_;
  const char* const flag_;
  const int64_t unit_, tp_, cp_;
};

}  // namespace

void validate_quantization(const Arguments& arguments, Violations& violations) {
  if (arguments.transformer.is_quantized()) Sizes(arguments, violations).check();
}

}  // namespace megatron
