#include "megatron/models/vision/vision_encoder.h"

#include <utility>

#include "megatron/base/check.h"
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
                             const EncoderRecompute& recompute, const ParallelGroups& ranks)
    : config_(config),
      layers_(recompute.recomputing(config.encoder(language))),
      ranks_(ranks),
      conv1_("conv1", config.patch_elements(), layers_.hidden_size,
             conv1_options(layers_, config.patch_elements(),
                           config.is_internvit() || config.is_siglip()),
             alone_),
      decoder_(layers_, 0, layers_.num_layers, /*final_norm=*/false, /*sequence_parallel=*/false,
               ranks_) {
  add("conv1", &conv1_);
  if (config.has_class_row()) {
    class_token_ = std::make_unique<Parameter>();
    class_token_->local_shape = class_token_->global_shape = {1, 1, layers_.hidden_size};
    class_token_->init = Init::normal(layers_.init_method_std);
    class_token_->role = ParameterRole::kEmbedding;
    add("class_token", class_token_.get());
  }
  if (!config.has_own_sizes()) {
    position_embeddings_ = std::make_unique<Embedding>(config.encoder_rows(), layers_.hidden_size,
                                                       Init::normal(layers_.init_method_std));
    add("position_embeddings", position_embeddings_.get());
  }
  if (config.is_clip()) {
    ln_pre_ = std::make_unique<Norm>(layers_.hidden_size, norm_options(layers_));
    add("ln_pre", ln_pre_.get());
  }
  add("decoder", &decoder_);
  if (config.has_last_norm()) {
    ln_post_ = std::make_unique<Norm>(layers_.hidden_size, norm_options(layers_));
    add("ln_post", ln_post_.get());
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

// Rows of pictures of unlike sizes, and empty ones behind them.
at::Tensor VisionEncoder::features_of_own_sizes(const PackedImages& images,
                                                ForwardContext context) {
  const at::Tensor patches = numbers_of(images, conv1_.weight().value.scalar_type());
  const int64_t p = patches.size(0), empty = images.segments->rows - p;
  at::Tensor x = at::constant_pad_nd(conv1_.forward(patches.unsqueeze(1)), {0, 0, 0, 0, 0, empty});
  context.position_ids = images.patch_places;
  context.unpadded_parts = images.windows;
  x = ln_post_->forward(decoder_.forward(std::move(x), context)).narrow(0, 0, p);
  return x.reshape({p / 4, config_.feature_size()});
}

at::Tensor VisionEncoder::forward(const PackedImages& images, const ForwardContext& given) {
  ForwardContext context;
  context.training = given.training;
  context.discarded = given.discarded;
  context.tape = given.tape;
  context.place = context.rows = images.segments->place();
  context.unpadded = images.segments;
  if (config_.has_own_sizes()) return features_of_own_sizes(images, std::move(context));
  const int64_t n = images.pictures, h = layers_.hidden_size, p = config_.patches();
  const int64_t rows = config_.encoder_rows();
  const at::Tensor patches = numbers_of(images, conv1_.weight().value.scalar_type());
  at::Tensor x = conv1_.forward(patches.unsqueeze(1)).view({n, p, h});
  if (class_token_) x = at::cat({differentiable(*class_token_).expand({n, 1, h}), x}, 1);
  x = x + position_embeddings_->forward(at::arange(rows, images.places.options()));
  x = x.view({n * rows, 1, h});
  if (ln_pre_) x = ln_pre_->forward(x);
  x = decoder_.forward(std::move(x), context);
  if (ln_post_) x = ln_post_->forward(x);
  const int64_t first = class_token_ && !config_.vision_class_token ? 1 : 0;
  x = x.view({n, rows, h}).narrow(1, first, rows - first);
  const std::vector<int64_t> map = {n, config_.patch_rows(), config_.patch_columns(), h};
  if (config_.pixel_shuffle) return shuffled_pixels(x.reshape(map));
  if (config_.vision_pooling > 1) return pooled_features(x.reshape(map), config_.vision_pooling);
  return x.reshape({n * (rows - first), h});
}

}  // namespace megatron
