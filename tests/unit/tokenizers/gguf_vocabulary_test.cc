// Vocabularies of GGUF files: the tables of known tokenizers, given as such a file has them, encode
// as those do.
#include "megatron/tokenizers/gguf_vocabulary.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "megatron/tokenizers/detail/sentencepiece_file.h"
#include "testing.h"

namespace megatron {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

GgufVocabulary empty_vocabulary() {
  GgufVocabulary v;
  v.name = "m.gguf";
  v.place = [](std::string_view key) { return cat("m.gguf: key ", key); };
  return v;
}

// What llama.cpp's converter writes of a byte-level tokenizer.json.
GgufVocabulary vocabulary_of_json(const nlohmann::json& json, const std::string& pre) {
  GgufVocabulary v = empty_vocabulary();
  v.model = "gpt2";
  v.pre = pre;
  size_t size = json["model"]["vocab"].size();
  for (const auto& token : json["added_tokens"])
    size = std::max(size, token["id"].get<size_t>() + 1);
  v.tokens.resize(size);
  v.types.assign(size, 1);
  for (const auto& [token, id] : json["model"]["vocab"].items()) v.tokens[id] = token;
  for (const auto& token : json["added_tokens"]) {
    v.tokens[token["id"]] = token["content"];
    v.types[token["id"]] = token["special"] ? 3 : 4;
  }
  for (size_t id = 0; id < size; ++id) {
    if (!v.tokens[id].empty()) continue;
    v.tokens[id] = cat("[PAD", id, "]");
    v.types[id] = 5;
  }
  for (const auto& merge : json["model"]["merges"])
    v.merges.push_back(merge.is_string()
                           ? merge.get<std::string>()
                           : cat(merge[0].get<std::string>(), " ", merge[1].get<std::string>()));
  return v;
}

// Of pieces with scores.
GgufVocabulary vocabulary_of_pieces(const std::filesystem::path& path) {
  const SentencePieceFile file = read_sentencepiece_file(path);
  GgufVocabulary v = empty_vocabulary();
  v.model = "llama";
  for (const SentencePieceFile::Piece& piece : file.pieces) {
    v.tokens.push_back(piece.text);
    v.scores.push_back(static_cast<double>(piece.score));
    v.types.push_back(static_cast<int64_t>(piece.type));
  }
  v.add_space_prefix = file.add_dummy_prefix;
  return v;
}

std::vector<std::string> documents() {
  std::ifstream in(golden_dir() / "documents.jsonl");
  std::vector<std::string> texts;
  for (std::string line; std::getline(in, line);)
    texts.push_back(nlohmann::json::parse(line).at("text").get<std::string>());
  return texts;
}

// Their ids were compared with those of the package (golden_test.cc), so that equality here is
// equality with it.
void expect_equal_ids(const Tokenizer& ours, const Tokenizer& theirs, const std::string& what) {
  size_t compared = 0;
  for (const std::string& text : documents()) {
    const std::vector<int32_t> ids = theirs.encode(text);
    EXPECT_EQ(ours.encode(text), ids) << what << ": " << text.substr(0, 100);
    EXPECT_EQ(ours.decode(ids), theirs.decode(ids)) << what;
    ++compared;
  }
  EXPECT_GT(compared, 80u);
}

TEST(GgufVocabularies, OfByteLevelTokenizersEncodeAsTheirTokenizerJson) {
  const std::pair<const char*, const char*> kCases[] = {{"llama3", "llama-bpe"},
                                                        {"qwen2", "qwen2"},
                                                        {"digits", "smollm"},
                                                        {"o200k", "gpt-4o"},
                                                        {"deepseek", "deepseek-v3"}};
  for (const auto& [name, pre] : kCases) {
    const auto path = golden_dir() / cat(name, ".json");
    auto json = nlohmann::json::parse(read_file(path));
    for (auto& token : json["added_tokens"])  // what such files cannot say
      for (const char* flag : {"single_word", "lstrip", "rstrip", "normalized"})
        token[flag] = false;
    const TokenizerTexts texts = gguf_tokenizer_texts(vocabulary_of_json(json, pre));
    expect_equal_ids(*make_tokenizer(texts),
                     *make_tokenizer(TokenizerTexts{path.string(), json.dump(), ""}), name);
  }
}

TEST(GgufVocabularies, OfPiecesEncodeAsSentencePiece) {
  TokenizerConfig config;
  config.tokenizer_type = "SentencePieceTokenizer";
  config.tokenizer_model = (golden_dir() / "kinds/sp_llama.model").string();
  const auto theirs = make_tokenizer(config);
  const auto ours = make_tokenizer(
      gguf_tokenizer_texts(vocabulary_of_pieces(golden_dir() / "kinds/sp_llama.model")));
  size_t compared = 0;
  for (const std::string& text : documents()) {
    // SentencePiece has no added tokens: the spelling of a control piece is text to it.
    if (text.find("<s>") != text.npos || text.find("</s>") != text.npos ||
        text.find("<unk>") != text.npos)
      continue;
    EXPECT_EQ(ours->encode(text), theirs->encode(text)) << text.substr(0, 100);
    ++compared;
  }
  EXPECT_GT(compared, 80u);
  EXPECT_EQ(ours->encode("<s>"), std::vector<int32_t>{*ours->token_to_id("<s>")});
}

GgufVocabulary small_vocabulary() {
  GgufVocabulary v = empty_vocabulary();
  v.model = "gpt2";
  v.pre = "gpt-2";
  v.tokens = {"a", "b", "ab", "<bos>", "<eos>", "<tool>"};
  v.types = {1, 1, 1, 3, 3, 4};
  v.merges = {"a b"};
  v.bos = 3;
  v.eos = 4;
  return v;
}

TEST(GgufVocabularies, AddWhatTheFileSays) {
  GgufVocabulary v = small_vocabulary();
  const auto ids = [&] {
    const auto tokenizer = make_tokenizer(gguf_tokenizer_texts(v));
    std::vector<int32_t> all = tokenizer->prefix_ids();
    for (const int32_t id : tokenizer->encode("<tool>ab<eos>")) all.push_back(id);
    for (const int32_t id : tokenizer->suffix_ids()) all.push_back(id);
    return all;
  };
  EXPECT_THAT(ids(), ElementsAre(5, 2, 4));
  v.add_bos = true;
  v.add_eos = true;
  EXPECT_THAT(ids(), ElementsAre(3, 5, 2, 4, 4));
  v.add_bos.reset();
  v.add_eos = false;
  v.pre = "llama-bpe";  // adds one unless the file says otherwise
  EXPECT_THAT(ids(), ElementsAre(3, 5, 2, 4));
  const auto tokenizer = make_tokenizer(gguf_tokenizer_texts(v));
  EXPECT_EQ(tokenizer->bos(), 3);
  EXPECT_EQ(tokenizer->eod(), 4);
  EXPECT_TRUE(tokenizer->is_special(3));
  EXPECT_FALSE(tokenizer->is_special(5)) << "user defined";
  v.chat_templates = {{"default", "D"}, {"tool_use", "T"}};
  const auto config = nlohmann::json::parse(gguf_tokenizer_texts(v).config);
  EXPECT_EQ(config["chat_template"][1]["template"], "T");
  EXPECT_EQ(config["eos_token"], "<eos>");
}

TEST(GgufVocabularies, StripAfterControlTokensWhereTheModelDid) {
  GgufVocabulary v = empty_vocabulary();
  v.model = "llama";
  v.tokens = {"<unk>", "<s>", "<|user|>", "a", "\u2581", "\u2581a"};
  v.types = {2, 3, 3, 1, 1, 1};
  v.scores = {0, 0, 0, -2, -3, -1};
  v.add_space_prefix = false;
  EXPECT_THAT(make_tokenizer(gguf_tokenizer_texts(v))->encode("<|user|> a"), ElementsAre(2, 5));
  v.strips_after_control = true;
  EXPECT_THAT(make_tokenizer(gguf_tokenizer_texts(v))->encode("<|user|> a<s> a"),
              ElementsAre(2, 3, 1, 5));
  v.strips_after_control = false;
  v.add_space_prefix = true;
  EXPECT_THAT(make_tokenizer(gguf_tokenizer_texts(v))->encode("a"), ElementsAre(5));
}

TEST(GgufVocabularies, ThatAreInconsistentAreRefusedByKey) {
  const auto refusal = [](const auto& change) {
    GgufVocabulary v = small_vocabulary();
    change(v);
    return error_of([&] { gguf_tokenizer_texts(v); });
  };
  EXPECT_EQ(refusal([](auto& v) { v.model = "t5"; }),
            "m.gguf: key tokenizer.ggml.model: \"t5\" is not built, only \"gpt2\" and \"llama\"");
  EXPECT_THAT(refusal([](auto& v) { v.pre = "future"; }),
              HasSubstr("key tokenizer.ggml.pre: \"future\" is not built\nhint: those that are: "
                        "default, llama3"));
  EXPECT_EQ(refusal([](auto& v) { v.types.pop_back(); }),
            "m.gguf: key tokenizer.ggml.token_type: has 5 elements for 6 tokens");
  EXPECT_EQ(refusal([](auto& v) { v.types[2] = 7; }),
            "m.gguf: key tokenizer.ggml.token_type: element 2 is 7, expected 1 to 6");
  EXPECT_EQ(refusal([](auto& v) { v.tokens[1] = "a"; }),
            "m.gguf: key tokenizer.ggml.tokens: elements 0 and 1 are both \"a\"");
  EXPECT_EQ(refusal([](auto& v) { v.tokens[1] = ""; }),
            "m.gguf: key tokenizer.ggml.tokens: element 1 is empty");
  EXPECT_EQ(refusal([](auto& v) { v.tokens.clear(); }),
            "m.gguf: key tokenizer.ggml.tokens: holds no tokens");
  EXPECT_EQ(refusal([](auto& v) { v.merges[0] = "ab"; }),
            "m.gguf: key tokenizer.ggml.merges: element 0 is \"ab\", expected two tokens with a "
            "space between them");
  EXPECT_EQ(refusal([](auto& v) { v.merges[0] = "b a"; }),
            "m.gguf: key tokenizer.ggml.merges: element 0 is \"b a\", but \"ba\" is no token");
  EXPECT_EQ(refusal([](auto& v) { v.eos = 6; }),
            "m.gguf: key tokenizer.ggml.eos_token_id: is 6, which is none of the 6 tokens");
  EXPECT_EQ(refusal([](auto& v) {
              v.add_bos = true;
              v.bos.reset();
            }),
            "m.gguf: key tokenizer.ggml.add_bos_token: is true, but there is no "
            "tokenizer.ggml.bos_token_id");
  const auto pieces = [](auto& v) {
    v.model = "llama";
    v.merges.clear();
  };
  EXPECT_EQ(refusal(pieces),
            "m.gguf: key tokenizer.ggml.scores: is not there: tokens without scores cannot be "
            "merged");
  EXPECT_EQ(refusal([&](auto& v) {
              pieces(v);
              v.scores = {1};
            }),
            "m.gguf: key tokenizer.ggml.scores: has 1 elements for 6 tokens");
}

}  // namespace
}  // namespace megatron
