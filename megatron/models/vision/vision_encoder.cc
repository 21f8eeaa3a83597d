#include "megatron/models/vision/vision_encoder.h"

#include <algorithm>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/nn/any_size_offload.h"
#include "megatron/nn/functional.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/layer/sublayer.h"

namespace megatron {
namespace {

constexpr int64_t kChannels = 3;

LinearOptions conv1_options(const TransformerConfig& t, int64_t inputs, bool bias) {
  LinearOptions options;
  options.bias = bias;
  options.init = t.weight_init(t.hidden_size, inputs);
  return options;
}

}  // namespace

VisionEncoder::VisionEncoder(const VisionConfig& config, const TransformerConfig& language,
                             const EncoderActivations& kept, const ParallelGroups& ranks,
                             const EncoderPart& part)
    : config_(config),
      part_(part),
      layers_(kept.keeping(config.encoder(language))),
      ranks_(ranks),
      decoder_(layers_, part.first, std::min(part.count, layers_.num_layers), /*final_norm=*/false,
               /*sequence_parallel=*/false, ranks_) {
  if (part.begins) add_begin();
  add("decoder", &decoder_);
  if (part.ends && config.has_last_norm()) {
    ln_post_ = std::make_unique<Norm>(layers_.hidden_size, norm_options(layers_));
    add("ln_post", ln_post_.get());
  }
}

void VisionEncoder::add_begin() {
  conv1_ = std::make_unique<ColumnParallelLinear>(
      "conv1", config_.patch_elements(), layers_.hidden_size,
      conv1_options(layers_, config_.patch_elements(),
                    config_.is_internvit() || config_.is_siglip()),
      alone_);
  add("conv1", conv1_.get());
  if (config_.has_class_row()) {
    class_token_ = std::make_unique<Parameter>();
    class_token_->local_shape = class_token_->global_shape = {1, 1, layers_.hidden_size};
    class_token_->init = Init::normal(layers_.init_method_std);
    class_token_->role = ParameterRole::kEmbedding;
    add("class_token", class_token_.get());
  }
  if (!config_.has_own_sizes()) {
    position_embeddings_ = std::make_unique<Embedding>(config_.encoder_rows(), layers_.hidden_size,
                                                       Init::normal(layers_.init_method_std));
    add("position_embeddings", position_embeddings_.get());
  }
  if (config_.is_clip()) {
    ln_pre_ = std::make_unique<Norm>(layers_.hidden_size, norm_options(layers_));
    add("ln_pre", ln_pre_.get());
  }
}

// Element e of a patch is of channel e / (frames p^2).
at::Tensor VisionEncoder::numbers_of(const PackedImages& images, at::ScalarType type) const {
  at::Tensor patches = images.patches;
  if (images.window_order.defined())
    patches = patches.view({images.window_order.size(0), 4 * config_.patch_elements()})
                  .index_select(0, images.window_order)
                  .view(patches.sizes());
  if (patches.scalar_type() != at::kByte) return patches.to(type);
  MEGATRON_ASSERT(images.pixel_values.defined(), "pixels without the table of their numbers");
  const at::Tensor row =
      at::arange(kChannels, patches.options().dtype(at::kLong)) * images.pixel_values.size(1);
  const int64_t area = config_.patch_elements() / kChannels;
  const at::Tensor index = patches.view({patches.size(0), kChannels, area})
                               .to(at::kLong)
                               .add(row.view({1, kChannels, 1}));
  return images.pixel_values.flatten()
      .index_select(0, index.flatten())
      .view(patches.sizes())
      .to(type);
}

at::Tensor shuffled_pixels(const at::Tensor& features) {
  const int64_t n = features.size(0), rows = features.size(1) / 2, columns = features.size(2) / 2,
                h = features.size(3);
  return features.view({n, rows, 2, columns, 2, h})
      .transpose(2, 3)
      .reshape({n * rows * columns, 4 * h});
}

at::Tensor pooled_features(const at::Tensor& features, int64_t k) {
  const int64_t n = features.size(0), rows = features.size(1) / k, columns = features.size(2) / k,
                h = features.size(3);
  return features.reshape({n, rows, k, columns, k, h})
      .mean(at::IntArrayRef{2, 4})
      .view({n * rows * columns, h});
}

at::Tensor VisionEncoder::rows_of(const PackedImages& images) {
  const int64_t n = images.pictures, h = layers_.hidden_size, p = config_.patches();
  const at::Tensor patches = numbers_of(images, conv1_->weight().value.scalar_type());
  at::Tensor x = conv1_->forward(patches.unsqueeze(1));
  if (config_.has_own_sizes())  // of unlike sizes, and empty rows behind them
    return at::constant_pad_nd(x, {0, 0, 0, 0, 0, images.segments->rows - patches.size(0)});
  x = x.view({n, p, h});
  if (class_token_) x = at::cat({differentiable(*class_token_).expand({n, 1, h}), x}, 1);
  const int64_t rows = config_.encoder_rows();
  x = x + position_embeddings_->forward(at::arange(rows, images.places.options()));
  x = x.view({n * rows, 1, h});
  return ln_pre_ ? ln_pre_->forward(x) : x;
}

at::Tensor VisionEncoder::features_of(const PackedImages& images, at::Tensor x) {
  if (ln_post_) x = ln_post_->forward(x);
  if (config_.has_own_sizes())
    return x.narrow(0, 0, 4 * images.features).reshape({images.features, config_.feature_size()});
  const int64_t n = images.pictures, h = layers_.hidden_size, rows = config_.encoder_rows();
  const int64_t first = config_.has_class_row() && !config_.vision_class_token ? 1 : 0;
  x = x.view({n, rows, h}).narrow(1, first, rows - first);
  const std::vector<int64_t> map = {n, config_.patch_rows(), config_.patch_columns(), h};
  if (config_.pixel_shuffle) return shuffled_pixels(x.reshape(map));
  if (config_.vision_pooling > 1) return pooled_features(x.reshape(map), config_.vision_pooling);
  return x.reshape({n * (rows - first), h});
}

at::Tensor VisionEncoder::forward(const PackedImages& images, const ForwardContext& given,
                                  at::Tensor input) {
  ForwardContext context;
  context.training = given.training;
  context.discarded = given.discarded;
  context.tape = given.tape;
  if (layers_.offloads_activations()) context.offload = given.offload;
  context.place = context.rows = images.segments->place();
  context.unpadded = images.segments;
  context.position_ids = images.patch_places;
  context.unpadded_parts = images.windows;
  at::Tensor x = part_.begins ? rows_of(images) : std::move(input);
  const AnySizeOffload any_size;
  x = decoder_.forward(std::move(x), context);
  return part_.ends ? features_of(images, std::move(x)) : x;
}

}  // namespace megatron
