// Errors in tokenizer files name file and key; nothing is read out of bounds.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <random>

#include "testing.h"

namespace megatron {
namespace {

using nlohmann::json;
using testing::HasSubstr;

json good() { return json::parse(read_file(golden_dir() / "llama3.json")); }

// The message when the good file, changed, is loaded.
std::string error_after(const std::function<void(json&)>& change) {
  const TemporaryFolder folder;
  json value = good();
  change(value);
  const auto path = folder.write("tokenizer.json", value.dump());
  const std::string message = error_of([&] { load(path); });
  return message.starts_with(path.string()) ? message.substr(path.string().size()) : message;
}

TEST(TokenizerJson, UnknownComponentsAreRefusedByName) {
  const auto refused = [](const char* key, json component) {
    return error_after([&](json& value) { value[key] = component; });
  };
  EXPECT_THAT(refused("normalizer", {{"type", "Sequence"},
                                     {"normalizers", {{{"type", "NFC"}}, {{"type", "Stripe"}}}}}),
              HasSubstr(": normalizer.normalizers[1]: type \"Stripe\" is not supported"));
  EXPECT_THAT(refused("pre_tokenizer", {{"type", "UnicodeScripts"}}),
              HasSubstr(": pre_tokenizer: type \"UnicodeScripts\" is not supported"));
  EXPECT_THAT(refused("post_processor", {{"type", "Other"}}),
              HasSubstr(": post_processor: type \"Other\""));
  EXPECT_THAT(refused("decoder", {{"type", "CTC"}}), HasSubstr(": decoder: type \"CTC\""));
  EXPECT_THAT(refused("version", "2.0"), HasSubstr(": version is \"2.0\""));
  EXPECT_THAT(error_after([](json& v) { v["model"]["type"] = "Other"; }),
              HasSubstr(": model: type \"Other\""));
  EXPECT_THAT(error_after([](json& v) { v["model"]["dropout"] = 0.1; }),
              HasSubstr(": model.dropout is not supported"));
}

TEST(TokenizerJson, WrongValuesAreNamed) {
  EXPECT_THAT(error_after([](json& v) { v.erase("model"); }), HasSubstr(": has no \"model\""));
  EXPECT_THAT(error_after([](json& v) { v["model"].erase("merges"); }),
              HasSubstr(": model has no \"merges\""));
  EXPECT_THAT(error_after([](json& v) { v["model"]["vocab"] = 3; }),
              HasSubstr(": model.vocab is a number, expected an object"));
  EXPECT_THAT(error_after([](json& v) { v["model"]["vocab"]["a"] = "x"; }),
              HasSubstr(": model.vocab[\"a\"] is a string, expected an integer"));
  EXPECT_THAT(error_after([](json& v) { v["model"]["vocab"]["a"] = -1; }),
              HasSubstr(": model.vocab[\"a\"] is -1"));
  EXPECT_THAT(error_after([](json& v) { v["model"]["vocab"]["a"] = 4000000000; }),
              HasSubstr("is 4000000000, expected a token id"));
  EXPECT_THAT(error_after([](json& v) { v["model"]["vocab"]["a"] = v["model"]["vocab"]["b"]; }),
              HasSubstr("is given to two tokens"));
  EXPECT_THAT(error_after([](json& v) { v["model"]["merges"][3] = 1; }),
              HasSubstr(": model.merges[3] is a number"));
  EXPECT_THAT(error_after([](json& v) { v["model"]["merges"][3] = "ab"; }),
              HasSubstr(": model.merges[3] is \"ab\""));
  EXPECT_THAT(error_after([](json& v) { v["model"]["merges"][3] = {"a", 1}; }),
              HasSubstr(": model.merges[3][1] is a number"));
  EXPECT_THAT(error_after([](json& v) { v["model"]["merges"][3] = {"zz", "q"}; }),
              HasSubstr(": model.merges: merge 3 (\"zz\", \"q\") needs the token \"zz\", which the "
                        "vocabulary lacks"));
  EXPECT_THAT(error_after([](json& v) { v["added_tokens"][1]["id"] = 5; }),
              HasSubstr(": added_tokens[1]"));
  EXPECT_THAT(error_after([](json& v) { v["added_tokens"][1]["special"] = 5; }),
              HasSubstr(": added_tokens[1].special is a number, expected a boolean"));
  EXPECT_THAT(error_after([](json& v) { v["added_tokens"].push_back(v["added_tokens"][0]); }),
              HasSubstr("appears twice"));
  EXPECT_THAT(
      error_after([](json& v) { v["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "X"; }),
      HasSubstr("pretokenizers[0].behavior is \"X\""));
  EXPECT_THAT(error_after([](json& v) {
                v["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {{"Regex", "("}};
              }),
              HasSubstr("regular expression \"(\" cannot be compiled"));
  EXPECT_THAT(error_after([](json& v) {
                v["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {{"Regex", "\\h+"}};
              }),
              HasSubstr("\\h is not supported"));
  EXPECT_THAT(error_after([](json& v) {
                v["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {{"Regex", "[a&&b]"}};
              }),
              HasSubstr("&& in a character class"));
}

// The message when a component of the good file is replaced.
std::string error_with(const char* key, const json& component) {
  return error_after([&](json& value) { value[key] = component; });
}

TEST(TokenizerJson, WrongPartsOfComponentsAreNamed) {
  EXPECT_THAT(error_with("normalizer", {{"type", "Replace"}, {"content", "x"}}),
              HasSubstr(": normalizer has no \"pattern\""));
  EXPECT_THAT(error_with("normalizer", {{"type", "Replace"}, {"pattern", {{"String", ""}}}}),
              HasSubstr(": normalizer.pattern is empty"));
  EXPECT_THAT(error_with("normalizer", {{"type", "Precompiled"}, {"precompiled_charsmap", "A!=="}}),
              HasSubstr(": normalizer.precompiled_charsmap is not base64"));
  EXPECT_THAT(error_with("normalizer", {{"type", "Precompiled"}, {"precompiled_charsmap", "AAAA"}}),
              HasSubstr(": normalizer.precompiled_charsmap has 3 bytes"));
  EXPECT_THAT(
      error_with("normalizer", {{"type", "Precompiled"}, {"precompiled_charsmap", "/////wAAAAA="}}),
      HasSubstr("says that its trie has 4294967295 bytes, but 4 follow"));
  EXPECT_THAT(error_with("pre_tokenizer", {{"type", "Metaspace"}, {"replacement", "ab"}}),
              HasSubstr(": pre_tokenizer.replacement is \"ab\", expected one character"));
  EXPECT_THAT(error_with("pre_tokenizer", {{"type", "Metaspace"}, {"prepend_scheme", "x"}}),
              HasSubstr("prepend_scheme is \"x\", expected always, first or never"));
  EXPECT_THAT(error_with("pre_tokenizer", {{"type", "CharDelimiterSplit"}, {"delimiter", ""}}),
              HasSubstr("delimiter is \"\", expected one character"));
  const json twice = {{"Sequence", {{"id", "A"}, {"type_id", 0}}}};
  EXPECT_THAT(error_with("post_processor", {{"type", "TemplateProcessing"},
                                            {"single", {twice, twice}},
                                            {"special_tokens", json::object()}}),
              HasSubstr(": post_processor.single[1]: the text appears twice"));
  const json special = {{"SpecialToken", {{"id", "<q>"}, {"type_id", 0}}}};
  EXPECT_THAT(error_with("post_processor", {{"type", "TemplateProcessing"},
                                            {"single", {special, twice}},
                                            {"special_tokens", json::object()}}),
              HasSubstr("\"<q>\" is not among special_tokens"));
  EXPECT_THAT(error_with("decoder", {{"type", "Strip"}, {"content", " "}, {"start", -1}}),
              HasSubstr(": decoder.start is -1"));
  EXPECT_THAT(error_with("model", {{"type", "WordPiece"}, {"vocab", {{"a", 0}}}}),
              HasSubstr("has no unk_token"));
  EXPECT_THAT(error_with("model", {{"type", "Unigram"}, {"vocab", json::array({"a"})}}),
              HasSubstr(": model.vocab[0] is a string, expected [token, score]"));
  EXPECT_THAT(error_with("model", {{"type", "Unigram"},
                                   {"unk_id", 3},
                                   {"vocab", json::array({json::array({"a", 0.5})})}}),
              HasSubstr(": model.unk_id is 3"));
}

TEST(TokenizerJson, PostProcessorsSayWhatGoesAround) {
  const TemporaryFolder folder;
  json value = good();
  value["post_processor"] = {
      {"type", "Sequence"},
      {"processors",
       {{{"type", "ByteLevel"}},
        {{"type", "TemplateProcessing"},
         {"single",
          {{{"SpecialToken", {{"id", "<r>"}, {"type_id", 0}}}},
           {{"Sequence", {{"id", "A"}, {"type_id", 0}}}},
           {{"SpecialToken", {{"id", "<mask>"}, {"type_id", 0}}}}}},
         {"special_tokens",
          {{"<r>", {{"id", "<r>"}, {"ids", {0}}, {"tokens", {"<r>"}}}},
           {"<mask>", {{"id", "<mask>"}, {"ids", {0}}, {"tokens", {"<mask>"}}}}}}}}}};
  folder.write("tokenizer.json", value.dump());
  auto tokenizer = load(folder.path());
  EXPECT_THAT(tokenizer->prefix_ids(), testing::ElementsAre(*tokenizer->token_to_id("<r>")));
  EXPECT_THAT(tokenizer->suffix_ids(), testing::ElementsAre(*tokenizer->token_to_id("<mask>")));
  folder.write(
      "tokenizer_config.json",
      R"({"bos_token": "<r>", "eos_token": "<lr>", "add_bos_token": false, "add_eos_token": true})");
  tokenizer = load(folder.path());
  EXPECT_TRUE(tokenizer->prefix_ids().empty());
  EXPECT_THAT(tokenizer->suffix_ids(), testing::ElementsAre(*tokenizer->token_to_id("<mask>"),
                                                            *tokenizer->token_to_id("<lr>")));
}

TEST(TokenizerJson, DuplicateTokensAreRefused) {
  const TemporaryFolder folder;
  std::string text = good().dump();
  const size_t vocab = text.find("\"vocab\":{") + 9;
  text.insert(vocab, "\"a\":0,\"a\":1,");
  const auto path = folder.write("tokenizer.json", text);
  EXPECT_THAT(error_of([&] { load(path); }), HasSubstr("token \"a\" appears twice"));
}

TEST(TokenizerJson, MissingAndCutFiles) {
  const TemporaryFolder folder;
  EXPECT_THAT(error_of([&] { load(folder / "none.json"); }), HasSubstr("none.json"));
  EXPECT_THAT(error_of([&] { load(folder.path()); }), HasSubstr("holds no tokenizer.json"));
  const std::string text = good().dump();
  for (size_t size = 0; size < text.size(); size += 997) {
    const auto path = folder.write("tokenizer.json", text.substr(0, size));
    EXPECT_THAT(error_of([&] { load(path); }), HasSubstr(path.string() + ": not JSON")) << size;
  }
  EXPECT_THAT(error_of([&] { load(folder.write("tokenizer.json", "[1]")); }),
              HasSubstr("holds an array, expected an object"));
}

// Damaged files load or fail with an Error; what loads can encode or says why not.
TEST(TokenizerJson, DamagedBytesNeverCrash) {
  const TemporaryFolder folder;
  const std::string text = good().dump();
  std::mt19937 random(7);
  int loaded = 0;
  for (int round = 0; round < 400; ++round) {
    std::string damaged = text;
    for (int i = 0; i <= round % 3; ++i)
      damaged[random() % damaged.size()] = "0129{}[]\",:aZ.x-"[random() % 16];
    try {
      const auto tokenizer = load(folder.write("tokenizer.json", damaged));
      ++loaded;
      tokenizer->decode(tokenizer->encode(
          "The quick brown fox. \xe4\xbd\xa0\xe5\xa5\xbd <|endoftext|> word 123"));
    } catch (const Error&) {
    }
  }
  EXPECT_GT(loaded, 0);
}

TEST(TokenizerJson, MergesAsStringsAndAsPairsAreTheSame) {
  const TemporaryFolder folder;
  json value = good();
  for (auto& merge : value["model"]["merges"]) {
    merge = merge.is_array() ? json(merge[0].get<std::string>() + " " + merge[1].get<std::string>())
                             : merge;
  }
  const auto other = load(folder.write("tokenizer.json", value.dump()));
  EXPECT_EQ(other->fingerprint(), load(golden_dir() / "llama3.json")->fingerprint());
}

TEST(TokenizerJson, FingerprintFollowsMeaning) {
  const TemporaryFolder folder;
  const std::string before = load(golden_dir() / "llama3.json")->fingerprint();
  json value = good();
  EXPECT_EQ(load(folder.write("tokenizer.json", value.dump(3)))->fingerprint(), before);
  value["model"]["ignore_merges"] = false;
  EXPECT_NE(load(folder.write("tokenizer.json", value.dump()))->fingerprint(), before);
  value = good();
  std::swap(value["model"]["merges"][0], value["model"]["merges"][1]);
  EXPECT_NE(load(folder.write("tokenizer.json", value.dump()))->fingerprint(), before);
  value = good();
  value["added_tokens"][1]["lstrip"] = !value["added_tokens"][1]["lstrip"].get<bool>();
  EXPECT_NE(load(folder.write("tokenizer.json", value.dump()))->fingerprint(), before);
}

TEST(TokenizerJson, SpecialNamesComeFromTheConfigBeside) {
  const TemporaryFolder folder;
  folder.write("tokenizer.json", good().dump());
  EXPECT_EQ(load(folder.path())->eod(), load(folder.path())->token_to_id("<|endoftext|>"));
  folder.write(
      "tokenizer_config.json",
      R"({"model_max_length": 1000000000000000019884624838656, "eos_token": {"content": "<mask>"}, "bos_token": "<r>", "pad_token": null})");
  const auto tokenizer = load(folder.path());
  EXPECT_EQ(tokenizer->eod(), tokenizer->token_to_id("<mask>"));
  EXPECT_EQ(tokenizer->bos(), tokenizer->token_to_id("<r>"));
  EXPECT_EQ(tokenizer->pad(), std::nullopt);
  EXPECT_EQ(tokenizer->files().size(), 2u);
  folder.write("tokenizer_config.json", R"({"eos_token": "<nope>"})");
  EXPECT_THAT(error_of([&] { load(folder.path()); }),
              HasSubstr("token \"<nope>\" is not in the vocabulary"));
}

TEST(TokenizerJson, BytesThatTheVocabularyLacks) {
  const TemporaryFolder folder;
  json value = good();
  value["model"]["merges"] = json::array();
  value["model"]["vocab"] = {{"a", 0}, {"b", 1}, {"?", 2}};
  value["added_tokens"] = json::array();
  auto tokenizer = load(folder.write("tokenizer.json", value.dump()));
  EXPECT_THAT(error_of([&] { tokenizer->encode("abc"); }), HasSubstr("no token for byte 99"));
  value["model"]["unk_token"] = "?";
  tokenizer = load(folder.write("tokenizer.json", value.dump()));
  EXPECT_THAT(tokenizer->encode("accb"), testing::ElementsAre(0, 2, 2, 1));
  value["model"]["fuse_unk"] = true;
  tokenizer = load(folder.write("tokenizer.json", value.dump()));
  EXPECT_THAT(tokenizer->encode("accb"), testing::ElementsAre(0, 2, 1));
}

TEST(Gpt2Files, MergesAreCheckedByLine) {
  const TemporaryFolder folder;
  TokenizerConfig config;
  config.tokenizer_type = "GPT2BPETokenizer";
  config.vocab_file = folder.write("vocab.json", R"({"a": 0, "b": 1, "ab": 2})").string();
  config.merge_file = folder.write("merges.txt", "#version: 0.2\r\na b\r\n\n").string();
  EXPECT_THAT(make_tokenizer(config)->encode("ab"), testing::ElementsAre(2));
  folder.write("merges.txt", "#version: 0.2\na b\nab\n");
  EXPECT_THAT(error_of([&] { make_tokenizer(config); }), HasSubstr("merges.txt: line 3 is \"ab\""));
  folder.write("merges.txt", "a c\n");
  EXPECT_THAT(error_of([&] { make_tokenizer(config); }), HasSubstr("needs the token \"c\""));
  folder.write("merges.txt", "a \xff\n");
  EXPECT_THAT(error_of([&] { make_tokenizer(config); }), HasSubstr("byte 2 is not UTF-8"));
}

}  // namespace
}  // namespace megatron
