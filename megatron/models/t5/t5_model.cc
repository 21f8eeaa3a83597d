#include "megatron/models/t5/t5_model.h"

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/models/model_table.h"
#include "megatron/nn/functional.h"
#include "megatron/nn/recompute.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"
#include "megatron/tensor_parallel/cross_entropy.h"
#include "megatron/transformer/attention/cross_attention.h"

namespace megatron {
namespace {

// Which use of the embedding a pass makes.
constexpr int64_t kOfEncoder = 0, kOfDecoder = 1;

const ModelConfig& built(const ModelConfig& config, const StageSlice& slice) {
  const TransformerConfig& t = config.transformer;
  const auto refuse = [](bool given, const char* what) {
    MEGATRON_CHECK(!given, what, " is not built for T5");
  };
  refuse(!slice.embedding || !slice.head, "--pipeline-model-parallel-size above 1");
  refuse(config.pipeline_vocab_parallel, "--pipeline-vocab-parallel");
  refuse(t.cross_entropy_fusion_impl == CrossEntropyFusion::kLinear,
         "--cross-entropy-fusion-impl linear");
  refuse(t.final_logit_softcapping > 0, "--final-logit-softcapping");
  refuse(t.attn_logit_softcapping > 0, "--attn-logit-softcapping");
  refuse(t.softmax_type != SoftmaxType::kVanilla, "--softmax-type");
  refuse(!t.window_size.empty(), "--window-size");
  refuse(t.group_query_attention, "--group-query-attention");
  refuse(t.multi_latent_attention, "--multi-latent-attention");
  refuse(t.has_moe(), "--num-experts");
  refuse(t.mtp_num_layers > 0, "--mtp-num-layers");
  refuse(t.lora_rank > 0, "--lora-rank");
  refuse(t.is_quantized(), "--fp8-format or --fp4-format");
  refuse(t.parallel_residual, "--parallel-residual");
  refuse(t.norm_placement != NormPlacement::kPre, "--norm-placement other than pre");
  refuse(t.offloads_activations(), "offloading of activations");
  refuse(t.distribute_saved_activations, "--distribute-saved-activations");
  refuse(t.recompute_granularity == RecomputeGranularity::kFull &&
             (t.recompute_method == RecomputeMethod::kBlock || t.recompute_num_layers > 1),
         "full recomputation of other units than --recompute-method uniform "
         "--recompute-num-layers 1");
  return config;
}

// The document of each token: 0 for the text, 1 for padding, so that nothing attends across.
at::Tensor text_and_padding(const at::Tensor& mask) { return (mask == 0).to(at::kLong); }

}  // namespace

T5Model::T5Model(const ModelConfig& given, const ParallelGroups& groups, const StageSlice& slice,
                 Parameter* table)
    : Model(built(given, slice), groups, slice),
      stacks_(t5_stacks(config())),
      embedding_(config(), groups),
      encoder_(stacks_.encoder, 0, stacks_.encoder.num_layers, /*final_norm=*/true,
               config().sequence_parallel, groups),
      decoder_(stacks_.decoder, 0, stacks_.decoder.num_layers, /*final_norm=*/true,
               config().sequence_parallel, groups, make_layer,
               /*numbered_after=*/stacks_.encoder.num_layers),
      output_(config(), groups, slice, &embedding_, table) {
  for (Parameter* one : embedding_.tables()) ++one->uses;  // of the decoder
  add("embedding", &embedding_);
  add("encoder", &encoder_);
  add("decoder", &decoder_);
  if (Module* own = output_.output_layer()) {
    add("lm_head.output_layer", own);
  } else {
    head_bias_ = std::make_unique<Parameter>();
    head_bias_->local_shape = {config().padded_vocab_size / groups.tp.size()};
    head_bias_->global_shape = {config().padded_vocab_size};
    head_bias_->valid_rows = config().vocab_size;
    head_bias_->placement.shards = {{0, Axis::kTensor, {}}};
    head_bias_->role = ParameterRole::kBias;
    add("lm_head.output_layer.bias", head_bias_.get());
  }
  name_parameters();
}

T5Model::~T5Model() = default;

Parameter* T5Model::embedding_table() { return &embedding_.weight(); }

ForwardContext T5Model::encoder_context(const Batch& batch, const ForwardContext& given) const {
  ForwardContext context = with_rows(given, config().sequence_parallel, groups().tp);
  context.document_ids = text_and_padding(batch["enc_mask"]);
  return context;
}

ForwardContext T5Model::decoder_context(const Batch& batch, const ForwardContext& given) const {
  const at::Tensor& mask = batch["dec_mask"];
  ForwardContext context = given;
  context.place.position = at::arange(mask.size(1), given.place.position.options());
  context = with_rows(context, config().sequence_parallel, groups().tp);
  context.document_ids = text_and_padding(mask);
  return context;
}

StageTensors T5Model::hidden(const Batch& batch, const StageTensors& /*input*/,
                             const ForwardContext& given) {
  MEGATRON_CHECK(given.decoding == nullptr, "generation with a T5 is not built");
  const ForwardContext encoder = encoder_context(batch, given);
  check_shape("place.position", given.place.position, {batch["text_enc"].size(1)});
  at::Tensor states =
      encoder_.forward(embedding_.forward(batch["text_enc"], encoder, {}, kOfEncoder), encoder);
  states = states.to(embedding_.weight().value.scalar_type());
  if (given.tape != nullptr) states = given.tape->share(states);

  ForwardContext decoder = decoder_context(batch, given);
  decoder.encoded = std::make_shared<const EncodedSequence>(
      EncodedSequence{states, given.place.position, batch["enc_mask"] == 0});
  return {
      decoder_.forward(embedding_.forward(batch["text_dec"], decoder, {}, kOfDecoder), decoder)};
}

at::Tensor T5Model::logits(const at::Tensor& hidden) {
  const at::Tensor logits = output_.linear().forward(hidden);
  return head_bias_ != nullptr ? logits.add_(differentiable(*head_bias_)) : logits;
}

at::Tensor T5Model::token_losses(const at::Tensor& hidden, const at::Tensor& labels) {
  return vocab_parallel_cross_entropy(logits(hidden), labels.t().contiguous(), config().vocab_size,
                                      config().transformer.z_loss_coeff, groups().tp);
}

Loss T5Model::loss(const StageTensors& states, const Batch& batch, const ForwardContext&) {
  const at::Tensor losses = token_losses(states.front(), batch["labels"]);
  const at::Tensor mask = batch["loss_mask"].t().to(losses.scalar_type());
  return {(losses * mask).sum(), mask.sum()};
}

std::unique_ptr<VocabularyPass> T5Model::begin_loss(const at::Tensor&, const Batch&) {
  throw_error("--pipeline-vocab-parallel is not built for T5");
}

const ModelType& t5_model_type() {
  static const ModelType type = {.name = "t5",
                                 .title = "T5",
                                 .make = make_model_of<T5Model>,
                                 .ends_cost = t5_ends_cost,
                                 .config = OwnConfig(T5Config()),
                                 .layer_cost = t5_layer_cost,
                                 .decodes = false};
  return type;
}

}  // namespace megatron
