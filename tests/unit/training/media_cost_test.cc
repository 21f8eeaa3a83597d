// What encoders compute for images and sounds, by hand, and how it divides them over ranks.
#include "megatron/models/mimo/media_cost.h"

#include <gtest/gtest.h>

#include <vector>

namespace megatron {
namespace {

MimoConfig frozen_encoder(VisionModel type) {
  MimoConfig own;
  own.vision_model_type = type;
  own.vision_num_layers = 2;
  own.vision_hidden_size = 2;
  own.vision_ffn_hidden_size = 3;
  own.patch_dim = 2;
  own.img_h = own.img_w = 4;
  own.frozen_vision = true;
  return own;
}

TEST(MediaCost, PicturesOfOneSize) {
  MimoConfig own = frozen_encoder(VisionModel::kClip);
  const SampleImage one = {.rows = 2, .columns = 2},
                    tiled = {.rows = 2, .columns = 2, .pictures = 3};
  // Four patches and the class row: 2 layers of 5 (4 * 4 + 2 * 2 * 3 + 2 * 5 * 2)
  EXPECT_EQ(encoding_cost(own, one), 480);
  EXPECT_EQ(encoding_cost(own, tiled), 3 * 480);  // which do not see one another
  own.vision_model_type = VisionModel::kSiglip;   // 4 (16 + 12 + 16)
  EXPECT_EQ(encoding_cost(own, one), 352);
  own.frozen_vision = false;
  EXPECT_EQ(encoding_cost(own, one), 3 * 352);
}

TEST(MediaCost, PicturesOfTheirOwnSizes) {
  const SampleImage image = {.rows = 4, .columns = 6};
  // 2 layers of 24 (16 + 12 + 2 * 24 * 2)
  EXPECT_EQ(encoding_cost(frozen_encoder(VisionModel::kQwen2), image), 5952);
}

// 3 x 5 features in windows of at most 2 x 2: of 16, 16, 8, 8, 8 and 4 patches, whose squares are
// 720 together. Two layers of windows, 60 (16 + 3 * 2 * 3) + 2 * 2 * 720 each, and one that sees
// all, 60 (16 + 18 + 2 * 60 * 2).
TEST(MediaCost, Windows) {
  MimoConfig own = frozen_encoder(VisionModel::kQwen25);
  own.vision_num_layers = 3;
  own.vision_activation = VisionActivation::kSilu;
  own.vision_window_size = 8;
  own.vision_whole_picture_layers = {2};
  const SampleImage image = {.rows = 6, .columns = 10};
  EXPECT_EQ(encoding_cost(own, image), 2 * 4920 + 16440);
  own.vision_window_size = 20;  // one window
  EXPECT_EQ(encoding_cost(own, image), 3 * 16440);
}

TEST(MediaCost, Sounds) {
  MimoConfig own;
  own.audio_model_type = AudioModel::kWhisper;
  own.audio_num_layers = 2;
  own.audio_hidden_size = 4;
  own.audio_ffn_hidden_size = 5;
  own.frozen_audio = true;
  // 7 rows: 7 (4 * 16 + 2 * 4 * 5 + 2 * 7 * 4)
  const SampleSound sound = {.frames = 13, .frames_of_clip = 14, .bins = 8};
  EXPECT_EQ(encoding_cost(own, sound), 2 * 1120);
  // Two clips of 1500 rows: 1500 (64 + 40 + 2 * 1500 * 4)
  const SampleSound clips = {.frames = 4000, .clips = 2, .frames_of_clip = 3000, .bins = 8};
  EXPECT_EQ(encoding_cost(own, clips), int64_t{2} * 2 * 18'156'000);
  own.frozen_audio = false;
  EXPECT_EQ(encoding_cost(own, sound), 3 * 2 * 1120);
}

// A picture of four times the patches costs more than four of the others: the sixth goes where
// those are.
TEST(MediaCost, LargePicturesTakeTheTimeOfMoreSmallOnes) {
  const MimoConfig own = frozen_encoder(VisionModel::kQwen2);
  std::vector<int64_t> patches, costs;
  for (const int64_t side : {8, 4, 4, 4, 4, 4}) {
    const SampleImage image = {.rows = side, .columns = side};
    patches.push_back(MediaCosts().image(image));
    costs.push_back(media_costs(own).image(image));
  }
  EXPECT_EQ(patches, (std::vector<int64_t>{64, 16, 16, 16, 16, 16}));
  EXPECT_GT(costs[0], 4 * costs[1]);
  EXPECT_EQ(plan_images(patches, 2), (std::vector<int>{0, 1, 1, 1, 1, 0}));
  EXPECT_EQ(plan_images(costs, 2), (std::vector<int>{0, 1, 1, 1, 1, 1}));
}

}  // namespace
}  // namespace megatron
