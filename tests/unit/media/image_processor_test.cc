#include "megatron/media/image_processor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "tests/unit/error_of.h"
#include "tests/unit/media/golden_images.h"

namespace megatron {
namespace {

using ::testing::ElementsAre;
using Kind = ImageProcessorConfig::Kind;

// The content of tests/golden/media/make_processors.py.
Image drawn_image(int64_t height, int64_t width) {
  Image image({height, width});
  for (int64_t y = 0; y < height; ++y)
    for (int64_t x = 0; x < width; ++x)
      for (int64_t c = 0; c < 3; ++c)
        image.row(y)[3 * x + c] = static_cast<uint8_t>(73 * y + 151 * x + 59 * c + x * y);
  return image;
}

// [pictures, 3, height, width], or Qwen's patches, as floats.
std::vector<float> numbers_of(const ImageProcessorConfig& config, const Image& image) {
  const PixelTable table = pixel_table(config.scaling);
  std::vector<float> out;
  for (const Image& picture : process_image(config, image)) {
    const bool patches = config.kind == Kind::kQwen2Vl;
    const auto bytes = patches ? patch_bytes(picture, config.patch, config.merge, config.frames)
                               : patch_bytes(picture, 1);
    if (patches) {
      const size_t channel = static_cast<size_t>(config.frames * config.patch * config.patch);
      for (size_t i = 0; i < bytes.size(); ++i) out.push_back(table[i / channel % 3][bytes[i]]);
    } else {
      for (size_t c = 0; c < 3; ++c)
        for (size_t i = c; i < bytes.size(); i += 3) out.push_back(table[c][bytes[i]]);
    }
  }
  return out;
}

TEST(ImageProcessor, NumbersAreThoseOfTransformersBitForBit) {
  const auto rows = nlohmann::json::parse(
      read_file(std::string(MEGATRON_SOURCE_DIR) + "/tests/golden/media/processors.json"));
  int count = 0;
  for (const auto& row : rows) {
    const std::string text = row.at("config").dump();
    const ImageProcessorConfig config = read_image_processor(text, "preprocessor_config.json");
    for (const auto& image : row.at("images")) {
      const auto numbers = numbers_of(config, drawn_image(image[0], image[1]));
      EXPECT_EQ(crc_of({reinterpret_cast<const uint8_t*>(numbers.data()), 4 * numbers.size()}),
                image[3].get<uint32_t>())
          << text << " " << image[0] << "x" << image[1];
      ++count;
    }
  }
  EXPECT_GT(count, 200);
}

TEST(ImageProcessor, ClipOfASmallImage) {
  Image image({5, 7});
  for (int i = 0; i < 105; ++i) image.bytes()[i] = static_cast<uint8_t>(i * 37 % 251);
  const auto config = read_image_processor(
      R"({"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 4},
          "crop_size": 4})",
      "a.json");
  const auto numbers = numbers_of(config, image);
  EXPECT_NEAR(numbers[0], -1.368908, 1e-6);
  EXPECT_NEAR(numbers[1], 0.981439, 1e-6);
  EXPECT_NEAR(numbers[2], 0.207722, 1e-6);
  EXPECT_NEAR(numbers[3], 0.120131, 1e-6);
  EXPECT_NEAR(std::accumulate(numbers.begin(), numbers.end(), 0.0), 2.960024, 1e-5);
  const Image resized_image = resized(image, {4, 5}, Resampling::kBicubic);
  EXPECT_EQ(resized_image.row(0)[0], 29);
  EXPECT_EQ(resized_image.row(0)[12], 127);
}

