#include "megatron/models/audio/audio_encoder.h"

#include <algorithm>
#include <utility>

#include "megatron/nn/any_size_offload.h"
#include "megatron/tensor/activation.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/layer/sublayer.h"

namespace megatron {
namespace {

constexpr int64_t kWidth = 3;  // frames that a convolution reads

// Of each frame that is read [2 R] it and its neighbours, [2 R, bins, 3].
at::Tensor around_frames(const PackedSounds& sounds, at::ScalarType type) {
  const at::Tensor frames = sounds.frames.to(type);
  std::vector<at::Tensor> around;
  for (int64_t i = 0; i < kWidth; ++i) around.push_back(frames.index_select(0, sounds.before + i));
  return at::stack(around, 2);
}

// The same of the first of a row's two, [R, h, 3] of c [R, 2, h]: the one before it is the second
// of the row before.
at::Tensor around_rows(const at::Tensor& c, const at::Tensor& continues) {
  const at::Tensor odd = c.select(1, 1);
  const at::Tensor before =
      at::constant_pad_nd(odd, {0, 0, 1, 0}).narrow(0, 0, c.size(0)) * continues.to(c.dtype());
  return at::stack({before, c.select(1, 0), odd}, 2);
}

}  // namespace

AudioEncoder::AudioEncoder(const AudioConfig& config, const TransformerConfig& language,
                           const EncoderActivations& kept, const ParallelGroups& ranks,
                           const EncoderPart& part)
    : config_(config),
      part_(part),
      layers_(kept.keeping(config.audio_encoder(language))),
      ranks_(ranks),
      decoder_(layers_, part.first, std::min(part.count, layers_.num_layers), /*final_norm=*/false,
               /*sequence_parallel=*/false, ranks_) {
  const int64_t h = layers_.hidden_size;
  const auto convolution = [&](const char* name, int64_t inputs) {
    LinearOptions options;
    options.init = layers_.weight_init(h, inputs);
    return ColumnParallelLinear(name, inputs, h, options, alone_);
  };
  if (part.begins) {
    begin_.reset(new Begin{convolution("conv1", kWidth * config.audio_mel_bins),
                           convolution("conv2", kWidth * h),
                           Embedding(kAudioRows, h, Init::sinusoids())});
    add("conv1", &begin_->conv1);
    add("conv2", &begin_->conv2);
    add("position_embeddings", &begin_->position_embeddings);
    begin_->position_embeddings.visit(
        [](const std::string&, Parameter& p) { p.trainable = false; });
  }
  add("decoder", &decoder_);
  if (!part.ends) return;
  ln_post_ = std::make_unique<Norm>(h, norm_options(layers_));
  add("ln_post", ln_post_.get());
}

at::Tensor AudioEncoder::rows_of(const PackedSounds& sounds) {
  const int64_t rows = sounds.positions.size(0);
  const auto through = [](ColumnParallelLinear& convolution, const at::Tensor& around) {
    return activate(convolution.forward(around.flatten(1).unsqueeze(1)), Activation::kGelu);
  };
  const auto type = begin_->conv1.weight().value.scalar_type();
  const at::Tensor around = around_rows(
      through(begin_->conv1, around_frames(sounds, type)).view({rows, 2, layers_.hidden_size}),
      sounds.continues);
  const at::Tensor x = through(begin_->conv2, around).squeeze(1) +
                       begin_->position_embeddings.forward(sounds.positions);
  return at::constant_pad_nd(x, {0, 0, 0, sounds.segments->rows - rows}).unsqueeze(1);
}

at::Tensor AudioEncoder::forward(const PackedSounds& sounds, const ForwardContext& given,
                                 at::Tensor input) {
  ForwardContext context;
  context.training = given.training;
  context.discarded = given.discarded;
  context.tape = given.tape;
  if (layers_.offloads_activations()) context.offload = given.offload;
  context.place = context.rows = sounds.segments->place();
  context.unpadded = sounds.segments;
  at::Tensor x = part_.begins ? rows_of(sounds) : std::move(input);
  const AnySizeOffload any_size;
  x = decoder_.forward(std::move(x), context);
  if (!part_.ends) return x;
  const int64_t rows = sounds.positions.size(0), h = layers_.hidden_size;
  if (config_.stacks()) return ln_post_->forward(x).narrow(0, 0, rows).reshape({rows / 4, 4 * h});
  x = x.squeeze(1);
  const at::Tensor first = take_rows(x, sounds.cells), second = take_rows(x, sounds.cells + 1);
  return ln_post_->forward(((first + second) / 2).unsqueeze(1)).squeeze(1);
}

}  // namespace megatron
