#include "megatron/models/t5/t5_model.h"

#include <algorithm>
#include <set>

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

const ModelConfig& built(const ModelConfig& config) {
  const TransformerConfig& t = config.transformer;
  const auto refuse = [](bool given, const char* what) {
    MEGATRON_CHECK(!given, what, " is not built for T5");
  };
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
                 const EmbeddingTables& tables)
    : Model(built(given), groups, slice), stacks_(t5_stacks(config())) {
  const int64_t border = stacks_.encoder.num_layers, end = slice.first_layer + slice.num_layers,
                encoders = std::min(end, border) - std::min(slice.first_layer, border);
  const bool rows = config().sequence_parallel;
  if (encoders > 0)
    encoder_ = std::make_unique<TransformerBlock>(stacks_.encoder, slice.first_layer, encoders,
                                                  /*final_norm=*/end >= border, rows, groups);
  first_of_decoder_ = std::max(slice.first_layer, border) - border;
  if (end > border && slice.num_layers > 0)
    decoder_ = std::make_unique<TransformerBlock>(
        stacks_.decoder, first_of_decoder_, end - border - first_of_decoder_,
        /*final_norm=*/slice.head, rows, groups, make_layer, /*numbered_after=*/border);
  else if (slice.head)  // the head without a layer: its norm
    decoder_ = std::make_unique<TransformerBlock>(stacks_.decoder, stacks_.decoder.num_layers, 0,
                                                  /*final_norm=*/true, rows, groups);
  make_embedding(tables);
  if (encoder_) add("encoder", encoder_.get());
  if (decoder_) add("decoder", decoder_.get());
  if (slice.head) make_output(tables);
  name_parameters();
}

T5Model::~T5Model() = default;

const ProcessGroup* T5Model::homes(bool of_words) const {
  const bool tied = !config().transformer.untie_embeddings_and_output_weights;
  std::set<int> stages = {slice().stage_of_embedding(),
                          slice().stage_of_layer(stacks_.encoder.num_layers)};
  if (of_words && tied) stages.insert(slice().stage_of_head());
  if (stages.size() == 1) return nullptr;
  return &groups().stages({stages.begin(), stages.end()});
}

void T5Model::make_embedding(const EmbeddingTables& tables) {
  const int uses = (slice().embedding ? 1 : 0) + (starts_decoder() ? 1 : 0);
  if (uses == 0) return;
  if (tables.words != nullptr) {
    embedding_ = std::make_unique<LanguageModelEmbedding>(config(), groups(), tables);
    for (Parameter* table : tables.all()) table->uses += uses;
    return;
  }
  embedding_ = std::make_unique<LanguageModelEmbedding>(config(), groups());
  const EmbeddingTables own = embedding_->tables();
  for (Parameter* table : own.all()) {
    table->uses = uses;
    table->shared = homes(/*of_words=*/table == own.words);
  }
  add("embedding", embedding_.get());
}

void T5Model::make_output(const EmbeddingTables& tables) {
  output_ = std::make_unique<OutputProjection>(config(), groups(), slice(), embedding_.get(),
                                               tables.words);
  if (TiedTable* copy = output_->tied_table()) {
    copy->weight().shared = homes(/*of_words=*/true);
    add("embedding", copy);
  }
  if (Module* own = output_->output_layer()) {
    add("lm_head.output_layer", own);
    return;
  }
  head_bias_ = std::make_unique<Parameter>();
  head_bias_->local_shape = {config().padded_vocab_size / groups().tp.size()};
  head_bias_->global_shape = {config().padded_vocab_size};
  head_bias_->valid_rows = config().vocab_size;
  head_bias_->placement.shards = {{0, Axis::kTensor, {}}};
  head_bias_->role = ParameterRole::kBias;
  add("lm_head.output_layer.bias", head_bias_.get());
}

EmbeddingTables T5Model::embedding_tables() {
  return embedding_ ? embedding_->tables() : EmbeddingTables{};
}

TensorFormats T5Model::border(int64_t layers_before, const Batch& batch,
                              at::ScalarType dtype) const {
  const TensorFormat encoder = Model::border(layers_before, batch, dtype).front();
  if (layers_before < stacks_.encoder.num_layers) return {encoder};
  const TensorFormat encoded = {encoder.shape, dtype};
  if (layers_before == stacks_.encoder.num_layers) return {encoded};
  TensorFormat decoder = encoder;
  decoder.shape[0] =
      stacks_.decoder.seq_length / (config().sequence_parallel ? groups().tp.size() : 1);
  if (layers_before == config().transformer.num_layers) return {decoder};
  return {encoded, decoder};
}

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

// What leaves the encoder's part of this segment: its rows, or its output.
at::Tensor T5Model::encode(const Batch& batch, const StageTensors& input,
                           const ForwardContext& given) {
  if (!slice().embedding && !encoder_) return input.front();
  const ForwardContext context = encoder_context(batch, given);
  check_shape("place.position", given.place.position, {batch["text_enc"].size(1)});
  at::Tensor x = slice().embedding ? embedding_->forward(batch["text_enc"], context, {}, kOfEncoder)
                                   : input.front();
  if (encoder_) x = encoder_->forward(x, context);
  const bool ends = slice().first_layer + slice().num_layers >= stacks_.encoder.num_layers;
  return ends ? x.to(parameters().front()->value.scalar_type()) : x;
}

StageTensors T5Model::hidden(const Batch& batch, const StageTensors& input,
                             const ForwardContext& given) {
  MEGATRON_CHECK(given.decoding == nullptr, "generation with a T5 is not built");
  const int64_t end = slice().first_layer + slice().num_layers,
                all = config().transformer.num_layers;
  const ForwardContext decoder = decoder_context(batch, given);
  if (slice().first_layer == all && !slice().embedding)  // the head alone
    return {decoder_->forward(input.front(), decoder)};
  at::Tensor encoded = encode(batch, input, given);
  if (!decoder_) return {encoded};
  if (given.tape != nullptr) encoded = given.tape->share(encoded);
  ForwardContext context = decoder;
  context.encoded = std::make_shared<const EncodedSequence>(
      EncodedSequence{encoded, given.place.position, batch["enc_mask"] == 0});
  at::Tensor x = starts_decoder() ? embedding_->forward(batch["text_dec"], context, {}, kOfDecoder)
                                  : input.back();
  x = decoder_->forward(std::move(x), context);
  if (end == all) return {x};
  return {encoded, x};
}

at::Tensor T5Model::logits(const at::Tensor& hidden) {
  const at::Tensor logits = output_->linear().forward(hidden);
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
