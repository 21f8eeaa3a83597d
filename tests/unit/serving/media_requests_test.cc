// Conversations with images and sounds: what is taken out of them, and what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "megatron/serving/api_error.h"
#include "megatron/serving/generation_request.h"

namespace megatron {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Two rows for each medium, under the id 200.
class TwoRows final : public MediaPrompts {
 public:
  bool renders() const override { return true; }
  std::string refusal(MediaKind kind) const override {
    return kind == MediaKind::kImage ? "" : "the model reads no sounds";
  }
  std::string_view medium_of(int32_t id) const override { return id == 200 ? "image" : ""; }
  MediaPrompt prompt(const MultimodalRow& row, bool encode) override {
    seen = row;
    if (row.media.empty()) return {"text", {97}, nullptr};
    if (row.media[0].bytes == "bad") throw_error("cut\nhint: send all of it");
    MediaPrompt out{"text", {200, 200, 97}, nullptr};
    if (encode) out.rows = std::make_shared<GivenRows>(GivenRows{2, 1, {1.0f, 2.0f}});
    return out;
  }
  MultimodalRow seen;
};

class MediaRequests : public testing::Test {
 protected:
  MediaRequests() {
    TokenizerConfig config;
    config.tokenizer_type = "ByteLevelTokenizer";
    tokenizer_ = make_tokenizer(config);
    model_.name = "m";
    model_.tokenizer = tokenizer_.get();
    model_.chat_template = model_.tool_template = &template_;
    model_.limits = {.vocab_size = 257, .max_positions = 100, .hidden_size = 1};
    model_.media = &media_;
  }
  GenerationRequest prepared(const std::string& content, const std::string& more = "") {
    GenerationRequest request = parse_chat(
        R"({"messages": [{"role": "user", "name": "n", "content": )" + content + "}]" + more + "}",
        model_, limits_);
    prepare(request, model_, 0);
    return request;
  }
  std::string refusal(const std::string& content, const std::string& more = "") {
    try {
      prepared(content, more);
    } catch (const ApiError& error) {
      EXPECT_EQ(error.status, 400);
      return error.member + ": " + error.what();
    }
    return "";
  }
  static std::string image(const std::string& url) {
    return R"([{"type": "image_url", "image_url": {"url": ")" + url + R"("}}])";
  }
  std::unique_ptr<Tokenizer> tokenizer_;
  const ChatTemplate template_{"{{ messages[0].content }}", "test"};
  TwoRows media_;
  ServeLimits limits_;
  ServedModel model_;
};

TEST_F(MediaRequests, AreRowsInFrontOfIds) {
  const GenerationRequest request =
      prepared(R"([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": )"
               R"({"url": "data:image/png;base64,AAEC", "detail": "low"}}, )"
               R"({"type": "image_url", "image_url": "data:;base64,/w=="}])");
  ASSERT_EQ(media_.seen.media.size(), 2);
  EXPECT_EQ(media_.seen.media[0].bytes, std::string("\0\1\2", 3));
  EXPECT_EQ(media_.seen.media[0].path, "messages[0].content[1]");
  EXPECT_EQ(media_.seen.media[1].bytes, "\xff");
  ASSERT_EQ(media_.seen.messages.size(), 1);
  EXPECT_EQ(media_.seen.messages[0].json, R"({"role": "user", "name": "n"})");
  ASSERT_EQ(media_.seen.messages[0].parts.size(), 3);
  EXPECT_EQ(media_.seen.messages[0].parts[0].text, "a");
  EXPECT_EQ(media_.seen.messages[0].parts[2].medium, 1);
  EXPECT_THAT(request.prompts.at(0).ids, ElementsAre(200, 200, 97));
  const RequestSpec spec = spec_of(request, 0);
  EXPECT_EQ(spec.rows->count, 2);
  EXPECT_THAT(spec.prompt, ElementsAre(97));
  EXPECT_EQ(spec.stop.max_tokens, 97) << "rows count in the context";
}

