// The hand-written scanners split text as PCRE2 does with the expressions that they implement.
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "megatron/tokenizers/detail/pre_tokenizer.h"
#include "megatron/tokenizers/detail/text/regex.h"

namespace megatron {
namespace {

constexpr KnownPattern kPatterns[] = {KnownPattern::kGpt2,       KnownPattern::kLlama3,
                                      KnownPattern::kQwen2,      KnownPattern::kTiktokenV1,
                                      KnownPattern::kTiktokenV2, KnownPattern::kO200k};

// Of every kind that the expressions tell apart: letters by case (Lu Ll Lt Lm Lo), marks (Mn Mc
// Me), numbers (Nd Nl No), white space, symbols, and what contractions are made of.
const std::vector<std::string> kCharacters = {
    "a",      "Z",      "s",      "S",      "\u00e9", "\u00c9", "\u01c5", "\u02b0", "\u4e2d",
    "\u0301", "\u0903", "\u20dd", "1",      "\u0663", "\u2167", "\u00bd", " ",      "\t",
    "\n",     "\r",     "\u00a0", "\u2028", "\u0085", "'",      "/",      ".",      "\U0001f600",
    "\u017f", "\u200d", "\u180e", "'s",     "'LL",    "'Ve",    "'\u017f"};

std::string cut(const std::string& text, const std::vector<size_t>& ends) {
  std::string out;
  size_t begin = 0;
  for (const size_t end : ends) {
    out += "[" + text.substr(begin, end - begin) + "]";
    begin = end;
  }
  return out;
}

void expect_equal(KnownPattern pattern, const Regex& regex, const std::string& text) {
  std::vector<size_t> expected, found;
  regex.for_each_match(text, [&](size_t, size_t end) { expected.push_back(end); });
  scan(pattern, text.data(), text.data() + text.size(), [&](const char*, const char* end) {
    found.push_back(static_cast<size_t>(end - text.data()));
  });
  ASSERT_EQ(cut(text, found), cut(text, expected)) << pattern_text(pattern);
}

TEST(Scanners, EqualTheExpressionsOnEveryShortText) {
  for (const KnownPattern pattern : kPatterns) {
    const Regex regex(pattern_text(pattern), "test");
    for (const std::string& a : kCharacters) {
      expect_equal(pattern, regex, a);
      for (const std::string& b : kCharacters) {
        expect_equal(pattern, regex, a + b);
        for (const std::string& c : kCharacters) {
          expect_equal(pattern, regex, a + b + c);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(Scanners, EqualTheExpressionsOnRandomText) {
  std::mt19937 random(7);
  for (const KnownPattern pattern : kPatterns) {
    const Regex regex(pattern_text(pattern), "test");
    for (int i = 0; i < 20000; ++i) {
      // Few kinds at a time, so that runs and their neighbours are frequent.
      std::vector<std::string> some;
      for (int k = 0; k < 4; ++k) some.push_back(kCharacters[random() % kCharacters.size()]);
      std::string text;
      for (size_t length = 1 + random() % 24; length > 0; --length) text += some[random() % 4];
      expect_equal(pattern, regex, text);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(Scanners, AreFoundByTheirExpressions) {
  for (const KnownPattern pattern : kPatterns)
    EXPECT_EQ(find_known_pattern(pattern_text(pattern)), pattern);
  EXPECT_EQ(find_known_pattern("\\w+"), KnownPattern::kNone);
}

}  // namespace
}  // namespace megatron
