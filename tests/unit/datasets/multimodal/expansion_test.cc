// Placeholders become rows, and which labels count: against the processors of transformers
// (tests/golden/multimodal/expansions.json) and by hand.
#include <gtest/gtest.h>

#include <algorithm>

#include "megatron/datasets/multimodal/multimodal_encoder.h"
#include "tests/unit/datasets/multimodal/testing.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

using namespace testing_multimodal;
using Json = nlohmann::ordered_json;

std::unique_ptr<Tokenizer> golden_tokenizer() {
  return make_tokenizer(find_tokenizer(kGoldens + "tokenizer"));
}

// A model of the goldens: its files in a folder, its template.
struct Model {
  explicit Model(const std::string& family, bool escape = false, const std::string& other = "") {
    for (const auto& row : Json::parse(read_file(kGoldens + "expansions.json"))) {
      if (row.at("family") != family) continue;
      facts = row;
      folder.write("config.json", row.at("config").dump());
      folder.write("preprocessor_config.json", row.at("processor").dump());
    }
    SftConfig config;
    config.chat_template = other.empty() ? facts.at("template").get<std::string>() : other;
    conversations.emplace(*tokenizer, kGoldens + "tokenizer", config);
    encoder.emplace(*tokenizer, *conversations, read_media_rules(folder.path(), *tokenizer),
                    escape);
  }
  EncodedSample encode(const std::string& json, const std::vector<MediumFacts>& media) const {
    return encoder->encode(parse_multimodal_row(json, "row"), media, "row");
  }
  std::string text(const EncodedSample& sample, bool trained_only = false) const {
    std::string out;
    for (const int32_t id : sample.ids)
      if (id >= 0 || !trained_only) out += tokenizer->token_bytes(id < 0 ? ~id : id);
    return out;
  }

  Folder folder;
  Json facts;
  std::unique_ptr<Tokenizer> tokenizer = golden_tokenizer();
  std::optional<ConversationEncoder> conversations;
  std::optional<MultimodalEncoder> encoder;
};

std::vector<MediumFacts> facts_of(const Json& media) {
  std::vector<MediumFacts> out;
  for (const Json& medium : media)
    out.push_back(medium.is_array() ? MediumFacts{MediaKind::kImage, {medium[0], medium[1]}, 0}
                                    : MediumFacts{MediaKind::kSound, {}, medium.get<int64_t>()});
  return out;
}

// A row whose parts take media of these kinds.
std::string row_of(const Json& messages, const Json& media) {
  Json row = {{"messages", messages}, {"images", Json::array()}, {"audios", Json::array()}};
  for (size_t i = 0; i < media.size(); ++i)
    row[media[i].is_array() ? "images" : "audios"].push_back(cat(i));
  return row.dump();
}

class Expansion : public ::testing::TestWithParam<const char*> {};

TEST_P(Expansion, IsThatOfTransformers) {
  const Model model(GetParam());
  for (const Json& one : model.facts.at("cases")) {
    const EncodedSample sample =
        model.encode(row_of(one.at("messages"), one.at("media")), facts_of(one.at("media")));
    std::vector<int32_t> ids, expected, said;
    for (const int32_t id : expanded_ids(sample)) ids.push_back(id < 0 ? ~id : id);
    for (const Json& run : one.at("ids"))
      expected.insert(expected.end(), run.is_array() ? run[1].get<size_t>() : 1,
                      run.is_array() ? run[0].get<int32_t>() : run.get<int32_t>());
    EXPECT_EQ(ids, expected);
    std::copy_if(sample.ids.begin(), sample.ids.end(), std::back_inserter(said),
                 [](int32_t id) { return id >= 0; });
    EXPECT_EQ(said, one.at("said").get<std::vector<int32_t>>());
    EXPECT_EQ(sample_positions(sample), std::ssize(expected) - 1);
  }
}

INSTANTIATE_TEST_SUITE_P(Families, Expansion,
                         ::testing::Values("llava", "llava_next", "internvl", "gemma3", "qwen2_vl",
                                           "qwen2_audio"),
                         [](const auto& info) { return std::string(info.param); });

