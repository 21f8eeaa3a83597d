// Encoder of sounds: log-mel features through two convolutions and a transformer with attention in
// both directions within a clip. Source: Whisper, Radford et al. 2022 (arXiv:2212.04356).
#pragma once

#include <memory>

#include "megatron/models/audio/packed_sounds.h"
#include "megatron/models/common/encoder_offload.h"
#include "megatron/models/common/encoder_part.h"
#include "megatron/nn/norm.h"
#include "megatron/tensor_parallel/layers.h"
#include "megatron/tensor_parallel/vocab_parallel_embedding.h"
#include "megatron/transformer/transformer_block.h"

namespace megatron {

// c = gelu(conv1 frames); x = gelu(conv2 c) + P, of every second frame; layers, whose keys have no
// bias; the mean of two neighbouring rows, norm (Qwen 2 Audio: Chu et al. 2024, arXiv:2407.10759),
// or norm, four neighbouring rows side by side (Voxtral: Liu et al. 2025, arXiv:2507.13264). Both
// convolutions read a frame and its two neighbours.
//
// Parameters: conv1.weight [h, 3 mel bins], of each bin the frame before, the frame and the one
// behind, conv2.weight [h, 3 h], their biases, position_embeddings.weight [1500, h], which is never
// trained, decoder.layers.N..., ln_post.weight|bias.
//
// The whole encoder is on each rank, which encodes all sounds that it is given; or a part of it,
// and what it passes on are the rows [R, 1, h] of its layers. Communication: none. Of divided
// layers: theirs, without sequence parallelism.
class AudioEncoder : public Module {
 public:
  // `language`: the configuration of the language model. `ranks`: whose tensor ranks divide the
  // layers; all of them are given the same.
  AudioEncoder(const AudioConfig& config, const TransformerConfig& language,
               const EncoderActivations& kept = {}, const ParallelGroups& ranks = {},
               const EncoderPart& part = {});

  // The features of all sounds, [N, audio_feature_size()]; of a part that is not the last one its
  // rows. `input`: those of the part before. Differentiable in both.
  at::Tensor forward(const PackedSounds& sounds, const ForwardContext& context,
                     at::Tensor input = {});

 private:
  struct Begin {
    ColumnParallelLinear conv1, conv2;
    Embedding position_embeddings;
  };
  at::Tensor rows_of(const PackedSounds& sounds);  // of the first layer

  const AudioConfig config_;
  const EncoderPart part_;
  const TransformerConfig layers_;
  const ParallelGroups alone_, ranks_;
  std::unique_ptr<Begin> begin_;  // null: another part has it
  TransformerBlock decoder_;
  std::unique_ptr<Norm> ln_post_;
};

}  // namespace megatron
