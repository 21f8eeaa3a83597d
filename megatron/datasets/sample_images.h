// Images of samples, which go beside the columns: their number and sizes differ from sample to
// sample.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "megatron/media/pixel_values.h"
#include "megatron/media/tiling.h"

namespace megatron {

// An image of a sample as its headers say it, without its pixels. An encoder sees one picture of it
// or several (its tiles, and the whole of it), all of one size.
struct SampleImage {
  int64_t rows = 0, columns = 0;  // of patches of a picture
  int64_t pictures = 1;
  int64_t patch_bytes = 0;  // 3 p^2
  TileGrid grid = {};       // of the tiles
  ImageSize size = {};      // of the image

  int64_t patches() const { return pictures * rows * columns; }
  int64_t bytes() const { return patches() * patch_bytes; }
};

// The ranks that divide the images of a micro-batch among them, and which of them this one is; -1:
// none, it encodes no image.
struct ImageRanks {
  int size = 1;
  int rank = 0;
  // Context-parallel ranks, each of which holds the tokens of a part of the sequences, and which
  // part this one holds.
  int parts = 1;
  int part = 0;
  bool reads = true;  // false: it has a later part of the encoder, and needs their sizes alone
  // Where encoders have ranks of their own, data-parallel ranks of the language model: the media of
  // one micro-batch of each are divided together, and a rank that encodes has the samples of all,
  // one replica's behind the other's. 0: encoders have none
  int64_t replicas = 0;

  int64_t merged() const { return replicas > 0 && rank >= 0 ? replicas : 1; }
};

// The images of a micro-batch.
struct BatchImages {
  struct One {
    int64_t sample = 0;  // of the micro-batch; ascending, in the order of its text
    SampleImage image;
    int owner = 0;  // the rank that encodes it
  };
  std::vector<One> all;
  ImageRanks ranks;
  // [P, 3 p^2]: the patches of all pictures of this rank one after another, each by channel, row
  // and column
  std::vector<uint8_t> patches;
  PixelTable pixel_values = {};  // the numbers that bytes stand for
};

}  // namespace megatron