const std::vector<MediumFacts> kOneImage = {{MediaKind::kImage, {30, 40}, 0}};

TEST(Encoder, ATemplateOfTextsGetsPlaceholdersInTexts) {
  const Model model("llava", false,
                    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}");
  const EncodedSample sample = model.encode(
      R"({"image": "a", "conversations": [{"from": "human", "value": "Look <image>?"},
          {"from": "gpt", "value": "Yes"}]})",
      kOneImage);
  EXPECT_EQ(model.text(sample), "user: Look <image>?\nassistant: Yes\n");
  ASSERT_EQ(sample.runs.size(), 1U);
  EXPECT_EQ(sample.runs[0].rows, 4);
  EXPECT_EQ(sample.ids[static_cast<size_t>(sample.runs[0].token)],
            ~*model.tokenizer->token_to_id("<image>"));
}

TEST(Encoder, ACaptionFollowsItsMediaAndIsTrained) {
  const Model model("qwen2_vl");
  const EncodedSample sample =
      model.encode(R"({"image": ["a", "b"], "caption": "cats"})", {kOneImage[0], kOneImage[0]});
  EXPECT_EQ(model.text(sample), "<|image_pad|><|image_pad|>cats<|endoftext|>");
  EXPECT_EQ(model.text(sample, true), "cats<|endoftext|>");
}

std::string typed(const std::string& role, const std::string& text) {
  return R"({"image": "a", "messages": [{"role": "user", "content": [{"type": "image"}]},
             {"role": ")" +
         role + R"(", "content": "so )" + text + R"( it is"}]})";
}

TEST(Encoder, SpellingsOfTokensInTextsAreErrors) {
  for (const char* family : {"llava", "internvl", "gemma3", "qwen2_vl"}) {
    const Model model(family);
    for (const char* role : {"system", "user", "assistant", "tool"})
      for (const std::string& text :
           {model.encoder->rules().image->placeholder, model.encoder->rules().image->token,
            std::string("<|im_end|>")})
        EXPECT_EQ(error_of([&] { model.encode(typed(role, text), kOneImage); }),
                  "row: message 2, byte 3: the text holds " + text +
                      ", which the tokenizer takes for a token of its own\nhint: "
                      "--escape-modality-text encodes it as ordinary text");
  }
  const Model model("llava");
  EXPECT_EQ(error_of([&] {
              model.encode(R"({"image": "a", "caption": "an <image> of"})", kOneImage);
            }).substr(0, 55),
            "row: caption, byte 3: the text holds <image>, which the");
  EXPECT_EQ(error_of([&] {
              model.encode(R"({"messages": [{"role": "<|im_end|>", "content": "x"}]})", {});
            }),
            "row: message 1: holds <|im_end|>, which the tokenizer takes for a token of its own");
}

TEST(Encoder, EscapedSpellingsAreOrdinaryText) {
  const Model model("qwen2_vl", /*escape=*/true);
  const std::string text = "<|image_pad|> and <|im_end|>";
  const EncodedSample sample = model.encode(typed("assistant", text), kOneImage);
  EXPECT_EQ(model.text(sample, true), "so " + text + " it is<|im_end|>");
  ASSERT_EQ(sample.runs.size(), 1U);
  const auto id = [&](const char* token) { return *model.tokenizer->token_to_id(token); };
  EXPECT_EQ(std::count(sample.ids.begin(), sample.ids.end(), id("<|image_pad|>")), 0);
  EXPECT_EQ(std::count(sample.ids.begin(), sample.ids.end(), ~id("<|image_pad|>")), 1);
  // The one that closes the turn.
  EXPECT_EQ(std::count(sample.ids.begin(), sample.ids.end(), id("<|im_end|>")), 1);
}

