// Sounds of samples, which go beside the columns, as images do.
#pragma once

#include <cstdint>
#include <vector>

#include "megatron/datasets/sample_images.h"

namespace megatron {

// A sound of a sample as its headers say it. An encoder reads one clip of it or several, of each
// log-mel features of some frames with the one before them and the one behind.
struct SampleSound {
  int64_t frames = 0;  // that show any of its samples
  int64_t clips = 1;
  int64_t frames_of_clip = 0;  // of which the encoder makes half as many rows
  int64_t bins = 0;            // features of a frame

  int64_t rows() const { return clips * (frames_of_clip + 2); }
  int64_t elements() const { return rows() * bins; }
};

// The sounds of a micro-batch. The ranks that divide its images divide its sounds, too.
struct BatchSounds {
  struct One {
    int64_t sample = 0;  // of the micro-batch; ascending, in the order of its text
    SampleSound sound;
    int owner = 0;  // the rank that encodes it
  };
  std::vector<One> all;
  ImageRanks ranks;
  std::vector<float> frames;  // of all sounds of this rank one after another, frame by frame
};

}  // namespace megatron
