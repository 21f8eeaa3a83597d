// The pictures of a micro-batch as an encoder of images reads them, one after another without
// padding, and where their features stand in the sequences.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "megatron/media/tiling.h"
#include "megatron/models/common/features_ahead.h"
#include "megatron/models/vision/vision_config.h"
#include "megatron/tensor/attention/token_blocks.h"
#include "megatron/tensor/attention/unpadded_rows.h"

namespace megatron {

// An image, of which the encoder sees one picture or several: the image itself, or its tiles, and
// the whole of it before or behind them.
struct SeenImage {
  int64_t sample = 0;             // of the micro-batch, whose images are in the order of its text
  int64_t rows = 0, columns = 0;  // of patches of a picture
  int64_t pictures = 1;
  // With --vision-newlines, of an image with tiles behind the whole of it: their grid, and the size
  // of the image before it was padded to them.
  TileGrid grid = {};
  ImageSize size = {};
  int owner = 0;  // the rank that encodes it (datasets/image_plan.h)
};

struct PackedImages {
  int64_t pictures = 0;       // that this rank encodes
  int64_t features = 0;       // of these
  int64_t all_pictures = 0;   // of all ranks that divide the images
  int64_t most_features = 0;  // of the rank that has most of them
  // Ranks that divide the images. Their features follow each other, those of a rank in
  // most_features rows; 1: this rank encodes all
  int ranks = 1;
  // Where encoders have ranks of their own, features that go to each replica of the language model,
  // or that come from each rank which divides the images; else empty
  std::vector<int64_t> parts = {};
  // [P, patch_elements()], the patches of the rank's pictures, undefined where it has a later part
  // of the encoder, elements of a patch by channel,
  // frame, row and column; of pictures of own sizes in blocks of two by two, blocks row by row:
  // uint8 pixels, or their numbers in a floating-point type.
  at::Tensor patches;
  // [3, 256] fp32: the number of each value of a channel's pixels (media/pixel_values.h); undefined
  // where patches hold numbers.
  at::Tensor pixel_values;
  // [N] int64: i s + j where a feature is row j of sample i. `taken` [N] int64: which features they
  // are; undefined: all of them in order.
  at::Tensor places, taken;
  at::Tensor newlines;  // int64: the places of image_newline; undefined: there are none
  // The rows of the encoder, in which tokens attend within their picture; and the same rows, in
  // which they attend within their window. Null: the encoder has no windows.
  std::shared_ptr<const UnpaddedRows> segments, windows;
  // [P / 4] int64, of encoders with windows, in which those of a picture follow each other: the
  // blocks of `patches` in the order of the encoder's rows, and of its features
  at::Tensor window_order;
  // [1, R, 2] int64: row and column of each patch in its picture, of encoders with rotary
  // positions, in the order of the encoder's rows
  at::Tensor patch_places;
  // [b, s, 3] int64: the positions of tokens in time, of rows and of columns, of pictures of own
  // sizes; undefined: a token has one position
  at::Tensor positions;
  // Of models in which the tokens of an image attend to one another in both directions, the runs of
  // them; null: they do not
  std::shared_ptr<const TokenBlocks> blocks;
  // Of this rank's pictures, with --mimo-encoder-prefetch; null: the model computes them
  std::shared_ptr<const FeaturesAhead> ahead;

  // As a context-parallel rank reads them, which holds `held` [s'] of the tokens of each of the `b`
  // samples of s: features, newlines and positions of those, in places of b sequences of s'. On the
  // host.
  PackedImages of_tokens(const at::Tensor& held, int64_t b, int64_t s) const;

  // As `b` samples of `s` tokens read them, each of which begins with the only one of this.
  PackedImages of_rows(int64_t b, int64_t s) const;

  // Of this rank's pictures in the encoder.
  int64_t rows(const VisionConfig& config) const {
    return config.has_own_sizes() ? segments->rows : pictures * config.encoder_rows();
  }

  // [n, 3], those of the first `n` tokens of the first sample; empty: a token has one position.
  std::vector<int64_t> positions_of(int64_t n) const;
};

// The features of a picture of rows x columns features in the order of windows of side x side, cut
// at the borders; windows row by row, and so their features. `lengths`, unless null, gets the
// number of features of each window. Source: Qwen2.5-VL (Bai et al. 2025, arXiv:2502.13923).
std::vector<int64_t> window_order(int64_t rows, int64_t columns, int64_t side,
                                  std::vector<int64_t>* lengths = nullptr);

// Tokens that an image becomes.
int64_t image_tokens(const VisionConfig& config, const SeenImage& image);

// Of samples of `length` tokens with placeholders: `tokens` [b, s] row by row. Throws Error for a
// picture that is not of the encoder's size, and naming the sample, both numbers and its images
// where its placeholders are not as many as its features.
//
// With --vision-newlines an image is [whole picture | rows of the map of its tiles, without what
// was padded, and image_newline behind each]; one without tiles has one image_newline. Source:
// LLaVA-NeXT (Liu et al. 2024).
//
// Pictures of their own sizes have merged features in the place of tokens. Text counts its
// positions up; a picture of h x w features that begins at position n has (n, n + row, n + column),
// and the text behind it goes on at n + max(h, w). `position_ids`: as `tokens`, where each document
// of a sample begins with 0; empty: each is one document. Source: Wang et al. 2024
// (arXiv:2409.12191).
//
// With several ranks `patches` are those of the images whose owner is `rank`, in the order of all;
// undefined: the rank does not read them.
//
// `replicas` > 0: encoders have ranks of their own (PackedImages::parts). On one of these the
// samples are those of so many replicas of the language model, one behind the other; on others
// `rank` is -1 and the features are those of the samples' images, by owner, without padding.
//
// On the host; `patches` may be on any device, places and segments are made on the CPU.
PackedImages pack_images(const VisionConfig& config, std::span<const SeenImage> images,
                         at::Tensor patches, at::Tensor pixel_values,
                         std::span<const int64_t> tokens, int64_t samples, int64_t image_token,
                         int rank = 0, int ranks = 1, std::span<const int64_t> position_ids = {},
                         int64_t replicas = 0);

// The same on another device. Copies to a GPU are asynchronous, through page-locked memory.
PackedImages to_device(const PackedImages& images, at::Device device);

}  // namespace megatron
