#include "megatron/models/mimo/mimo_model.h"

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/models/common/refused_options.h"
#include "megatron/models/model_table.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

constexpr const char* kTitle = "a model that reads images";

ModelConfig built_mimo(const ModelConfig& config) {
  const TransformerConfig& t = config.transformer;
  MEGATRON_CHECK(config.own.as_or_default<MimoConfig>().is_given(),
                 "a model of type mimo without an encoder", "\nhint: --vision-model-type clip");
  const auto refuse = [&](bool given, const char* what) { refuse_option(given, what, kTitle); };
  refuse(config.pipeline_vocab_parallel, "--pipeline-vocab-parallel");
  refuse(t.mtp_num_layers > 0, "--mtp-num-layers");
  refuse(t.lora_rank > 0, "--lora-rank");
  refuse(t.is_quantized(), "--fp8-format or --fp4-format");
  refuse(t.is_hybrid(), "--hybrid-layer-pattern");
  refuse(t.has_moe(), "--num-experts");
  refuse(t.fp32_residual_connection, "--fp32-residual-connection");
  return language_config(config);
}

}  // namespace

ModelConfig language_config(const ModelConfig& config) {
  ModelConfig out = config;
  out.type = "gpt";
  out.own = {};
  return out;
}

MimoModel::MimoModel(const ModelConfig& given, const ParallelGroups& groups,
                     const StageSlice& slice, const EmbeddingTables& tables)
    : Model(given, groups, slice),
      own_(config().own.as_or_default<MimoConfig>()),
      language_model_(built_mimo(config()), groups, slice, tables) {
  if (slice.embedding) {
    vision_model_ = std::make_unique<VisionEncoder>(own_, config().transformer);
    vision_projection_ = std::make_unique<VisionProjector>(own_, config().transformer);
    add("vision_model", vision_model_.get());
    add("vision_projection", vision_projection_.get());
    for (Module* module : {static_cast<Module*>(vision_model_.get()),
                           static_cast<Module*>(vision_projection_.get())})
      module->visit([&](const std::string&, Parameter& parameter) {
        parameter.placement = {};  // whole, although its linears could be divided
        if (config().sequence_parallel) parameter.placement.partial_grad.insert(Axis::kTensor);
      });
  }
  add("language_model", &language_model_);
  name_parameters();
}

EmbeddingTables MimoModel::embedding_tables() { return language_model_.embedding_tables(); }

std::vector<std::string> MimoModel::auxiliary_losses() const {
  return language_model_.auxiliary_losses();
}

TensorFormats MimoModel::border(int64_t layers_before, const Batch& batch,
                                at::ScalarType dtype) const {
  return language_model_.border(layers_before, batch, dtype);
}

at::Tensor MimoModel::placed_features(const Batch& batch, const ForwardContext& context) {
  const PackedImages& images = *batch.images;
  const at::Tensor& tokens = batch["tokens"];
  const int64_t b = tokens.size(0), s = tokens.size(1), h = config().transformer.hidden_size;
  const at::Tensor features = vision_projection_->forward(vision_model_->forward(images, context));
  check_shape("features", features, {images.places.size(0), h});
  const at::Tensor rows =
      images.places.remainder(s) * b + images.places.div(s, /*rounding_mode=*/"floor");
  return at::zeros({s * b, h}, features.options()).index_copy(0, rows, features).view({s, b, h});
}

StageTensors MimoModel::hidden(const Batch& batch, const StageTensors& input,
                               const ForwardContext& context) {
  MEGATRON_CHECK(context.cp == nullptr && groups().cp.size() == 1,
                 "--context-parallel-size above 1 is not built for ", kTitle);
  if (!slice().embedding) return language_model_.hidden(batch, input, context);
  const at::Tensor& tokens = batch["tokens"];
  Batch text = batch;
  text.set("tokens", tokens.masked_fill(tokens == own_.image_token_id, kNoToken));
  const bool sees = batch.images != nullptr && !batch.images->pictures.empty();
  MEGATRON_CHECK(!sees || context.decoding == nullptr,
                 "images while a text is continued are not built");
  return language_model_.hidden_with(text, sees ? placed_features(batch, context) : at::Tensor(),
                                     input, context);
}

at::Tensor MimoModel::logits(const at::Tensor& hidden) { return language_model_.logits(hidden); }

at::Tensor MimoModel::token_losses(const at::Tensor& hidden, const at::Tensor& labels) {
  return language_model_.token_losses(hidden, labels);
}

Loss MimoModel::loss(const StageTensors& states, const Batch& batch,
                     const ForwardContext& context) {
  return language_model_.loss(states, batch, context);
}

std::unique_ptr<VocabularyPass> MimoModel::begin_loss(const at::Tensor&, const Batch&) {
  throw_error(cat("--pipeline-vocab-parallel is not built for ", kTitle));
}

const ModelType& mimo_model_type() {
  static const ModelType type = {.name = "mimo",
                                 .title = "MIMO",
                                 .make = make_model_of<MimoModel>,
                                 .ends_cost = language_ends_cost,
                                 .config = OwnConfig(MimoConfig()),
                                 .decodes = false,
                                 .language_model = "language_model.",
                                 .planned = false};
  return type;
}

}  // namespace megatron
