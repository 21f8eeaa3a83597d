// Prompts with images against transformers: their ids and greedy tokens, the second image in a
// later turn; texts without placeholders; the limit of the context.
#include "megatron/inference/images/image_prompts.h"

#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/inference/memory_plan.h"
#include "megatron/tensor/torch.h"
#include "tests/unit/allocation_meter.h"
#include "tests/unit/error_of.h"
#include "tests/unit/inference/image_model.h"

namespace megatron {
namespace {

using Json = nlohmann::json;

class ImagePromptsOf : public testing::TestWithParam<const char*> {};

TEST_P(ImagePromptsOf, TextsAreThoseOfTransformers) {
  ImageModel m(GetParam());
  for (const Json& text : m.facts["texts"]) {
    MultimodalRow row;
    row.caption = text["text"];
    for (const Json& file : text["files"]) row.media.push_back(image_of(file));
    const ImagePrompt prompt = m.prompts->of_text(row, "text");
    EXPECT_EQ(prompt.ids, text["prompt_tokens"].get<std::vector<int32_t>>());
    EXPECT_EQ(m.tokens_behind(prompt), text["tokens"].get<std::vector<int32_t>>());
  }
}

TEST_P(ImagePromptsOf, LaterTurnsHaveImagesOfTheirOwn) {
  ImageModel m(GetParam());
  const Chat chat(*m.loaded.tokenizer, m.loaded.chat_templates, "", m.loaded.end_of_text);
  MultimodalRow row;
  for (const Json& turn : m.facts["turns"]) {
    row.messages.push_back({R"({"role":"user"})", false, {{{}, std::ssize(row.media)}}});
    row.messages.back().parts.push_back({turn["text"], -1});
    row.media.push_back(image_of(turn["file"]));
    const ImagePrompt prompt = m.prompts->of_conversation(row, chat, "turn");
    EXPECT_EQ(prompt.ids, turn["prompt_tokens"].get<std::vector<int32_t>>());
    EXPECT_EQ(m.tokens_behind(prompt), turn["tokens"].get<std::vector<int32_t>>());
    row.messages.push_back({R"({"role":"assistant"})", true, {{turn["said"], -1}}});
  }
}

INSTANTIATE_TEST_SUITE_P(Families, ImagePromptsOf,
                         testing::Values("llava", "llava_next", "internvl", "gemma3", "qwen2_vl",
                                         "qwen2_5_vl", "qwen2_audio"),
                         [](const auto& param) { return std::string(param.param); });

// A golden's model; with the grids that its images of odd sizes have.
struct OddImages : LoadedImageModel {
  explicit OddImages(Json facts)
      : LoadedImageModel(write_image_model(with_points(facts))), odd(facts["odd"]) {
    const Json images = Json::parse(read_file(kImageGoldens / "odd_images.json"));
    row.caption = odd["text"];
    for (size_t i = 0; i < odd["logits"].size(); ++i)
      row.media.push_back(
          {MediaKind::kImage, "image", decode_base64(images[i].get<std::string>(), "image")});
  }
  static Json with_points(Json facts) {
    if (facts["odd"].contains("points"))
      facts["config"]["image_grid_pinpoints"] = facts["processor"]["image_grid_pinpoints"] =
          facts["odd"]["points"];
    return facts;
  }

