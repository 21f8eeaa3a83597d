#include "megatron/models/audio/audio_encoder.h"

#include <utility>

#include "megatron/tensor/activation.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/layer/sublayer.h"

namespace megatron {
namespace {

constexpr int64_t kWidth = 3;  // frames that a convolution reads

LinearOptions convolution(const TransformerConfig& t, int64_t inputs) {
  LinearOptions options;
  options.init = t.weight_init(t.hidden_size, inputs);
  return options;
}

}  // namespace

AudioEncoder::AudioEncoder(const AudioConfig& config, const TransformerConfig& language,
                           const EncoderRecompute& recompute, const ParallelGroups& ranks)
    : config_(config),
      layers_(recompute.recomputing(config.audio_encoder(language))),
      ranks_(ranks),
      conv1_("conv1", kWidth * config.audio_mel_bins, layers_.hidden_size,
             convolution(layers_, kWidth * config.audio_mel_bins), alone_),
      conv2_("conv2", kWidth * layers_.hidden_size, layers_.hidden_size,
             convolution(layers_, kWidth * layers_.hidden_size), alone_),
      position_embeddings_(kAudioRows, layers_.hidden_size, Init::sinusoids()),
      decoder_(layers_, 0, layers_.num_layers, /*final_norm=*/false, /*sequence_parallel=*/false,
               ranks_),
      ln_post_(layers_.hidden_size, norm_options(layers_)) {
  add("conv1", &conv1_);
  add("conv2", &conv2_);
  add("position_embeddings", &position_embeddings_);
  position_embeddings_.visit([](const std::string&, Parameter& p) { p.trainable = false; });
  add("decoder", &decoder_);
  add("ln_post", &ln_post_);
}

at::Tensor AudioEncoder::forward(const PackedSounds& sounds, const ForwardContext& given) {
  ForwardContext context;
  context.training = given.training;
  context.discarded = given.discarded;
  context.tape = given.tape;
  context.place = context.rows = sounds.segments->place();
  context.unpadded = sounds.segments;
  const int64_t h = layers_.hidden_size, rows = sounds.positions.size(0);
  const auto type = conv1_.weight().value.scalar_type();
  const auto through = [](ColumnParallelLinear& convolution, const at::Tensor& around) {
    return activate(convolution.forward(around.flatten(1).unsqueeze(1)), Activation::kGelu);
  };
  const at::Tensor frames = sounds.frames.to(type);
  std::vector<at::Tensor> around;
  for (int64_t i = 0; i < kWidth; ++i) around.push_back(frames.index_select(0, sounds.before + i));
  const at::Tensor c = through(conv1_, at::stack(around, 2)).view({rows, 2, h});
  // Of two frames the second is before the first of the next row.
  const at::Tensor odd = c.select(1, 1);
  const at::Tensor before =
      at::constant_pad_nd(odd, {0, 0, 1, 0}).narrow(0, 0, rows) * sounds.continues.to(type);
  at::Tensor x = through(conv2_, at::stack({before, c.select(1, 0), odd}, 2)).squeeze(1);
  x = x + position_embeddings_.forward(sounds.positions);
  x = at::constant_pad_nd(x, {0, 0, 0, sounds.segments->rows - rows}).unsqueeze(1);
  x = decoder_.forward(std::move(x), context).squeeze(1);
  if (config_.stacks())
    return ln_post_.forward(x.unsqueeze(1)).narrow(0, 0, rows).reshape({rows / 4, 4 * h});
  const at::Tensor first = take_rows(x, sounds.cells), second = take_rows(x, sounds.cells + 1);
  return ln_post_.forward(((first + second) / 2).unsqueeze(1)).squeeze(1);
}

}  // namespace megatron