// CLIP's recipe for a wide image would be 336x336000 pixels.
TEST(ImageProcessor, OnlyWhatACropKeepsIsComputed) {
  const auto config = read_image_processor(
      R"({"image_processor_type": "CLIPImageProcessor", "size": 336, "crop_size": 336})", "a.json");
  const ImagePlan plan = plan_image(config, {1, 1000});
  EXPECT_EQ(plan.pictures[0].resized, (ImageSize{336, 336'000}));
  EXPECT_EQ(process_image(config, drawn_image(1, 1000))[0].size(), (ImageSize{336, 336}));
}

TEST(ImageProcessor, TheWholeImageComesFirstInLlavaNextAndLastInInternVl) {
  const auto next = read_image_processor(
      R"({"image_processor_type": "LlavaNextImageProcessor", "size": 336, "crop_size": 336})", "a");
  EXPECT_EQ(plan_image(next, {480, 640}).pictures.size(), 5u);
  EXPECT_EQ(plan_image(next, {480, 640}).pictures.front().resized, (ImageSize{336, 336}));
  const auto vl = read_image_processor(
      R"({"processor_class": "InternVLProcessor", "image_processor":
          {"image_processor_type": "GotOcr2ImageProcessorFast",
           "size": {"height": 448, "width": 448}}})",
      "a");
  const std::pair<ImageSize, size_t> tiles[] = {
      {{480, 640}, 13},  {{448, 448}, 1},   {{896, 896}, 5},  {{600, 600}, 1},
      {{1000, 100}, 11}, {{1080, 1920}, 9}, {{700, 500}, 13}, {{2000, 3000}, 7}};
  for (const auto& [size, count] : tiles)
    EXPECT_EQ(plan_image(vl, size).pictures.size(), count) << size.height << "x" << size.width;
  const ImagePlan plan = plan_image(vl, {480, 640});
  EXPECT_EQ(plan.grid, (TileGrid{3, 4}));
  EXPECT_EQ(plan.pictures.back().resized, (ImageSize{448, 448}));
  EXPECT_EQ(plan.pictures.front().resized, (ImageSize{3 * 448, 4 * 448}));
}

TEST(Patches, ComeInBlocksThatAreMerged) {
  Image image({8, 8});
  for (int i = 0; i < 64; ++i)
    for (int c = 0; c < 3; ++c) image.bytes()[3 * i + c] = static_cast<uint8_t>(i + 64 * c);
  const auto bytes = patch_bytes(image, 2, 2, 2);
  std::vector<int> first;
  for (size_t i = 0; i < bytes.size(); i += 24) first.push_back(bytes[i]);
  EXPECT_THAT(first, ElementsAre(0, 2, 16, 18, 4, 6, 20, 22, 32, 34, 48, 50, 36, 38, 52, 54));
  EXPECT_THAT(std::vector<int>(bytes.begin(), bytes.begin() + 8),
              ElementsAre(0, 1, 8, 9, 0, 1, 8, 9));
  EXPECT_EQ(bytes[8], 64);
}

TEST(ImageProcessor, ConfigurationsThatAreNotBuiltAreNamed) {
  const auto error = [](const std::string& members) {
    return error_of([&] {
      read_image_processor("{\"image_processor_type\": \"CLIPImageProcessor\"" + members + "}",
                           "p.json");
    });
  };
  EXPECT_EQ(error(""), "");
  EXPECT_EQ(error(R"(, "processor_class": "CLIPProcessor", "do_convert_rgb": true)"), "");
  EXPECT_EQ(error(R"(, "do_sharpen": true)"),
            "p.json: \"do_sharpen\" is not known; it may change pixels");
  EXPECT_EQ(error(R"(, "do_resize": false)"), "p.json: \"do_resize\" is false; expected true");
  EXPECT_EQ(error(R"(, "resample": 0)"),
            "p.json: \"resample\" is 0; expected 1 to 5 (Pillow's filters; 0, the nearest, is not "
            "built)");
  EXPECT_EQ(error(R"(, "size": {"max_height": 3})"),
            "p.json: \"size\" is {\"max_height\":3}; expected \"height\" and \"width\"");
  EXPECT_EQ(error(R"(, "size": -1)"), "p.json: \"size\" is -1; expected a number from 1 on");
  EXPECT_EQ(error(R"(, "image_mean": [1, 2])"),
            "p.json: \"image_mean\" is [1,2]; expected three numbers");
  EXPECT_EQ(error(R"(, "image_std": 0)"), "p.json: \"image_std\" is 0; expected another number");
  EXPECT_EQ(error_of([] { read_image_processor("[]", "p.json"); }), "p.json: not a JSON object");
  EXPECT_EQ(error_of([] { read_image_processor("{}", "p.json"); }),
            "p.json: no \"image_processor_type\"; expected the name of its class");
  EXPECT_EQ(error_of([] {
              read_image_processor(R"({"image_processor_type": "ViTImageProcessorFast"})",
                                   "p.json");
            }),
            "p.json: the image processor ViTImageProcessor is not built; expected one of "
            "CLIPImageProcessor, LlavaImageProcessor, SiglipImageProcessor, "
            "LlavaNextImageProcessor, GotOcr2ImageProcessor, Gemma3ImageProcessor, "
            "Qwen2VLImageProcessor");
  EXPECT_EQ(error_of([] {
              read_image_processor(
                  R"({"image_processor_type": "LlavaNextImageProcessor",
                      "image_grid_pinpoints": [[300, 224]]})",
                  "p.json");
            }),
            "p.json: \"image_grid_pinpoints\" is [300,224]; expected multiples of the tile's side, "
            "224");
}

}  // namespace
}  // namespace megatron