  Json odd;
  MultimodalRow row;
};

// 1x1, 4000x20, 37x2911, 70x98, 333x77, 45x45
TEST(ImagePrompts, ImagesOfOddSizes) {
  for (const char* family :
       {"llava", "llava_next", "internvl", "gemma3", "qwen2_vl", "qwen2_5_vl"}) {
    OddImages m(generation_facts(family));
    const Json& odd = m.odd;
    const ImagePrompt prompt = m.prompts->of_text(m.row, "text");
    EXPECT_EQ(prompt.ids, odd["prompt_tokens"].get<std::vector<int32_t>>()) << family;
    if (odd.contains("tokens")) {
      EXPECT_EQ(m.tokens_behind(prompt), odd["tokens"].get<std::vector<int32_t>>()) << family;
    }
    const at::Tensor logits = full_logits(*m.loaded.model, prompt.ids, {}, prompt.media);
    ASSERT_EQ(odd["logits"].size(), odd.contains("tokens") ? 5U : 6U);
    for (const auto& [place, values] : odd["logits"].items()) {
      const at::Tensor expected = at::tensor(values.get<std::vector<double>>()),
                       own = logits[std::stoll(place)].to(at::kDouble);
      EXPECT_LE((own - expected).norm().item<double>(), 1e-4 * expected.norm().item<double>())
          << family << ", row " << place;
    }
  }
}

// A prompt that is as full of images or sounds as the context allows takes what a server's plan has
// for the largest one.
TEST(ImagePrompts, TheLargestTakesWhatIsPlanned) {
  for (const char* family : {"llava", "qwen2_5_vl", "qwen2_audio"}) {
    const ImageModel m(family);
    ServedShape shape;
    shape.max_media = 1000;
    const auto planned = static_cast<double>(encoder_memory(m.loaded.config, shape).step);
    MultimodalRow row;
    row.caption = "a";
    const std::string file = m.facts["texts"][0]["files"][0];
    row.media = {image_of(file)};
    const int64_t one = std::ssize(m.prompts->of_text(row, "text").ids);
    row.media.push_back(row.media.front());
    const int64_t each = std::ssize(m.prompts->of_text(row, "text").ids) - one;
    row.media.resize(static_cast<size_t>(1 + (512 - one) / each), row.media.front());
    // What is held of the media, without what their reading takes on the host
    const auto held = std::make_shared<Meter>(), meter = std::make_shared<Meter>();
    ImagePrompt prompt;
    {
      const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, held);
      prompt = m.prompts->of_text(row, "text");
    }
    {
      const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
      m.prompts->start(prompt, 0, "text");
    }
    const auto taken = static_cast<double>(held->live + meter->most);
    // Short sounds with no other token beside them have more rows for a feature than planned.
    EXPECT_LE(taken, (std::string(family) == "qwen2_audio" ? 1.2 : 1.05) * planned) << family;
    EXPECT_GE(taken, 0.6 * planned) << family;
    shape.max_media = 1;
    EXPECT_LE(encoder_memory(m.loaded.config, shape).step, planned) << family;
    shape.max_media = 0;
    EXPECT_EQ(encoder_memory(m.loaded.config, shape).step, 0) << family;
  }
  EXPECT_TRUE(encoder_memory(ImageModel("llava_next").loaded.config, {.max_media = 1}).unknown);
}

TEST(ImagePrompts, ImagesWithoutPlaceholdersComeFirst) {
  const ImageModel m("llava");
  MultimodalRow row;
  row.media = {image_of("1_img1.jpg"), image_of("0_img1.png")};
  row.caption = "ab";
  const ImagePrompt first = m.prompts->of_text(row, "text");
  row.caption = "<image><image>ab";
  EXPECT_EQ(first.ids, m.prompts->of_text(row, "text").ids);
  EXPECT_EQ(first.media_tokens, 18);
  row.caption = "<image>ab";
  EXPECT_EQ(error_of([&] { m.prompts->of_text(row, "text"); }),
            "text: the text has <image> 1 time for 2 images\nhint: once for each image, or not at "
            "all: then images come before the text");
  EXPECT_EQ(error_of([&] { m.prompts->start(first, 493, "text"); }),
            "text has 20 tokens, 18 of them of 2 images; with 493 to generate that is beyond the "
            "model's context of 512\nhint: give fewer images, or a shorter text");
  EXPECT_EQ(m.prompts->start(first, 492, "text").rows->count, 18);
}

}  // namespace
}  // namespace megatron
