// Mistral's tekken.json: ids of mistral-common, texts that spell special tokens, wrong files.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "megatron/tokenizers/rendered_text.h"
#include "testing.h"
#include "tests/unit/tekken_file.h"

namespace megatron {
namespace {

using testing::HasSubstr;

TEST(Tekken, IdsAreThoseOfMistralCommon) {
  const TemporaryFolder folder;
  const auto path = folder.write("tekken.json", tekken_file().dump());
  const auto tokenizer = load(folder.path()), of_file = load(path);
  EXPECT_EQ(find_tokenizer(folder.path()).tokenizer_model, path.string());
  EXPECT_EQ(tokenizer->fingerprint(), of_file->fingerprint());
  EXPECT_EQ(tokenizer->files(), std::vector{path});
  EXPECT_EQ(tokenizer->vocab_size(), 32 + 256 + 220);
  const nlohmann::json texts = tekken_golden()["texts"];
  for (const nlohmann::json& text : texts) {
    const std::string given = text["text"];
    const std::vector<int32_t> ids = tokenizer->encode(given);
    EXPECT_EQ(ids, text["ids"].get<std::vector<int32_t>>()) << given;
    EXPECT_EQ(tokenizer->decode(ids), given);
  }
  EXPECT_EQ(tokenizer->bos(), 1);
  EXPECT_EQ(tokenizer->eod(), 2);
  EXPECT_EQ(tokenizer->pad(), 11);
  EXPECT_EQ(tokenizer->prefix_ids(), std::vector<int32_t>{1});
  EXPECT_EQ(tokenizer->id_to_token(29), "<SPECIAL_29>");
  EXPECT_TRUE(tokenizer->is_special(31));
  EXPECT_FALSE(tokenizer->is_special(32));
  EXPECT_EQ(tokenizer->decode(std::vector<int32_t>{3, 32 + 'a', 2}, true), "a");
}

TEST(Tekken, OnlyATemplateWritesSpecialTokens) {
  const TemporaryFolder folder;
  nlohmann::json file = tekken_file();
  file["special_tokens"][20]["token_str"] = "[[INST]";  // holds another one
  const auto tokenizer = load(folder.write("tekken.json", file.dump()));
  EXPECT_TRUE(text_spells_no_special(*tokenizer));
  const std::string user = "[[INST]</s> [INST][AUDIO]";
  std::vector<int32_t> expected = tokenizer->encode(user);
  EXPECT_GT(*std::ranges::min_element(expected), 31);
  EXPECT_EQ(encode_rendered(*tokenizer, "[INST][AUDIO]</s>"), (std::vector<int32_t>{3, 24, 2}));
  const auto hidden = nlohmann::json::parse(hide_special_tokens(
      *tokenizer, nlohmann::json{{"a", {user, 1}}, {"[INST]", nullptr}}.dump()));
  EXPECT_FALSE(hidden.contains("[INST]"));
  expected.insert(expected.begin(), 3);
  expected.push_back(4);
  EXPECT_EQ(encode_rendered(*tokenizer, "[INST]" + hidden["a"][0].get<std::string>() + "[/INST]"),
            expected);
  // Of other tokenizers nothing changes.
  TokenizerConfig bytes;
  bytes.tokenizer_type = "ByteLevelTokenizer";
  EXPECT_EQ(hide_special_tokens(*make_tokenizer(bytes), "{[INST]"), "{[INST]");
}

TEST(Tekken, FilesUpToVersion7MayNameNoSpecialTokens) {
  const TemporaryFolder folder;
  nlohmann::json file = tekken_file();
  file.erase("special_tokens");
  const auto tokenizer = load(folder.write("tekken.json", file.dump()));
  EXPECT_EQ(tokenizer->token_to_id("[/SYSTEM_PROMPT]"), 18);
  EXPECT_EQ(tokenizer->id_to_token(24), "<SPECIAL_24>");
}

TEST(Tekken, WrongFilesAreNamed) {
  const TemporaryFolder folder;
  const auto error = [&](const std::function<void(nlohmann::json&)>& change) {
    nlohmann::json file = tekken_file();
    change(file);
    const auto path = folder.write("tekken.json", file.dump());
    const std::string message = error_of([&] { load(path); });
    EXPECT_THAT(message, HasSubstr(path.string() + ": "));
    return message.substr(std::min(message.size(), path.string().size() + 2));
  };
  using Json = nlohmann::json;
  EXPECT_EQ(error([](Json& f) { f["vocab"].erase(300); }),
            "vocab[300].rank is 301: rank 300 is missing");
  EXPECT_EQ(error([](Json& f) { f["vocab"][300]["rank"] = 299; }),
            "vocab[300].rank is 299, which an entry before it has, expected 300");
  EXPECT_EQ(error([](Json& f) { f["vocab"][300]["token_bytes"] = "a*b="; }),
            "vocab[300].token_bytes is not base64 of a token");
  EXPECT_EQ(error([](Json& f) { f["vocab"][65]["token_bytes"] = "Qg=="; }),
            "vocab[65].token_bytes is not the byte 65, which has that rank");
  EXPECT_THAT(
      error([](Json& f) { f["vocab"][300] = f["vocab"][299], f["vocab"][300]["rank"] = 300; }),
      HasSubstr("appears twice"));
  EXPECT_EQ(error([](Json& f) { f["config"]["default_vocab_size"] = 1000; }),
            "vocab has 477 tokens, expected 968: config.default_vocab_size 1000 without 32 special "
            "tokens");
  EXPECT_EQ(error([](Json& f) { f["config"]["default_vocab_size"] = 200; }),
            "config.default_vocab_size is 200, expected 32 special tokens and at least 256 bytes");
  EXPECT_EQ(error([](Json& f) { f["special_tokens"][5]["rank"] = 4; }),
            "special_tokens[5].rank is 4, which an entry before it has, expected 5");
  EXPECT_EQ(error([](Json& f) { f["special_tokens"].erase(5); }),
            "special_tokens[5].rank is 6: rank 5 is missing");
  EXPECT_THAT(error([](Json& f) { f["special_tokens"][5]["token_str"] = "<s>"; }),
              HasSubstr("\"<s>\" has id 5, but the same token has id 1 already"));
  EXPECT_EQ(error([](Json& f) { f["config"]["default_num_special_tokens"] = 20; }),
            "28 special tokens, more than config.default_num_special_tokens, 20");
  EXPECT_EQ(error([](Json& f) { f["special_tokens"][2]["token_str"] = "<end>"; }),
            "special_tokens: there is no </s>");
  EXPECT_EQ(error([](Json& f) { f["special_tokens"][20]["token_str"] = "["; }),
            "special_tokens[20].token_str is \"[\", expected more than a character, as in <pad>");
  EXPECT_EQ(error([](Json& f) { f["config"]["version"] = "7"; }),
            "config.version is \"7\", expected v3, v7, ...");
  EXPECT_EQ(error([](Json& f) { f["config"]["version"] = "v11", f.erase("special_tokens"); }),
            "no special_tokens, which files of version 11 have");
  EXPECT_EQ(error([](Json& f) { f.erase("vocab"); }), "has no \"vocab\"");
  EXPECT_THAT(error([](Json& f) { f["config"]["pattern"] = "(a"; }), HasSubstr("config.pattern"));
}

}  // namespace
}  // namespace megatron