TEST_F(MediaRequests, NothingIsFetchedOrReadFromTheServersDisk) {
  for (const char* const url :
       {"http://127.0.0.1/a.png", "https://x.example/a.png", "file:///etc/passwd"})
    EXPECT_EQ(refusal(image(url)),
              std::string("messages[0].content[0]: messages[0].content[0]: ") + url +
                  " is an address, and the server fetches nothing; expected data:...;base64,...");
  EXPECT_THAT(refusal(image("/etc/passwd")), HasSubstr("/etc/passwd is no data: address, and the "
                                                       "server reads no files for clients"));
  EXPECT_THAT(refusal(image("")), HasSubstr("is no data: address"));
  EXPECT_THAT(refusal(image("data:image/png,AA")), HasSubstr("the data: address is not in base64"));
  EXPECT_THAT(refusal(image("data:;base64,A*==")), HasSubstr("are no base64: byte 1"));
  EXPECT_THAT(refusal(R"([{"type": "image_url"}])"), HasSubstr("has no image_url"));
  EXPECT_THAT(refusal(R"([{"type": "image_url", "image_url": {"url": 5}}])"),
              HasSubstr("messages[0].content[0].image_url has no text url"));
}

TEST_F(MediaRequests, KindsFormatsAndLimits) {
  const std::string sound =
      R"([{"type": "input_audio", "input_audio": {"data": "AAEC", "format": "mp3"}}])";
  EXPECT_THAT(refusal(sound), HasSubstr("\"input_audio\": the model reads no sounds"));
  EXPECT_THAT(refusal(R"([{"type": "video_url"}])"),
              HasSubstr("expected text, image_url, input_audio or audio_url"));
  limits_.max_medium_bytes = 3;
  EXPECT_EQ(refusal(image("data:;base64,AAEC")), "");
  EXPECT_THAT(refusal(image("data:;base64,AAECAwQF")),
              HasSubstr("has 6 bytes, at most 3 are taken (--max-medium-bytes)"));
  limits_.max_media = 0;
  EXPECT_THAT(refusal(image("data:;base64,AAEC")),
              HasSubstr("more than 0 images and sounds in one request (--max-media)"));
  model_.media = nullptr;
  EXPECT_THAT(refusal(image("data:;base64,AAEC")), HasSubstr("the model reads text alone"));
}

class Sounds final : public MediaPrompts {
 public:
  bool renders() const override { return true; }
  std::string refusal(MediaKind) const override { return ""; }
  std::string_view medium_of(int32_t) const override { return ""; }
  MediaPrompt prompt(const MultimodalRow& row, bool) override {
    bytes = row.media.at(0).bytes;
    return {"", {1}, nullptr};
  }
  std::string bytes;
};

TEST_F(MediaRequests, SoundsHaveAFormat) {
  Sounds sounds;
  model_.media = &sounds;
  const auto sound = [](const std::string& format) {
    return R"([{"type": "input_audio", "input_audio": {"data": "AAEC")" + format + "}}]";
  };
  for (const char* const format : {"", R"(, "format": "wav")", R"(, "format": "flac")"})
    EXPECT_EQ(refusal(sound(format)), "");
  EXPECT_EQ(sounds.bytes, std::string("\0\1\2", 3));
  EXPECT_THAT(refusal(sound(R"(, "format": "mp3")")),
              HasSubstr("format is \"mp3\"; expected wav, flac or ogg"));
  EXPECT_EQ(refusal(R"([{"type": "audio_url", "audio_url": {"url": "data:;base64,/w=="}}])"), "");
  EXPECT_EQ(sounds.bytes, "\xff");
}

TEST_F(MediaRequests, FaultsOfMediaAreTheClients) {
  EXPECT_EQ(refusal(image("data:;base64,YmFk")), "messages: cut") << "without the hint";
  EXPECT_THAT(refusal(image("data:;base64,AAEC"), R"(, "prompt_logprobs": 1)"),
              HasSubstr("prompt_logprobs is not supported for prompts with images or sounds"));
  // A text that spells the token of an image; ids of completions likewise.
  model_.limits.vocab_size = 300;
  GenerationRequest ids = parse_completion(R"({"prompt": [97, 200]})", model_, limits_);
  EXPECT_THROW(prepare(ids, model_, 0), ApiError);
  // Conversations of texts alone are rendered alike, since templates may take parts alone.
  EXPECT_EQ(refusal("\"a\"", R"(, "prompt_logprobs": 1)"), "");
  ASSERT_EQ(media_.seen.messages.size(), 1);
  EXPECT_EQ(media_.seen.messages[0].parts.at(0).text, "a");
}

TEST_F(MediaRequests, IdsAloneEncodeNothing) {
  GenerationRequest request = parse_chat(
      R"({"messages": [{"role": "user", "content": )" + image("data:;base64,AAEC") + "}]}", model_,
      limits_);
  request.ids_alone = true;
  prepare(request, model_, 0);
  EXPECT_THAT(request.prompts.at(0).ids, ElementsAre(200, 200, 97));
  EXPECT_EQ(request.prompts[0].rows, nullptr);
}

}  // namespace
}  // namespace megatron
