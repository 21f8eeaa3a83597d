// A GPT that reads images, sounds or both beside text: features of an encoder of each, projected to
// its width, stand in the places of tokens. With CLIP it is LLaVA: Liu et al. 2023
// (arXiv:2304.08485, 2310.03744).
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "megatron/models/audio/audio_encoder.h"
#include "megatron/models/common/ends_cost.h"
#include "megatron/models/common/feature_projector.h"
#include "megatron/models/common/features_ahead.h"
#include "megatron/models/gpt/gpt_model.h"
#include "megatron/models/mimo/mimo_config.h"
#include "megatron/models/vision/picture_graphs.h"
#include "megatron/models/vision/vision_encoder.h"

namespace megatron {

// Reads the columns of a GPT, whose tokens hold I once for each feature of an image and A once for
// each of a sound, Batch::images and Batch::sounds.
//
//   x = E[tokens], scaled as a GPT's; in the rows of I and A the projected features, and nothing
//   else: these look nothing up, and features are not scaled. Then as a GPT, positions included.
//
// Parameters: language_model.<those of a GPT>; vision_model... (vision/vision_encoder.h) and
// vision_projection... (common/feature_projector.h), audio_model... and audio_projection...
// (audio/) on the segment with the embedding, or, where the layout has letters V, on segments
// before it: the projectors on the last of these. With --vision-newlines image_newline [h], with
// the embedding. Without pictures the encoder of images is not run and its gradients are zero; so
// are those of sounds.
//
// Borders within encoders: the rows [R, 1, h_v] of this rank's images, and of its sounds; behind
// them the projected features [N, h] of each, which the segment with the embedding gathers.
//
// On ranks of the encoders' own (comm/modules/encoder_ranks.h) the features of images, and of
// sounds, cross that border in parts, one for each replica of the language model, and arrive in one
// for each rank that divides them. Tensor ranks of the embedding have copies of all.
//
// Every rank of tp and cp holds all of encoders and projectors. In training they divide the images
// and the sounds of a micro-batch (PackedImages::ranks), so that the gradients of both are partial
// sums over kTensor, and over cp as those of all weights. Communication per micro-batch with
// images, and per one with sounds: over tp, then over cp an all-gather of projected features;
// backward a reduce-scatter over cp, and over tp with sequence parallelism, where each rank has the
// gradient of its own rows of text, too, else none. With --encoder-tensor-model-parallel-size the
// tensor ranks divide the encoders' layers, and all have the same images and sounds: nothing is
// gathered over tp, and with sequence parallelism the backward has an all-reduce over it.
class MimoModel : public Model {
 public:
  // `tables` as for make_model(). Throws Error for what is not built.
  MimoModel(const ModelConfig& config, const ParallelGroups& groups, const StageSlice& slice,
            const EmbeddingTables& tables);

  using Model::hidden;
  using Model::loss;
  StageTensors hidden(const Batch& batch, const StageTensors& input,
                      const ForwardContext& context) override;
  // Not with --bidirectional-images, whose attention depends on where images stand.
  Batch with_media_encoded(const Batch& batch, const ForwardContext& context) override;
  TensorFormats border(int64_t layers_before, const Batch& batch,
                       at::ScalarType dtype) const override;
  at::Tensor logits(const at::Tensor& hidden) override;
  at::Tensor token_losses(const at::Tensor& hidden, const at::Tensor& labels) override;
  Loss loss(const StageTensors& hidden, const Batch& batch, const ForwardContext& context) override;
  std::vector<std::string> auxiliary_losses() const override;
  std::unique_ptr<VocabularyPass> begin_loss(const at::Tensor& hidden, const Batch& batch) override;
  EmbeddingTables embedding_tables() override;

  // Whether this segment has an encoder whose features may be computed ahead: a whole one of which
  // nothing is trained.
  bool encodes_ahead();
  // Starts to compute those of a micro-batch (PackedImages::ahead, PackedSounds::ahead), which
  // hidden() takes; what the batch has else stays. Bits are those of hidden() without it.
  // Communication: none.
  void encode_ahead(Batch& batch, bool training);

