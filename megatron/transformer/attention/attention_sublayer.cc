#include "megatron/transformer/attention/attention_sublayer.h"

#include "megatron/base/check.h"
#include "megatron/transformer/attention/attention.h"
#include "megatron/transformer/attention/multi_latent_attention.h"
#include "megatron/transformer/config/lora.h"

namespace megatron {

std::unique_ptr<AttentionSublayer> make_attention(const TransformerConfig& config,
                                                  int64_t layer_number, bool sequence_parallel,
                                                  const ParallelGroups& groups) {
  if (config.multi_latent_attention)
    return std::make_unique<MultiLatentAttention>(config, layer_number, sequence_parallel, groups);
  return std::make_unique<SelfAttention>(config, layer_number, sequence_parallel, groups);
}

LinearOptions linear_proj_options(const TransformerConfig& config, int64_t layer_number,
                                  bool sequence_parallel) {
  LinearOptions options;
  options.quantization = config.quantization(layer_number);
  options.bias = config.add_bias_linear;
  options.init = config.weight_init(config.hidden_size, config.attention_width(), /*output=*/true);
  options.sequence_parallel = sequence_parallel;
  options.lora = lora_options(config, "linear_proj");
  return options;
}

int64_t per_rank(const char* what, int64_t count, int ranks) {
  MEGATRON_CHECK(count % ranks == 0, what, " ", count, " is not divisible by ", ranks,
                 " tensor-parallel ranks");
  return count / ranks;
}

}  // namespace megatron
