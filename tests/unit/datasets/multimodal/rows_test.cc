// Rows with media: LLaVA's conversations, messages of parts, captions.
#include <gtest/gtest.h>

#include "tests/unit/datasets/multimodal/testing.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

using namespace testing_multimodal;

std::string row_text(const std::string& json, const std::vector<RowMedium>& container = {}) {
  return text_of(parse_multimodal_row(json, "row 1", container));
}
std::string row_error(const std::string& json, const std::vector<RowMedium>& container = {}) {
  return error_of([&] { row_text(json, container); });
}
std::string llava(const std::string& media, const std::string& value) {
  return "{" + media + R"("conversations": [{"from": "human", "value": ")" + value +
         R"("}, {"from": "gpt", "value": "so"}]})";
}
std::string parts(const std::string& media, const std::string& list) {
  return "{" + media + R"("messages": [{"role": "user", "content": [)" + list +
         R"(]}, {"role": "assistant", "content": "so"}]})";
}

TEST(Rows, Llava) {
  EXPECT_EQ(row_text(llava(R"("image": "a.jpg", )", "<image>\\nWhat?")),
            "user [image:a.jpg]\nWhat? | assistant so");
  EXPECT_EQ(row_text(llava(R"("image": ["a.jpg", "b.jpg"], )", "A <image> B <image>.")),
            "user A [image:a.jpg] B [image:b.jpg]. | assistant so");
  EXPECT_EQ(row_text(llava(R"("image": ["a.jpg", "b.jpg"], )", "<image-2>, <image-1>, <image-2>")),
            "user [image:b.jpg], [image:a.jpg], [image:b.jpg] | assistant so");
  EXPECT_EQ(row_text(llava(R"("image": "a.jpg", "audio": "s.wav", )", "<audio> <image>")),
            "user [sound:s.wav] [image:a.jpg] | assistant so");
  EXPECT_EQ(row_text(llava("", "no <images> here, <image-> and <b>")),
            "user no <images> here, <image-> and <b> | assistant so");
}

TEST(Rows, PlacesAndMediaAreEqualInNumber) {
  EXPECT_EQ(row_error(llava(R"("image": "a.jpg", )", "<image> <image>")),
            "row 1: 2 places for 1 image\nhint: each medium has one place: <image> in "
            "conversations, a part of type image in messages");
  EXPECT_EQ(row_error(llava(R"("image": ["a.jpg", "b.jpg"], )", "<image>")).substr(0, 27),
            "row 1: 1 place for 2 images");
  EXPECT_EQ(
      row_error(llava(R"("image": ["a.jpg", "b.jpg"], )", "<image-1> <image-1>")).substr(0, 27),
      "row 1: 1 place for 2 images");
  EXPECT_EQ(row_error(llava(R"("audio": "a.wav", )", "none")).substr(0, 27),
            "row 1: 0 places for 1 sound");
  EXPECT_EQ(row_error(llava(R"("image": "a.jpg", )", "<image-3>")),
            "row 1: <image-3> names no medium: the row has 1 of this kind");
  EXPECT_EQ(row_error(parts(R"("images": ["a.png"], )", R"({"type": "text", "text": "<image>"})"))
                .substr(0, 27),
            "row 1: 0 places for 1 image");
}

