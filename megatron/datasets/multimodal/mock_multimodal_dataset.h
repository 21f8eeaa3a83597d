// Made-up images and sounds in made-up samples: --mock-data.
#pragma once

#include <memory>
#include <vector>

#include "megatron/datasets/dataset.h"

namespace megatron {

// An image or a sound that samples may have, and the tokens that it becomes.
struct MockImage {
  SampleImage image;
  int64_t tokens = 0;
  SampleSound sound = {};  // with frames: it is a sound
  bool is_sound() const { return sound.frames > 0; }
};

struct MockImages {
  std::vector<MockImage> kinds;  // at least one with room in a sample
  int64_t token = 0;             // I
  int64_t sound_token = -1;      // the same of sounds; -1: there are none
  int64_t vocab_size = 0;
  int64_t seed = 0;
  int64_t per_sample = 0;  // 0: none, one or two
};

// Samples of text in which runs of I (of sounds: of their token) stand in the place of some tokens.
// Of 24 neighbouring samples 8 have no image at all, of the others two neighbours out of five;
// where samples have images, they have one or, if there is room, two; with `per_sample` each has so
// many, or as many as there is room for. A row of an image predicts
// what follows, but no image is predicted. What a sample has follows from its index and the seed.
class MockMultimodalDataset final : public Dataset {
 public:
  // Throws Error if no kind has room.
  MockMultimodalDataset(std::shared_ptr<const Dataset> texts, MockImages images);
  int64_t size() const override { return texts_->size(); }
  void read(int64_t index, const SampleSpans& out,
            std::vector<int32_t>& document_starts) const override;
  std::vector<SampleImage> images(int64_t index) const override;
  void read_image(int64_t index, int64_t image, std::span<uint8_t> patches) const override;
  std::vector<SampleSound> sounds(int64_t index) const override;
  void read_sound(int64_t index, int64_t sound, std::span<float> frames) const override;
  const PixelTable* pixel_values() const override { return &pixel_values_; }
  std::string description() const override;

 private:
  struct Placed {
    int64_t position = 0;  // of the first token
    MockImage what;
  };
  std::vector<Placed> placed(int64_t index) const;

  const std::shared_ptr<const Dataset> texts_;
  MockImages images_;
  const PixelTable pixel_values_;
};

}  // namespace megatron
