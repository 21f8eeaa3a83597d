// Encoder of images: patches through a transformer with attention in both directions within a
// picture. Source: Dosovitskiy et al. 2020 (arXiv:2010.11929); CLIP: Radford et al. 2021
// (arXiv:2103.00020).
#pragma once

#include <memory>

#include "megatron/models/common/encoder_offload.h"
#include "megatron/models/common/encoder_part.h"
#include "megatron/models/vision/packed_images.h"
#include "megatron/nn/norm.h"
#include "megatron/tensor_parallel/layers.h"
#include "megatron/tensor_parallel/vocab_parallel_embedding.h"
#include "megatron/transformer/transformer_block.h"

namespace megatron {

// x = [class | conv1 patches] + P; norm (CLIP); layers; norm (SigLIP and Qwen, which have no class
// row). Qwen has rotary positions of rows and columns in the place of P. Patches of Qwen 2.5 go
// through it in the order of windows, within which they attend but in
// --vision-whole-picture-layers; its norms are RMSNorms, its MLPs gated with silu. With
// --pixel-shuffle a cell of two by two features is one: [(0,0) | (0,1) | (1,0) | (1,1)]; with
// --vision-pooling k one of k by k is their mean.
//
// Parameters: conv1.weight [h, patch_elements()], conv1.bias (InternViT, SigLIP), class_token [1,
// 1, h] (CLIP, InternViT), position_embeddings.weight [rows, h] with the class row first (not
// Qwen), ln_pre.weight|bias (CLIP), decoder.layers.N..., ln_post.weight|bias (SigLIP, Qwen; of 2.5
// no bias). SigLIP: Zhai et al. 2023 (arXiv:2303.15343); Qwen2-VL: Wang et al. 2024
// (arXiv:2409.12191); Qwen2.5-VL: Bai et al. 2025 (arXiv:2502.13923).
//
// The whole encoder is on each rank, which encodes all pictures that it is given; or a part of it,
// and what it passes on are the rows [R, 1, h] of its layers. Communication: none. Of divided
// layers: theirs, without sequence parallelism.
class VisionEncoder : public Module {
 public:
  // `language`: the configuration of the language model. `ranks`: whose tensor ranks divide the
  // layers; all of them are given the same.
  VisionEncoder(const VisionConfig& config, const TransformerConfig& language,
                const EncoderActivations& kept = {}, const ParallelGroups& ranks = {},
                const EncoderPart& part = {});

  // The features of all pictures, [N, feature_size()], of pictures with windows in their order; of
  // a part that is not the last one its rows. `input`: those of the part before. Differentiable in
  // both.
  at::Tensor forward(const PackedImages& images, const ForwardContext& context,
                     at::Tensor input = {});

 private:
  void add_begin();
  at::Tensor numbers_of(const PackedImages& images, at::ScalarType type) const;
  at::Tensor rows_of(const PackedImages& images);  // of the first layer
  at::Tensor features_of(const PackedImages& images, at::Tensor x);

  const VisionConfig config_;
  const EncoderPart part_;
  const TransformerConfig layers_;
  const ParallelGroups alone_, ranks_;
  std::unique_ptr<ColumnParallelLinear> conv1_;     // null: another part has it
  std::unique_ptr<Parameter> class_token_;          // null: there is none
  std::unique_ptr<Embedding> position_embeddings_;  // null: rotary positions
  std::unique_ptr<Norm> ln_pre_, ln_post_;          // null: there is none
  TransformerBlock decoder_;
};

// Features [n, rows, columns, h] -> [n rows/2 columns/2, 4 h], cells row by row.
at::Tensor shuffled_pixels(const at::Tensor& features);

// Features [n, rows, columns, h] -> [n rows/k columns/k, h], means of cells of k by k.
at::Tensor pooled_features(const at::Tensor& features, int64_t k);

}  // namespace megatron
