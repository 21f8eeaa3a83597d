#include "megatron/tokenizers/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <random>

#include "megatron/tokenizers/tokenizer_config.h"
#include "testing.h"

namespace megatron {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TokenizerConfig config_of(std::string type) {
  TokenizerConfig config;
  config.tokenizer_type = std::move(type);
  return config;
}

TEST(ByteLevelTokenizer, BytesAreIds) {
  const auto tokenizer = make_tokenizer(config_of("ByteLevelTokenizer"));
  EXPECT_EQ(tokenizer->vocab_size(), 257);
  EXPECT_EQ(tokenizer->eod(), 256);
  EXPECT_FALSE(tokenizer->bos() || tokenizer->pad());
  EXPECT_THAT(tokenizer->encode("a\xc3\xa9\xff"), ElementsAre(97, 0xc3, 0xa9, 0xff));
  EXPECT_EQ(tokenizer->encode("<|endoftext|>").size(), 13u);
  EXPECT_EQ(tokenizer->decode(std::vector<int32_t>{97, 0xc3, 0xa9, 256}), "a\xc3\xa9<|endoftext|>");
  EXPECT_EQ(tokenizer->decode(std::vector<int32_t>{97, 256}, true), "a");
  EXPECT_EQ(tokenizer->decode(std::vector<int32_t>{0xff}), "\xef\xbf\xbd");
  EXPECT_EQ(tokenizer->token_to_id("<|endoftext|>"), 256);
  EXPECT_EQ(tokenizer->token_to_id("a"), 97);
  EXPECT_EQ(tokenizer->token_to_id("ab"), std::nullopt);
  EXPECT_THAT(error_of([&] { tokenizer->token_bytes(257); }),
              HasSubstr("token id 257 is outside the vocabulary of 257"));
}

TEST(NullTokenizer, ReadsAndWritesIds) {
  TokenizerConfig config = config_of("NullTokenizer");
  config.vocab_size = 100;
  const auto tokenizer = make_tokenizer(config);
  EXPECT_EQ(tokenizer->vocab_size(), 100);
  EXPECT_EQ(tokenizer->eod(), 99);
  EXPECT_EQ(tokenizer->pad(), std::nullopt);
  EXPECT_THAT(tokenizer->encode(" 1 22\n3\t"), ElementsAre(1, 22, 3));
  EXPECT_EQ(tokenizer->decode(std::vector<int32_t>{1, 22, 99}), "1 22 99");
  EXPECT_EQ(tokenizer->decode(std::vector<int32_t>{1, 22, 99}, true), "1 22");
  EXPECT_EQ(tokenizer->decode(std::vector<int32_t>{}), "");
  EXPECT_EQ(tokenizer->token_to_id("99"), 99);
  for (const char* text : {"1 x", "100", "-1", "1.5", "99999999999999999999"}) {
    EXPECT_THAT(error_of([&] { tokenizer->encode(text); }),
                HasSubstr("expected decimal ids from 0 to 99"))
        << text;
  }
  config.null_tokenizer_eod_id = 5;
  config.null_tokenizer_pad_id = 6;
  const auto other = make_tokenizer(config);
  EXPECT_EQ(other->eod(), 5);
  EXPECT_EQ(other->pad(), 6);
  EXPECT_NE(other->fingerprint(), tokenizer->fingerprint());
}

TEST(TokenizerConfig, ReportsAllViolations) {
  EXPECT_THAT(error_of([] { make_tokenizer(config_of("")); }),
              HasSubstr("--tokenizer-type is not given"));
  EXPECT_THAT(error_of([] { make_tokenizer(config_of("NullTokenizer")); }),
              HasSubstr("needs --vocab-size"));
  EXPECT_THAT(error_of([] { make_tokenizer(config_of("HuggingFaceTokenizer")); }),
              HasSubstr("needs --tokenizer-model"));
  EXPECT_THAT(error_of([] { make_tokenizer(config_of("BertWordPieceCase")); }),
              HasSubstr("BertWordPieceCase needs --vocab-file"));
  EXPECT_THAT(error_of([] { make_tokenizer(config_of("Llama2Tokenizer")); }),
              HasSubstr("Llama2Tokenizer needs --tokenizer-model"));
  EXPECT_THAT(error_of([] { make_tokenizer(config_of("MultimodalTokenizer")); }),
              HasSubstr("multimodal models are not built"));
  EXPECT_THAT(error_of([] { make_tokenizer(config_of("Gpt2")); }), HasSubstr("no such tokenizer"));
  TokenizerConfig config = config_of("GPT2BPETokenizer");
  config.vocab_extra_ids = 3;
  config.make_vocab_size_divisible_by = 0;
  config.null_tokenizer_eod_id = 1;
  const std::string message = error_of([&] { make_tokenizer(config); });
  EXPECT_THAT(message, HasSubstr("--vocab-file"));
  EXPECT_THAT(message, HasSubstr("--merge-file"));
  EXPECT_THAT(message, HasSubstr("--vocab-extra-ids 3 has no effect"));
  EXPECT_THAT(message, HasSubstr("--make-vocab-size-divisible-by is 0"));
  EXPECT_THAT(message, HasSubstr("have no effect without NullTokenizer"));
  config = config_of("NullTokenizer");
  config.vocab_size = 10;
  config.null_tokenizer_eod_id = 10;
  config.null_tokenizer_pad_id = -2;
  EXPECT_THAT(error_of([&] { make_tokenizer(config); }),
              HasSubstr("--null-tokenizer-eod-id 10 is outside"));
  EXPECT_THAT(error_of([&] { make_tokenizer(config); }),
              HasSubstr("--null-tokenizer-pad-id -2 is outside"));
}

TEST(PaddedVocabSize, RoundsUp) {
  EXPECT_EQ(padded_vocab_size(50257, 128, 1), 50304);
  EXPECT_EQ(padded_vocab_size(50257, 128, 8), 51200);
  EXPECT_EQ(padded_vocab_size(128, 128, 1), 128);
  TokenizerConfig config;
  EXPECT_EQ(padded_vocab_size(config, 257, 2), 512);
  config.pad_vocab_size = false;
  EXPECT_EQ(padded_vocab_size(config, 257, 2), 257);
  config.padded_vocab_size = 300;
  EXPECT_EQ(padded_vocab_size(config, 257, 2), 300);
  config.padded_vocab_size = 256;
  EXPECT_THROW(padded_vocab_size(config, 257, 2), UsageError);
}

TEST(ModelVocabSize, MayExceedTheTokenizers) {
  TokenizerConfig config;
  config.tokenizer_type = "ByteLevelTokenizer";
  const std::unique_ptr<Tokenizer> tokenizer = make_tokenizer(config);
  EXPECT_EQ(model_vocab_size(config, *tokenizer), 257);
  config.vocab_size = 320;
  EXPECT_EQ(model_vocab_size(config, *tokenizer), 320);
  config.vocab_size = 256;
  EXPECT_EQ(error_of([&] { model_vocab_size(config, *tokenizer); }),
            "--vocab-size 256 is below the 257 ids of the tokenizer");
}

TEST(BpeTokenizer, Gpt2FilesHaveEndOfText) {
  const auto tokenizer = load_gpt2();
  EXPECT_EQ(tokenizer->vocab_size(), 701);  // the token is not in vocab.json and goes behind it
  EXPECT_EQ(tokenizer->eod(), 700);
  EXPECT_TRUE(tokenizer->is_special(700));
  EXPECT_FALSE(tokenizer->is_special(5) || tokenizer->is_special(-1) || tokenizer->is_special(701));
  EXPECT_EQ(tokenizer->files().size(), 2u);
  const std::vector<int32_t> ids = tokenizer->encode("one<|endoftext|>two");
  EXPECT_THAT(ids, testing::Contains(700));
  EXPECT_EQ(tokenizer->decode(ids), "one<|endoftext|>two");
  EXPECT_EQ(tokenizer->decode(ids, true), "onetwo");
  EXPECT_EQ(tokenizer->token_to_id("\xc4\xa0t"),
            tokenizer->encode(" t").at(0));  // printable spelling
  for (const int32_t id : {-1, 701, 1 << 30}) {
    EXPECT_THAT(error_of([&] { tokenizer->decode(std::vector<int32_t>{id}); }),
                HasSubstr("outside the vocabulary of 701"));
  }
}

TEST(BpeTokenizer, BrokenUtf8IsReplacedAndCounted) {
  const auto tokenizer = load(golden_dir() / "llama3.json");
  // The cuts are Python's: bytes(...).decode("utf-8", "replace").
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"a\xff"
       "b",
       "a\ufffdb"},
      {"\xe4\xbd", "\ufffd"},
      {"\xe4\xbd(", "\ufffd("},
      {"\xed\xa0\x80", "\ufffd\ufffd\ufffd"},
      {"\xf0\x9f\x98", "\ufffd"},
      {"\xc0\x80", "\ufffd\ufffd"},
      {"\xf4\x90\x80\x80", "\ufffd\ufffd\ufffd\ufffd"},
      {"\x80\xe2\x82\xac", "\ufffd\u20ac"},
      {"\xf8\x88\x80\x80\x80", "\ufffd\ufffd\ufffd\ufffd\ufffd"}};
  uint64_t replaced = 0;
  for (const auto& [broken, repaired] : cases) {
    EXPECT_EQ(tokenizer->encode(broken), tokenizer->encode(repaired));
    EXPECT_EQ(tokenizer->decode(tokenizer->encode(broken)), repaired);
    for (size_t at = 0; (at = repaired.find("\ufffd", at)) != repaired.npos; ++at) ++replaced;
  }
  EXPECT_EQ(tokenizer->num_replaced(), 2 * replaced);
}