  // The rows of a prompt, [n, h] in fp32, for a decoder that takes rows in the place of tokens
  // (scheduling/request.h): the features of the images and sounds of `tokens` [1, n], null: there
  // are none; zeros where text_of_prompt() has ids, which the decoder looks up. Segment with the
  // embedding; not of models with learned positions, nor of encoders that tensor ranks divide. Of
  // one tensor rank alone: no communication.
  // `ends` becomes GivenRows::ends of the rows: with --bidirectional-images a decoder needs them.
  // Of models with positions of rows and columns it needs PackedImages::positions_of() as well.
  at::Tensor prompt_rows(const at::Tensor& tokens, const PackedImages* images,
                         std::vector<int64_t>* ends = nullptr,
                         const PackedSounds* sounds = nullptr);
  // From now on prompt_rows() encodes few pictures of one size by CUDA graphs, where the encoder is
  // a whole one on a GPU.
  void use_picture_graphs();
  // Before weights move.
  void forget_picture_graphs();
  // The ids of tokens [1, n], -1 where an image or a sound has a feature: GivenRows::ids.
  std::vector<int32_t> text_of_prompt(const at::Tensor& tokens) const;

 private:
  // [s, b, h] of tokens [b, s]: features in their places, zeros elsewhere; undefined: no media.
  at::Tensor placed_features(const at::Tensor& tokens, const PackedImages* images,
                             const PackedSounds* sounds, const StageTensors& input,
                             const ForwardContext& context);
  at::Tensor placed_images(const at::Tensor& tokens, const PackedImages& images,
                           at::Tensor features) const;
  at::Tensor placed_sounds(const at::Tensor& tokens, const PackedSounds& sounds,
                           at::Tensor features) const;
  // What this segment makes of the pictures and of the sounds: the rows of its part of an encoder,
  // or this rank's projected features; of each undefined: there are none. The model may see or hear
  // or both, and `input` is from the segment before.
  StageTensors encoded(const PackedImages* images, const PackedSounds* sounds,
                       const StageTensors& input, const ForwardContext& context);
  void make_encoders();
  // Whether data-parallel ranks exchange values or gradients during a pass: then one without images
  // goes through the encoder, too, with no picture, so that all issue the same collectives.
  bool every_rank_encodes() const;
  // By medium PackedImages::parts of what it has.
  std::vector<std::vector<int64_t>> parts_of(const PackedImages* images,
                                             const PackedSounds* sounds) const;
  // Formats of a border within encoders, or behind them.
  TensorFormats media_border(bool behind, const Batch& batch, at::ScalarType dtype) const;
  // The projected features of all tensor ranks' media, of this rank's [N, h]; `most`: of the rank
  // that has most.
  at::Tensor gathered(const at::Tensor& given, int64_t most, int ranks) const;
  // Those of the ranks that divide encoders.
  ParallelGroups encoder_ranks() const;
  // The context of the layers, in which an image's tokens attend to all of the image
  // (--bidirectional-images), or have positions of rows and columns (PackedImages::positions).
  ForwardContext with_images(const Batch& batch, const ForwardContext& context) const;
  // For each of the tokens [1, n] of a prompt how many leading ones it attends to; empty: those up
  // to itself.
  std::vector<int64_t> prompt_ends(const at::Tensor& tokens) const;
  // Tokens of images and sounds as kNoToken.
  at::Tensor text_of(const at::Tensor& tokens) const;

  const MimoConfig own_;
  GPTModel language_model_;
  // Null: they are on another segment, or the model does not see or hear.
  std::unique_ptr<VisionEncoder> vision_model_;
  std::unique_ptr<FeatureProjector> vision_projection_;
  std::unique_ptr<PictureGraphs> picture_graphs_;  // null: they are not used
  std::unique_ptr<Parameter> image_newline_;       // null: there is none
  std::unique_ptr<AudioEncoder> audio_model_;
  std::unique_ptr<FeatureProjector> audio_projection_;
  EncoderStream ahead_;
  const Parameter* first_parameter_ = nullptr;
};

// Columns of the table of models (mimo_cost.cc): with what the encoder costs in the worst
// micro-batch.
EndsCost mimo_ends_cost(const ModelConfig& config, const EndsShape& shape);
// With --bidirectional-images, with what blocks of tokens cost.
LayerCost mimo_layer_cost(const ModelConfig& config, int64_t layer_number, const LayerShape& shape,
                          bool offloaded);
std::string_view mimo_unplanned(const ModelConfig& config);

// What makes rows of the language model of an encoder's features.
ProjectorShape image_projector(const VisionConfig& own);
ProjectorShape sound_projector(const AudioConfig& own);

// The configuration of the GPT in it.
ModelConfig language_config(const ModelConfig& config);

}  // namespace megatron
