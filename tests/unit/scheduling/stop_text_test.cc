#include "megatron/scheduling/stop_text.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "megatron/base/utf8.h"
#include "megatron/scheduling/text_output.h"

namespace megatron {
namespace {

struct Cut {
  std::string text;
  int32_t match = -1;
  bool operator==(const Cut&) const = default;
};

// By looking at every end of the text.
Cut cut_by_search(const std::string& text, const std::vector<std::string>& stops, bool include) {
  for (size_t end = 1; end <= text.size(); ++end) {
    Cut best;
    size_t length = 0;
    for (size_t i = 0; i < stops.size(); ++i)
      if (stops[i].size() > length && text.substr(0, end).ends_with(stops[i])) {
        length = stops[i].size();
        best = {text.substr(0, include ? end : end - length), static_cast<int32_t>(i)};
      }
    if (length > 0) return best;
  }
  return {text, -1};
}

// In pieces that end at `borders`.
Cut cut_in_pieces(const std::string& text, const std::vector<std::string>& stops, bool include,
                  const std::vector<size_t>& borders) {
  StopText stop(std::make_shared<StopAutomaton>(stops), include);
  Cut cut;
  size_t begin = 0;
  for (const size_t end : borders) {
    cut.text += stop.push(std::string_view(text).substr(begin, end - begin));
    begin = end;
    if (stop.match() >= 0) break;
  }
  cut.match = stop.match();
  if (cut.match < 0) cut.text += stop.finish();
  return cut;
}

TEST(StopTexts, AreFoundAtEverySplit) {
  const std::vector<std::string> stops = {"END", "STOP.", "\xe2\x82\xac!", "aab", "ab"};
  const std::vector<std::string> texts = {"xENENDy", "an aaab", "SSTOPSTOP.",
                                          "10\xe2\x82\xac\xe2\x82\xac!9", "none of them, EN"};
  for (const std::string& text : texts)
    for (const bool include : {false, true}) {
      const Cut expected = cut_by_search(text, stops, include);
      for (uint32_t mask = 0; mask < 1u << (text.size() - 1); ++mask) {
        std::vector<size_t> borders;
        for (size_t i = 1; i < text.size(); ++i)
          if ((mask >> (i - 1) & 1) != 0) borders.push_back(i);
        borders.push_back(text.size());
        ASSERT_EQ(cut_in_pieces(text, stops, include, borders), expected) << text << " " << mask;
      }
    }
  EXPECT_EQ(cut_by_search("xENENDy", stops, false).text, "xEN");
  EXPECT_EQ(cut_by_search("an aaab", stops, false).text, "an a");
}

TEST(StopTexts, RandomTextsAndSplits) {
  std::mt19937 random(5);
  const auto word = [&](size_t most) {
    std::string text(1 + random() % most, 'a');
    for (char& c : text) c = static_cast<char>('a' + random() % 2);
    return text;
  };
  for (int round = 0; round < 20000; ++round) {
    std::vector<std::string> stops;
    for (size_t i = 0; i < 1 + random() % 5; ++i) stops.push_back(word(7) + "b");
    const std::string text = word(30);
    std::vector<size_t> borders;
    for (size_t i = 1; i < text.size(); ++i)
      if (random() % 3 == 0) borders.push_back(i);
    borders.push_back(text.size());
    const bool include = random() % 2 == 0;
    ASSERT_EQ(cut_in_pieces(text, stops, include, borders), cut_by_search(text, stops, include));
  }
}

// What may become a stop text is kept, and nothing more.
TEST(StopTexts, HoldBackTheLongestBeginning) {
  StopText stop(std::make_shared<StopAutomaton>(std::vector<std::string>{"abac", "bb"}), false);
  EXPECT_EQ(stop.push("xab"), "x");
  EXPECT_EQ(stop.push("a"), "");
  EXPECT_EQ(stop.push("b"), "ab");
  EXPECT_EQ(stop.push("a"), "");
  EXPECT_EQ(stop.finish(), "aba");
  StopText none(nullptr, false);
  EXPECT_EQ(none.push("abac"), "abac");
}

TEST(StopTexts, SixtyFourLongOnesAreOneAutomaton) {
  std::vector<std::string> stops;
  for (int i = 0; i < 64; ++i) stops.push_back(std::string(255, 'a') + static_cast<char>('!' + i));
  StopText stop(std::make_shared<StopAutomaton>(stops), false);
  std::string text;
  for (int i = 0; i < 100000; ++i) text += stop.push("a");
  text += stop.push(std::string(1, static_cast<char>('!' + 63)));
  EXPECT_EQ(stop.match(), 63);
  EXPECT_EQ(text.size(), 100000u - 255u);
}

std::unique_ptr<Tokenizer> byte_tokenizer() {
  TokenizerConfig config;
  config.tokenizer_type = "ByteLevelTokenizer";
  return make_tokenizer(config);
}

// Bytes of characters of one to four bytes, whole, cut and wrong.
std::vector<int32_t> random_bytes(std::mt19937& random) {
  static const std::vector<std::string> kPieces = {
      "a", "b", "\xc3\xa9", "\xe2\x82\xac", "\xf0\x9f\x98\x80", "\xe2\x82", "\xff", "\x80"};
  std::vector<int32_t> ids;
  for (size_t i = 0; i < 1 + random() % 6; ++i)
    for (const char c : kPieces[random() % kPieces.size()])
      ids.push_back(static_cast<unsigned char>(c));
  return ids;
}

TEST(TextOutputs, PiecesAreWholeCharactersAndConcatenateToTheText) {
  const auto tokenizer = byte_tokenizer();
  std::mt19937 random(7);
  for (int round = 0; round < 100000; ++round) {
    const std::vector<int32_t> ids = random_bytes(random);
    StopConditions conditions;
    TextOutput output(*tokenizer, conditions, nullptr);
    std::string text;
    for (const int32_t id : ids) {
      const std::string piece = output.push(id);
      ASSERT_TRUE(is_valid_utf8(piece));
      text += piece;
    }
    text += output.finish();
    ASSERT_EQ(text, tokenizer->decode(ids));
  }
}

TEST(TextOutputs, StopTextsReachAcrossTokensAndSpecialOnesAreLeftOut) {
  const auto tokenizer = byte_tokenizer();
  StopConditions conditions;
  conditions.stop_texts = {"\xe2\x82\xac"};
  conditions.skip_special_tokens = true;
  const auto automaton = std::make_shared<StopAutomaton>(conditions.stop_texts);
  TextOutput output(*tokenizer, conditions, automaton);
  EXPECT_EQ(output.push('x'), "x");
  EXPECT_EQ(output.push(256), "");  // end of document
  EXPECT_EQ(output.push(100000), "");
  EXPECT_EQ(output.push(0xe2), "");
  EXPECT_EQ(output.push(0x82), "");
  EXPECT_EQ(output.push(0xac), "");
  EXPECT_EQ(output.match(), 0);

  TextOutput cut(*tokenizer, conditions, automaton);
  EXPECT_EQ(cut.push(0xe2), "");
  EXPECT_EQ(cut.finish(), "\xef\xbf\xbd");
  EXPECT_EQ(cut.match(), -1);
}

TEST(TextOutputs, StopTextsAreLookedForFromTheFewestTokensOn) {
  const auto tokenizer = byte_tokenizer();
  StopConditions conditions;
  conditions.stop_texts = {"ab"};
  conditions.min_tokens = 4;
  TextOutput output(*tokenizer, conditions, std::make_shared<StopAutomaton>(conditions.stop_texts));
  std::string text;
  for (const char c : std::string("abab")) text += output.push(c);
  EXPECT_EQ(text, "abab");
  EXPECT_EQ(output.match(), -1);
  EXPECT_EQ(output.push('a'), "");
  EXPECT_EQ(output.push('b'), "");
  EXPECT_EQ(output.match(), 0);
}

}  // namespace
}  // namespace megatron