TEST(Encoder, WhatDoesNotFitTheModelIsNamed) {
  const Model llava("llava"), sound("qwen2_audio"), qwen("qwen2_vl");
  const auto heard = [&](int64_t samples) {
    return error_of([&] {
      sound.encode(R"({"audio": "a", "caption": "x"})", {{MediaKind::kSound, {}, samples}});
    });
  };
  EXPECT_EQ(heard(480), "");
  EXPECT_EQ(heard(160), "row: the sound has 160 samples, too few for one token of the model");
  EXPECT_EQ(heard(480'001),
            "row: the sound has 480001 samples, more than the 480000 of 30 s that the model hears");
  EXPECT_EQ(error_of([&] {
              llava.encode(R"({"audio": "a", "caption": "x"})", {{MediaKind::kSound, {}, 16000}});
            }),
            "row: there is a sound, which the model does not read");
  EXPECT_EQ(error_of([&] {
              qwen.encode(R"({"image": "a", "caption": "x"})",
                          {{MediaKind::kImage, {20, 4001}, 0}});
            }).substr(0, 5),
            "row: ");
  const Model silent("llava", false, "{% for m in messages %}{{ m['role'] }}{% endfor %}");
  EXPECT_EQ(error_of([&] { silent.encode(typed("assistant", "x"), kOneImage); }),
            "row: the chat template writes <image> 0 times for 1 image");
}

TEST(Encoder, ATokenThatTheTokenizerLacksIsNamed) {
  const Folder folder;
  const auto error = [&](const std::string& config) {
    folder.write("config.json", config);
    folder.write("preprocessor_config.json", R"({"image_processor_type": "CLIPImageProcessor"})");
    return error_of([&] { read_media_rules(folder.path(), *golden_tokenizer()); });
  };
  const std::string path = folder / "config.json";
  EXPECT_EQ(error(R"({"model_type": "llava", "image_token_index": 5000})"),
            path + ": the token of media 5000 is missing in the tokenizer, which has 275 ids");
  EXPECT_NE(error(R"({"model_type": "llava", "image_token_index": 0})").find("is no special token"),
            std::string::npos);
  EXPECT_NE(error(R"({"model_type": "mllama"})").find("model_type is \"mllama\", expected llava"),
            std::string::npos);
  EXPECT_EQ(error(R"({"model_type": "qwen2_vl", "image_token_id": 269})"),
            path + ": the image processor CLIPImageProcessor is not one of this model");
}

// -- labels and masks

constexpr int32_t kImage = 99;

// ids with kImage for media of the given rows; `next` is the last label.
EncodedSample sample_of(std::vector<int32_t> ids, int32_t next, const std::vector<int64_t>& rows) {
  EncodedSample out;
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] != kImage) continue;
    out.runs.push_back({static_cast<int64_t>(i), rows.at(out.runs.size()), std::ssize(out.runs)});
    ids[i] = ~kImage;
  }
  ids.push_back(next);
  out.ids = std::move(ids);
  return out;
}

// "tokens | labels | mask", . for a label that does not count.
std::string fused(const EncodedSample& sample, bool loss_at_media) {
  const auto positions = static_cast<size_t>(sample_positions(sample));
  std::vector<int64_t> tokens(positions), labels(positions);
  std::vector<float> mask(positions), all(positions);
  fuse(sample, {loss_at_media}, tokens, labels, mask);
  fuse(sample, {}, tokens, labels, all);
  std::string rows, next, counts;
  for (size_t i = 0; i < positions; ++i) {
    rows += tokens[i] == kImage ? "f" : cat(tokens[i]);
    next += all[i] > 0 ? cat(labels[i]) : ".";
    counts += mask[i] > 0 ? "1" : "0";
  }
  return rows + " | " + next + " | " + counts;
}

TEST(Fusion, TheLastRowOfAnImagePredictsTheTextBehindIt) {
  EXPECT_EQ(fused(sample_of({0, 1, kImage, 2, 3}, 4, {2}), true), "01ff23 | 1..234 | 100111");
  EXPECT_EQ(fused(sample_of({kImage, 5, 6, 7}, 8, {4}), true), "ffff567 | ...5678 | 0001111");
  EXPECT_EQ(fused(sample_of({9, kImage, 5, kImage, 6, 7}, 8, {2, 4}), true),
            "9ff5ffff67 | ..5....678 | 0010000111");
  EXPECT_EQ(fused(sample_of({9, 8, kImage, kImage, 6}, 7, {2, 2}), true),
            "98ffff6 | 8....67 | 1000011");
}