TEST(BpeTokenizer, RandomBytesRoundTripAsRepaired) {
  const auto tokenizer = load_gpt2();
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    std::string bytes(random() % 200, '\0');
    for (char& c : bytes) c = static_cast<char>(random() % (round % 2 == 0 ? 256 : 128));
    const std::vector<int32_t> ids = tokenizer->encode(bytes);
    const std::string text = tokenizer->decode(ids);
    EXPECT_EQ(tokenizer->encode(text), ids);
    if (round % 2 != 0) {
      EXPECT_EQ(text, bytes);
    }
  }
}

// A quadratic merge or scan would take minutes.
TEST(BpeTokenizer, LongWordsTakeLinearTime) {
  const auto start = std::chrono::steady_clock::now();
  for (const char* name : {"llama3", "qwen2", "o200k"}) {
    const auto tokenizer = load(golden_dir() / (std::string(name) + ".json"));
    for (const char* part :
         {"a", "ab", " ", "\n", "'", "1", "\xe4\xbd\xa0", "e\xcc\x81", "\xcc\x81\xcc\xa3", " \n"}) {
      std::string text;
      while (text.size() < 200'000) text += part;
      const std::vector<int32_t> ids = tokenizer->encode(text);
      if (std::string_view(name) != "qwen2") {
        EXPECT_EQ(tokenizer->decode(ids), text);
      }
    }
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(60));
}

TEST(StreamDecoder, EmitsWholeCharacters) {
  const auto tokenizer = make_tokenizer(config_of("ByteLevelTokenizer"));
  StreamDecoder decoder(*tokenizer);
  EXPECT_EQ(decoder.push('a'), "a");
  EXPECT_EQ(decoder.push(0xf0), "");
  EXPECT_EQ(decoder.push(0x9f), "");
  EXPECT_EQ(decoder.push(0x98), "");
  EXPECT_EQ(decoder.push(0x80), "\U0001F600");
  EXPECT_EQ(decoder.push(0xc3), "");
  EXPECT_EQ(decoder.push('b'), "\ufffdb");
  EXPECT_EQ(decoder.push(0xff), "\ufffd");
  EXPECT_EQ(decoder.push(0xe4), "");
  EXPECT_EQ(decoder.finish(), "\ufffd");
  EXPECT_EQ(decoder.finish(), "");
}

TEST(StreamDecoder, JoinsToDecodedText) {
  const auto tokenizer = load(golden_dir() / "llama3.json");
  const std::string text =
      "caf\u00e9 \u4f60\u597d \U0001F468\u200d\U0001F469 na\u00efve \xff<|endoftext|>";
  const std::vector<int32_t> ids = tokenizer->encode(text);
  StreamDecoder decoder(*tokenizer);
  std::string joined;
  for (const int32_t id : ids) joined += decoder.push(id);
  EXPECT_EQ(joined + decoder.finish(), tokenizer->decode(ids));
}

// transformers 5 reads these files so; see tests/golden/tokenizers/check_config.py.
TEST(TokenizerConfigJson, NamesClassAndTokens) {
  const TemporaryFolder folder;
  EXPECT_EQ(tokenizer_config_json(folder.path(), 128), "") << "no tokenizer";
  std::filesystem::copy_file(golden_dir() / "llama3.json", folder / "tokenizer.json");
  EXPECT_EQ(tokenizer_config_json(folder.path(), 128), R"({
  "tokenizer_class": "PreTrainedTokenizerFast",
  "eos_token": "<|endoftext|>",
  "model_max_length": 128,
  "clean_up_tokenization_spaces": false
}
)");
  EXPECT_EQ(tokenizer_config_json(folder.path(), std::nullopt,
                                  R"({"chat_template": "x", "tokenizer_class": "Own"})"),
            R"({
  "chat_template": "x",
  "tokenizer_class": "Own",
  "eos_token": "<|endoftext|>",
  "clean_up_tokenization_spaces": false
}
)");
  EXPECT_EQ(error_of([&] { tokenizer_config_json(folder.path(), 128, "[]"); }),
            (folder / "tokenizer_config.json").string() + ": is no JSON object");
  // What it says is what this program reads.
  folder.write("tokenizer_config.json", tokenizer_config_json(folder.path(), 128));
  const auto before = load(golden_dir() / "llama3.json"), after = load(folder.path());
  EXPECT_EQ(after->eod(), before->eod());
  EXPECT_EQ(after->bos(), before->bos());
  EXPECT_EQ(after->fingerprint(), before->fingerprint());
}

TEST(TokenizerConfigJson, OfGpt2Files) {
  const TemporaryFolder folder;
  for (const char* name : {"vocab.json", "merges.txt"})
    std::filesystem::copy_file(golden_dir() / "gpt2" / name, folder / name);
  EXPECT_NE(
      tokenizer_config_json(folder.path(), 128).find("\"tokenizer_class\": \"GPT2Tokenizer\""),
      std::string::npos);
}

}  // namespace
}  // namespace megatron
