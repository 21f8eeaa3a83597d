#include "megatron/models/common/refused_options.h"

#include "megatron/base/check.h"

namespace megatron {

void refuse_option(bool given, const char* option, const char* model) {
  MEGATRON_CHECK(!given, option, " is not built for ", model);
}

void refuse_options_of_gpt(const ModelConfig& config, const char* model) {
  const TransformerConfig& t = config.transformer;
  const auto refuse = [&](bool given, const char* what) { refuse_option(given, what, model); };
  refuse(config.pipeline_vocab_parallel, "--pipeline-vocab-parallel");
  refuse(t.cross_entropy_fusion_impl == CrossEntropyFusion::kLinear,
         "--cross-entropy-fusion-impl linear");
  refuse(t.final_logit_softcapping > 0, "--final-logit-softcapping");
  refuse(t.logits_scaling != 1.0, "--logits-scaling");
  refuse(t.attn_logit_softcapping > 0, "--attn-logit-softcapping");
  refuse(t.softmax_type != SoftmaxType::kVanilla, "--softmax-type");
  refuse(!t.window_size.empty(), "--window-size");
  refuse(t.multi_latent_attention, "--multi-latent-attention");
  refuse(t.has_moe(), "--num-experts");
  refuse(t.mtp_num_layers > 0, "--mtp-num-layers");
  refuse(t.parallel_residual, "--parallel-residual");
  refuse(t.norm_placement != NormPlacement::kPre, "--norm-placement other than pre");
  refuse(t.distribute_saved_activations, "--distribute-saved-activations");
  refuse(t.recompute_granularity == RecomputeGranularity::kFull &&
             (t.recompute_method == RecomputeMethod::kBlock || t.recompute_num_layers > 1),
         "full recomputation of other units than --recompute-method uniform "
         "--recompute-num-layers 1");
}

}  // namespace megatron