// All of a document is trained but what its media become.
TEST(Documents, MediaStandAmongTextThatIsTrained) {
  const std::string row = R"({"images": ["a", "b"], "document": ["ab", {"type": "image"}, "cd",
                              {"type": "image"}, "ef"]})";
  for (const char* family : {"llava", "internvl", "gemma3"}) {
    SCOPED_TRACE(family);
    const Model model(family);
    const std::vector<MediumFacts> media(2, {MediaKind::kImage, {28, 28}, 0});
    const EncodedSample sample = model.encode(row, media);
    const std::string image = medium_text(model.encoder->rules(), media[0], "row").text;
    const std::optional<int32_t> eod = model.tokenizer->eod();
    const std::string end = eod ? model.tokenizer->token_bytes(*eod) : "";
    EXPECT_EQ(model.text(sample), cat("ab", image, "cd", image, "ef", end));
    EXPECT_EQ(model.text(sample, /*trained_only=*/true), "abcdef" + end);
    ASSERT_GE(sample.runs.size(), 2U);
    EXPECT_EQ(sample.runs.back().medium, 1);
  }
  const Model model("llava");
  EXPECT_EQ(model.text(model.encode(R"({"document": ["words"]})", {}), true).substr(0, 5), "words");
  const Model first("llava");
  const EncodedSample sample =
      first.encode(R"({"document": [{"type": "image", "image": "a"}, "b"]})",
                   {{MediaKind::kImage, {28, 28}, 0}});
  EXPECT_EQ(sample.runs.at(0).token, 0);
  EXPECT_EQ(error_of([&] { model.encode(R"({"document": ["x <image>"]})", {}); }),
            "row: document, byte 2: the text holds <image>, which the tokenizer takes for a token "
            "of its own\nhint: --escape-modality-text encodes it as ordinary text");
}

TEST(Fusion, RowsOfImagesCanBeLeftOut) {
  EXPECT_EQ(fused(sample_of({0, 1, kImage, 2, 3}, 4, {2}), false), "01ff23 | 1..234 | 100011");
  EXPECT_EQ(fused(sample_of({kImage, 5, 6, 7}, 8, {4}), false), "ffff567 | ...5678 | 0000111");
  EXPECT_EQ(fused(sample_of({9, kImage, 5, kImage, 6, 7}, 8, {2, 4}), false),
            "9ff5ffff67 | ..5....678 | 0000000011");
  EXPECT_EQ(fused(sample_of({9, 8, kImage, kImage, 6}, 7, {2, 2}), false),
            "98ffff6 | 8....67 | 1000001");
}

TEST(Fusion, OnlyTextBehindTheLastImageIsCut) {
  // 9 8 f f f f 5 and the label 6: seven positions.
  const EncodedSample sample = sample_of({9, 8, kImage, 5}, 6, {4});
  for (const auto& [room, kept] : {std::pair(8, 7), {7, 7}, {6, 6}, {5, 0}, {1, 0}}) {
    EXPECT_EQ(kept_positions(sample, room, LongSamples::kCut), kept) << room;
    EXPECT_EQ(kept_positions(sample, room, LongSamples::kDrop), room >= 7 ? 7 : 0);
  }
  EXPECT_EQ(kept_positions(sample_of({1, 2, 3}, 4, {}), 2, LongSamples::kCut), 2);
}

TEST(Fusion, TextThatIsNotTrainedOnDoesNotCount) {
  EncodedSample sample = sample_of({kImage, 5, 6}, 7, {2});
  sample.ids[1] = ~5;
  EXPECT_EQ(fused(sample, true), "ff56 | ..67 | 0011");
}

}  // namespace
}  // namespace megatron
