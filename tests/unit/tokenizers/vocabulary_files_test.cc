// SentencePiece models, tiktoken vocabularies, BERT's vocab.txt and Hugging Face folders: the
// resulting tokenizers, and errors for invalid files. Ids are compared in golden_test.cc.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "testing.h"

namespace megatron {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TokenizerConfig config_of(std::string type, const std::filesystem::path& model) {
  TokenizerConfig config;
  config.tokenizer_type = std::move(type);
  config.tokenizer_model = model.string();
  return config;
}

// -- protobuf by hand
std::string varint(uint64_t value) {
  std::string out;
  for (; value >= 128; value >>= 7) out += static_cast<char>(value | 128);
  return out + static_cast<char>(value);
}
std::string integer(int field, uint64_t value) {
  return varint(static_cast<uint64_t>(field) << 3) + varint(value);
}
std::string bytes(int field, std::string_view value) {
  return varint(static_cast<uint64_t>(field) << 3 | 2) + varint(value.size()) + std::string(value);
}
std::string piece(std::string_view text, float score, int type) {
  std::string number(4, '\0');
  std::memcpy(number.data(), &score, 4);
  return bytes(1, bytes(1, text) + varint(2 << 3 | 5) + number + integer(3, type));
}
// Unknown, end of text, and the pieces given.
std::string model(const std::string& pieces, int model_type, const std::string& trainer = {},
                  const std::string& normalizer = {}) {
  return piece("<unk>", 0, 2) + piece("</s>", 0, 3) + pieces +
         bytes(2, integer(3, static_cast<uint64_t>(model_type)) + trainer) + bytes(3, normalizer);
}

class SentencePiece : public testing::Test {
 protected:
  std::unique_ptr<Tokenizer> load_model(const std::string& bytes) {
    return make_tokenizer(config_of("SentencePieceTokenizer", folder_.write("m.model", bytes)));
  }
  std::string error(const std::string& bytes) {
    return error_of([&] { load_model(bytes); });
  }
  TemporaryFolder folder_;
};

TEST_F(SentencePiece, SpecialIdsAndControlSymbols) {
  const auto tokenizer = load_model(model(
      piece("\u2581", -1, 1) + piece("a", -2, 1) + piece("<pad>", 0, 3) + piece("<s>", 0, 3), 2));
  EXPECT_EQ(tokenizer->vocab_size(), 6);
  EXPECT_EQ(tokenizer->eod(), 1);
  EXPECT_EQ(tokenizer->pad(), 4);
  EXPECT_EQ(tokenizer->bos(), 5);
  EXPECT_TRUE(tokenizer->is_special(0) && tokenizer->is_special(5) && !tokenizer->is_special(2));
  EXPECT_FALSE(tokenizer->is_special(-1) || tokenizer->is_special(6));
  EXPECT_THAT(tokenizer->encode("a  a"), ElementsAre(2, 3, 2, 3));
  EXPECT_THAT(tokenizer->encode("</s>"), ElementsAre(2, 0));  // spelled, not meant
  EXPECT_EQ(tokenizer->decode(std::vector<int32_t>{5, 2, 3, 0, 1}), "a \u2047 ");
  EXPECT_EQ(tokenizer->token_bytes(2), " ");
  EXPECT_EQ(tokenizer->token_to_id("a"), 3);
  EXPECT_THAT(error_of([&] { tokenizer->decode(std::vector<int32_t>{6}); }),
              HasSubstr("token id 6 is outside the vocabulary of 6"));
}

TEST_F(SentencePiece, BrokenUtf8IsReplacedAndCounted) {
  const auto tokenizer = load_model(model(piece("\u2581", -1, 1) + piece("\ufffd", -2, 1), 1));
  EXPECT_THAT(tokenizer->encode("\xff\xfe"), ElementsAre(2, 3, 3));
  EXPECT_EQ(tokenizer->num_replaced(), 2u);
}

TEST_F(SentencePiece, WrongFilesAreNamed) {
  const std::string good = model(piece("a", -1, 1), 1);
  EXPECT_THAT(error(good.substr(0, good.size() - 3)), HasSubstr("m.model: byte "));
  EXPECT_THAT(error("PK\x03\x04"), HasSubstr("or no SentencePiece model"));
  EXPECT_THAT(error(""), HasSubstr("m.model: the model has no pieces"));
  EXPECT_THAT(error(model(piece("a", -1, 1), 3)), HasSubstr("type WORD are not supported"));
  EXPECT_THAT(error(model(piece("a", -1, 1), 9)), HasSubstr("model_type is 9"));
  EXPECT_THAT(error(model(piece("a", -1, 9), 1)), HasSubstr("piece 2 \"a\" has type 9"));
  EXPECT_THAT(error(model(piece("", -1, 1), 1)), HasSubstr("piece 2 \"\" is empty"));
  EXPECT_THAT(error(model(piece("\xff", -1, 1), 1)), HasSubstr("is not UTF-8"));
  EXPECT_THAT(error(model(piece("a", -1, 1) + piece("a", -2, 1), 1)), HasSubstr("appears twice"));
  EXPECT_THAT(error(model(piece("a", NAN, 1), 1)), HasSubstr("score that is not finite"));
  EXPECT_THAT(error(model(piece("<u>", 0, 2), 1)), HasSubstr("has 2 unknown pieces"));
  EXPECT_THAT(error(model(piece("a", 0, 5), 2)), HasSubstr("is unused, which is not supported"));
  EXPECT_THAT(error(model(piece("x", 0, 6), 1, integer(35, 1))),
              HasSubstr("has type BYTE, expected <0x00> to <0xFF>"));
  EXPECT_THAT(error(model(piece("<0x00>", 0, 6), 1, integer(35, 1))),
              HasSubstr("has 1 byte pieces, expected 256"));
  EXPECT_THAT(error(good + bytes(5, bytes(2, "abc"))), HasSubstr("denormalizer_spec has rules"));
  EXPECT_THAT(error(model(piece("a", -1, 1), 1, "", bytes(2, "abc"))),
              HasSubstr("precompiled_charsmap has 3 bytes"));
  const std::string trie("\x04\0\0\0\0\0\0\0", 8);
  EXPECT_THAT(error(model(piece("a", -1, 1), 1, "", bytes(2, trie + "\xe4\xbd"))),
              HasSubstr("precompiled_charsmap: the replacements are not UTF-8"));
}

// "ab c" is better than "a bc" by less than a float resolves once the running sum is large; then
// the division that is found first wins. A cache that kept one of them would be wrong; see
// Note [Margins] in unigram_model.cc.
TEST_F(SentencePiece, DivisionsFollowTheRoundingOfTheRunningSum) {
  const auto tokenizer = load_model(model(piece("\u2581", -1, 1) + piece("a", -3, 1) +
                                              piece("b", -9, 1) + piece("c", -4.00001f, 1) +
                                              piece("ab", -4, 1) + piece("bc", -5.00002f, 1),
                                          1));
  std::string text;
  for (int i = 0; i < 3000; ++i) text += "abc ";
  const std::vector<int32_t> ids = tokenizer->encode(text);
  ASSERT_EQ(ids.size(), 9000u);
  EXPECT_THAT(std::vector<int32_t>(ids.begin(), ids.begin() + 3), ElementsAre(2, 6, 5));
  EXPECT_THAT(std::vector<int32_t>(ids.end() - 3, ids.end()), ElementsAre(2, 3, 7));
  EXPECT_EQ(tokenizer->encode(text), ids);
}

TEST(Tiktoken, SpecialTokensAndPatterns) {
  const TemporaryFolder folder;
  // All bytes and "ab".
  std::string list = "[", lines;
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  for (int byte = 0; byte < 256; ++byte) {
    const std::string base64 = {kDigits[byte >> 2], kDigits[(byte & 3) << 4], '=', '='};
    list += cat("{\"rank\": ", byte, ", \"token_bytes\": \"", base64, "\", \"token_str\": \"\"},");
    lines += cat(base64, " ", byte, "\n");
  }
  list += R"({"rank": 256, "token_bytes": "YWI=", "token_str": "ab"}])";
  lines += "YWI= 256\n";
  TokenizerConfig config = config_of("TikTokenizer", folder.write("v.json", list));
  config.tiktoken_num_special_tokens = 8;
  config.vocab_size = 265;
  auto tokenizer = make_tokenizer(config);
  EXPECT_EQ(tokenizer->vocab_size(), 265);
  EXPECT_EQ(tokenizer->eod(), 2);
  EXPECT_EQ(tokenizer->pad(), 4);
  EXPECT_THAT(tokenizer->encode("ab<SPECIAL_7>b</s>"), ElementsAre(264, 7, 8 + 'b', 2));
  EXPECT_EQ(tokenizer->decode(std::vector<int32_t>{264, 2}), "ab</s>");
  config.vocab_size = 300;
  EXPECT_THAT(error_of([&] { make_tokenizer(config); }),
              HasSubstr("holds 257 tokens, but --vocab-size 300 with 8 special tokens needs 292\n"
                        "hint: --vocab-size 265"));
  config.special_tokens = {"<s>"};
  EXPECT_THAT(error_of([&] { make_tokenizer(config); }), HasSubstr("lacks \"<unk>\""));
  config.special_tokens.clear();
  config.tiktoken_num_special_tokens = 3;
  EXPECT_THAT(error_of([&] { make_tokenizer(config); }),
              HasSubstr("names 7 tokens, more than --tiktoken-num-special-tokens 3"));
  config.tiktoken_num_special_tokens = 400;
  EXPECT_THAT(error_of([&] { make_tokenizer(config); }),
              HasSubstr("--tiktoken-num-special-tokens 400 leaves no ids of --vocab-size 300"));
  config.tiktoken_pattern = "v3";
  EXPECT_THAT(error_of([&] { make_tokenizer(config); }), HasSubstr("--tiktoken-pattern is \"v3\""));

  config = config_of("TikTokenizer", folder.write("tokenizer.model", lines));
  tokenizer = make_tokenizer(config);
  EXPECT_EQ(tokenizer->vocab_size(), 257 + 256);
  EXPECT_EQ(tokenizer->bos(), 257);
  EXPECT_EQ(tokenizer->eod(), 258);
  EXPECT_EQ(tokenizer->token_to_id("<|eot_id|>"), 257 + 9);
  config.special_tokens = {"<|end|>"};
  EXPECT_THAT(make_tokenizer(config)->encode("ab<|end|>"), ElementsAre(256, 257));
  folder.write("tokenizer.model", "YWI= x\n");
  EXPECT_THAT(error_of([&] { make_tokenizer(config); }),
              HasSubstr("tokenizer.model: line 1 is \"YWI= x\", expected the base64 of a token"));
  config.tokenizer_model =
      folder.write("v.json", R"([{"rank": 0, "token_bytes": "?", "token_str": ""}])").string();
  config.special_tokens.clear();
  EXPECT_THAT(error_of([&] { make_tokenizer(config); }),
              HasSubstr("v.json: [0].token_bytes is not base64 of a token"));
  folder.write("v.json", R"([{"rank": 5, "token_bytes": "AA==", "token_str": ""}])");
  EXPECT_THAT(error_of([&] { make_tokenizer(config); }), HasSubstr("[0].rank is not 0"));
}

constexpr std::string_view kBert = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nhello\nHello\n##s\n,\ne\n";

TEST(BertVocabulary, CasesAndSpecialTokens) {
  const TemporaryFolder folder;
  TokenizerConfig config;
  config.tokenizer_type = "BertWordPieceLowerCase";
  config.vocab_file = folder.write("vocab.txt", kBert).string();
  config.special_tokens = {"<a>"};
  auto tokenizer = make_tokenizer(config);
  EXPECT_EQ(tokenizer->vocab_size(), 11);
  EXPECT_THAT(tokenizer->encode("Hellos, \u00c9 x[MASK]<a>"), ElementsAre(5, 7, 8, 9, 1, 4, 10));
  EXPECT_THAT(tokenizer->prefix_ids(), ElementsAre(2));
  EXPECT_THAT(tokenizer->suffix_ids(), ElementsAre(3));
  EXPECT_EQ(tokenizer->eod(), 3);
  EXPECT_EQ(tokenizer->pad(), 0);
  EXPECT_EQ(tokenizer->decode(std::vector<int32_t>{5, 7, 8}), "hellos,");
  config.tokenizer_type = "BertWordPieceCase";
  config.special_tokens.clear();
  tokenizer = make_tokenizer(config);
  EXPECT_EQ(tokenizer->vocab_size(), 110);
  EXPECT_THAT(tokenizer->encode("Hellos, \u00c9<extra_id_99>"), ElementsAre(6, 7, 8, 1, 109));
  config.special_tokens = {"<a>"};
  EXPECT_THAT(error_of([&] { make_tokenizer(config); }),
              HasSubstr("--tokenizer-special-tokens has no effect"));
  config.special_tokens.clear();
  folder.write("vocab.txt", std::string(kBert) + "e\n");
  EXPECT_THAT(error_of([&] { make_tokenizer(config); }),
              HasSubstr("vocab.txt: line 11: token \"e\" appears twice"));
  folder.write("vocab.txt", "[PAD]\n\n");
  EXPECT_THAT(error_of([&] { make_tokenizer(config); }), HasSubstr("vocab.txt: line 2 is empty"));
  folder.write("vocab.txt", "[PAD]\n[UNK]\n[SEP]\n");
  EXPECT_THAT(error_of([&] { make_tokenizer(config); }), HasSubstr("has no [CLS]"));
  folder.write("vocab.txt", "\xff\n");
  EXPECT_THAT(error_of([&] { make_tokenizer(config); }), HasSubstr("byte 0 is not UTF-8"));
}

TEST(Folders, EachKindIsFound) {
  const TemporaryFolder folder;
  const auto type = [&] { return find_tokenizer(folder.path()).tokenizer_type; };
  EXPECT_EQ(type(), "");
  EXPECT_THAT(error_of([&] { load(folder.path()); }),
              HasSubstr("the folder holds no tokenizer.json"));
  folder.write("vocab.txt", kBert);
  EXPECT_EQ(type(), "BertWordPieceLowerCase");
  EXPECT_EQ(load(folder.path())->vocab_size(), 10);
  folder.write("tokenizer_config.json", R"({"do_lower_case": false})");
  EXPECT_EQ(type(), "BertWordPieceCase");
  folder.write("vocab.json", R"({"a": 0})");
  folder.write("merges.txt", "");
  EXPECT_EQ(type(), "GPT2BPETokenizer");
  folder.write("tokenizer.model", "YQ== 0\n");
  EXPECT_EQ(type(), "TikTokenizer");
  folder.write("tokenizer.model", model(piece("a", -1, 1), 1));
  EXPECT_EQ(type(), "SentencePieceTokenizer");
  EXPECT_EQ(load(folder.path())->vocab_size(), 3);
  folder.write("tokenizer.json", "{}");
  EXPECT_EQ(type(), "HuggingFaceTokenizer");
}

}  // namespace
}  // namespace megatron