TEST(Rows, MessagesOfParts) {
  EXPECT_EQ(row_text(parts(R"("images": ["a.png", {"path": "b.png"}], "audios": ["s.ogg"], )",
                           R"({"type": "image"}, {"type": "text", "text": " <image> "},
                          {"type": "audio"}, {"type": "image"})")),
            "user [image:a.png] <image> [sound:s.ogg][image:b.png] | assistant so");
  EXPECT_EQ(row_text(parts("", R"({"type": "image_url", "image_url": {"url": "c.png"}},
                              {"type": "image", "image": "data:image/png;base64,QUJD"},
                              {"type": "audio_url", "audio_url": "t.wav"},
                              {"type": "input_audio", "input_audio": {"data": "REU="}},
                              {"type": "image", "path": "p.png"},
                              {"type": "image", "url": "u.png"})")),
            "user [image:c.png][image:ABC][sound:t.wav][sound:DE][image:p.png][image:u.png] | "
            "assistant so");
  EXPECT_EQ(row_error(parts("", R"({"type": "video", "video": "v.mp4"})")),
            "row 1: a part of a message is of type video, expected text, image or audio");
  EXPECT_EQ(row_error(parts("", R"({"text": "x"})")),
            "row 1: a part of a message has no type, expected text, image, image_url, audio, ...");
}

TEST(Rows, Captions) {
  EXPECT_EQ(row_text(R"({"caption": "a cat", "image": "a.jpg", "audio": "b.wav"})"),
            "[image:a.jpg][sound:b.wav] a cat");
  EXPECT_EQ(row_error(R"({"caption": "", "image": "a.jpg"})"), "row 1: the caption is empty");
  EXPECT_EQ(row_error(R"({"caption": "a cat"})"),
            "row 1: the caption has neither an image nor a sound");
  EXPECT_EQ(row_error(R"({"image": "a.jpg"})"),
            "row 1: has none of conversations, messages, document and caption");
}

TEST(Rows, MembersOfTheContainer) {
  const std::vector<RowMedium> members = {{MediaKind::kImage, "d/7.img1.png", {}},
                                          {MediaKind::kImage, "d/7.img2.png", {}},
                                          {MediaKind::kSound, "d/7.wav", {}}};
  const std::string value = "<image> <image> <audio>";
  EXPECT_EQ(row_text(llava("", value), members),
            "user [image:d/7.img1.png] [image:d/7.img2.png] [sound:d/7.wav] | assistant so");
  EXPECT_EQ(row_text(llava(R"("image": ["img2.png", "7.img1.png"], "audio": "d/7.wav", )", value),
                     members),
            "user [image:d/7.img2.png] [image:d/7.img1.png] [sound:d/7.wav] | assistant so");
  EXPECT_EQ(row_error(llava(R"("image": "other.png", )", "<image>"), members),
            "row 1: there is no image other.png among the members of the sample");
}

TEST(Rows, PartsNameMembersOfTheContainer) {
  const std::vector<RowMedium> members = {{MediaKind::kImage, "d/7.img1.png", {}},
                                          {MediaKind::kImage, "d/7.img2.png", {}},
                                          {MediaKind::kSound, "d/7.wav", {}}};
  const std::string sound = R"({"type": "audio", "audio": "7.wav"})";
  EXPECT_EQ(row_text(parts("", cat(R"({"type": "image", "image": "img2.png"}, )", sound,
                                   R"(, {"type": "image", "image": "img1.png"})")),
                     members),
            "user [image:d/7.img2.png][sound:d/7.wav][image:d/7.img1.png] | assistant so");
  // A part without a name has the next one that none has named.
  EXPECT_EQ(row_text(parts("", cat(R"({"type": "image", "image": "img1.png"}, {"type": "image"}, )",
                                   sound)),
                     members),
            "user [image:d/7.img1.png][image:d/7.img2.png][sound:d/7.wav] | assistant so");
  EXPECT_EQ(
      row_error(parts("", cat(R"({"type": "image", "image": "img2.png"}, )", sound)), members),
      "row 1: 1 place for 2 images\nhint: each medium has one place: <image> in "
      "conversations, a part of type image in messages");
}

TEST(Rows, DocumentsHaveTextsAndMediaInOrder) {
  const std::string parts = R"(["one ", {"type": "image"}, {"type": "text", "text": "two"}])";
  EXPECT_EQ(row_text(cat(R"({"images": ["a.png"], "document": )", parts, "}")),
            "one [image:a.png]two");
  EXPECT_EQ(row_text(R"({"document": [{"type": "image", "image": "b.png"}, "x"]})"),
            "[image:b.png]x");
  EXPECT_EQ(row_error(cat(R"({"document": )", parts, "}")),
            "row 1: 1 place for 0 images\nhint: each medium has one place: <image> in "
            "conversations, a part of type image in messages");
  EXPECT_EQ(row_error(R"({"document": "x"})"),
            "row 1: the document is string, expected a list of parts");
  EXPECT_EQ(row_error(R"({"document": []})"), "row 1: the document is empty");
}

TEST(Rows, AddressesAreNotFetched) {
  for (const char* url : {"http://h/x.png", "https://h/x.png", "s3://b/x.png", "file:///etc/x"})
    EXPECT_EQ(row_error(llava(cat(R"("image": ")", url, R"(", )"), "<image>")),
              cat("row 1: the image ", url,
                  " is an address; nothing is fetched\nhint: download it and give its path below "
                  "--media-root"));
  EXPECT_EQ(row_error(llava(R"("video": "v.mp4", )", "x")),
            "row 1: has a video, which is not built\nhint: give its frames as images");
}

TEST(Rows, Base64) {
  EXPECT_EQ(decode_base64("", "r"), "");
  EXPECT_EQ(decode_base64("QUJDRA==", "r"), "ABCD");
  EXPECT_EQ(decode_base64("QUJDRA", "r"), "ABCD");
  EXPECT_EQ(decode_base64("+/8=", "r"), "\xfb\xff");
  EXPECT_EQ(error_of([] { decode_base64("QU*D", "r"); }),
            "r: the bytes of a medium are no base64: byte 2 of their text");
  EXPECT_EQ(error_of([] { decode_base64("QUJDR", "r"); }),
            "r: the bytes of a medium are no base64: their text is cut");
  EXPECT_EQ(row_error(llava(R"("image": "data:image/png,abc", )", "<image>")),
            "row 1: a data: address of an image is not in base64");
}

TEST(Rows, WhatIsNoRowIsNamed) {
  EXPECT_EQ(row_error("[1]"), "row 1: is no JSON object");
  EXPECT_EQ(row_error(R"({"caption": )" + std::string(200, '[') + std::string(200, ']') + "}"),
            "row 1: is nested deeper than 100");
  EXPECT_EQ(row_error(R"({"messages": [{"role": "user", "content": 3}]})"),
            "row 1: the content of a message is number, expected a text or a list of parts");
  EXPECT_EQ(row_error(llava(R"("image": [null], )", "<image>")),
            "row 1: an image is null, expected a path or an object with bytes or path");
  EXPECT_EQ(row_error(llava(R"("image": {"bytes": null, "path": null}, )", "<image>")),
            "row 1: an image has neither bytes nor path");
  EXPECT_EQ(row_error(llava(R"("image": "a", "images": ["b"], )", "<image>")),
            "row 1: has both image and images");
}

}  // namespace
}  // namespace megatron
