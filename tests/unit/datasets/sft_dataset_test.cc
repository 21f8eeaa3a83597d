// Conversations: rows, loss masks, packing.
#include "megatron/datasets/tuning/sft_dataset.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <set>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
namespace fs = std::filesystem;

const fs::path kGolden = fs::path(MEGATRON_SOURCE_DIR) / "tests" / "golden";

std::unique_ptr<Tokenizer> byte_tokenizer() {
  TokenizerConfig config;
  config.tokenizer_type = "ByteLevelTokenizer";
  return make_tokenizer(config);
}

// The parts of a conversation's text that count, each in brackets.
std::string marked(const std::string& chat_template, const std::string& row,
                   SftLossOn loss_on = SftLossOn::kAssistant) {
  SftConfig config;
  config.chat_template = chat_template;
  config.sft_loss_on = loss_on;
  const auto tokenizer = byte_tokenizer();
  const fs::path folder = fs::path(testing::TempDir()) / "sft_tokenizer";
  fs::create_directories(folder);
  std::ofstream(folder / "tokenizer_config.json") << R"({"bos_token": "<s>", "eos_token": "</s>"})";
  const ConversationEncoder encoder(*tokenizer, folder, config);
  std::vector<int32_t> ids;
  encoder.encode_append(parse_conversation(row, "row"), "row", ids);
  std::string out;
  bool open = false;
  for (const int32_t id : ids) {
    if ((id >= 0) != open) out += open ? "]" : "[";
    open = id >= 0;
    out += id == 256 ? "<eod>" : tokenizer->token_bytes(id < 0 ? ~id : id);
  }
  return out + (open ? "]" : "");
}

std::string published(const char* name) { return (kGolden / "chat" / "templates" / name).string(); }

const std::string kTwoTurns =
    R"({"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "q"},
  {"role": "assistant", "content": "a"}, {"role": "user", "content": "r"}, {"role": "assistant", "content": "b"}]})";

TEST(Conversation, TheTurnsOfTheAssistantCount) {
  EXPECT_EQ(marked(published("chatml.jinja"), kTwoTurns),
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>"
            "assistant\n[a<|im_end|>\n]"
            "<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n[b<|im_end|>\n]");
  EXPECT_EQ(marked(published("chatml_generation.jinja"), kTwoTurns),
            marked(published("chatml.jinja"), kTwoTurns))
      << "as marked in the template";
  EXPECT_EQ(marked(published("chatml.jinja"), kTwoTurns, SftLossOn::kLast),
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>"
            "assistant\na<|im_end|>\n"
            "<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n[b<|im_end|>\n]");
  EXPECT_THAT(marked(published("chatml.jinja"), kTwoTurns, SftLossOn::kAll),
              testing::StartsWith("[<|im_start|>system"));
}

// Turns that are written differently once others follow.
TEST(Conversation, TurnsThatDependOnLaterOnes) {
  EXPECT_EQ(marked(published("qwen3.jinja"), kTwoTurns),
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>"
            "assistant\n[a<|im_end|>\n]"
            "<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n[<think>\n\n</"
            "think>\n\nb<|im_end|>\n]");
  EXPECT_EQ(marked(published("mistral_v3.jinja"), kTwoTurns),
            "<s>[INST] q[/INST] [a</s>][INST] r[/INST] [b</s>]")
      << "the system message is in the last turn of a user, if nothing follows";
  EXPECT_EQ(marked(published("phi3.jinja"), kTwoTurns),
            "<|system|>\nS<|end|>\n<|user|>\nq<|end|>\n<|assistant|>\n[a<|end|>\n]<|user|>\nr<|end|"
            ">\n<|assistant|>\n[b<|end|>\n</s>]");
}

TEST(Conversation, Forms) {
  const std::string sharegpt =
      R"({"conversations": [{"from": "system", "value": "S"}, {"from": "human", "value": "q"},
    {"from": "gpt", "value": "a"}, {"from": "human", "value": "r"}, {"from": "gpt", "value": "b"}]})";
  EXPECT_EQ(marked(published("chatml.jinja"), sharegpt),
            marked(published("chatml.jinja"), kTwoTurns));
  EXPECT_EQ(marked("", R"({"prompt": "what? ", "completion": "that"})"), "what? [that<eod>]");
  EXPECT_EQ(
      marked(published("chatml.jinja"),
             R"({"prompt": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"},
              {"role": "user", "content": "r"}], "completion": [{"role": "assistant", "content": "b"}]})"),
      "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n<|im_start|>user\nr<|im_"
      "end|>\n"
      "<|im_start|>assistant\n[b<|im_end|>\n]");
  EXPECT_EQ(
      marked(
          "{{ tools | length }}{{ mood }}{% generation %}x{% endgeneration %}",
          R"({"messages": [{"role": "user", "content": ""}], "tools": [{}, {}], "chat_template_kwargs": {"mood": "!"}})"),
      "2![x]");
}

TEST(Conversation, AlpacaRows) {
  const auto turns = [](const char* request) {
    return std::string("<|im_start|>user\n") + request +
           "<|im_end|>\n<|im_start|>assistant\n[done<|im_end|>\n]";
  };
  const std::string chatml = published("chatml.jinja");
  EXPECT_EQ(marked(chatml, R"({"instruction": "Do it", "input": "", "output": "done"})"),
            turns("Do it"));
  EXPECT_EQ(marked(chatml, R"({"instruction": "Do it", "output": "done"})"), turns("Do it"));
  EXPECT_EQ(marked(chatml, R"({"instruction": "Do it", "input": "with this", "output": "done"})"),
            turns("Do it\n\nwith this"));
  EXPECT_EQ(
      marked(chatml, R"({"system": "S", "instruction": "Do it", "input": null, "output": "done",
                              "history": [["q", "a"]]})"),
      "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
      "[a<|im_end|>\n]" +
          turns("Do it"));
}

TEST(Conversation, ErrorsNameTheRow) {
  const auto error = [](const char* row) {
    return error_of([&] { parse_conversation(row, "f: line 3"); });
  };
  EXPECT_EQ(error("[1"), "f: line 3: is no JSON object");
  EXPECT_EQ(
      error(R"({"text": "x", "label": 1})"),
      "f: line 3: has none of messages, conversations, prompt and completion, instruction and "
      "output; it has text, label"
      "\nhint: the forms are messages: [{role, content}, ...], conversations: [{from, value}, "
      "...], prompt and completion, or instruction, input and output");
  EXPECT_THAT(error("{}"), testing::HasSubstr("; it has no members\n"));
  EXPECT_EQ(error(R"({"instruction": "", "input": "", "output": "x"})"),
            "f: line 3: the instruction is empty");
  EXPECT_EQ(error(R"({"instruction": "x", "output": ""})"), "f: line 3: the output is empty");
  EXPECT_EQ(error(R"({"instruction": "x", "input": 3, "output": "y"})"),
            "f: line 3: \"input\" is number, expected a string");
  EXPECT_EQ(error(R"({"messages": "x"})"),
            "f: line 3: \"messages\" is string, expected a list of messages");
  EXPECT_EQ(error(R"({"messages": []})"), "f: line 3: the conversation has no messages");
  EXPECT_EQ(error(R"({"messages": [{"text": "x"}]})"),
            "f: line 3: a message has neither role and content nor from and value");
  EXPECT_EQ(error(R"({"conversations": [{"from": "narrator", "value": "x"}]})"),
            "f: line 3: a message is from \"narrator\", expected human, gpt, system or tool");
  EXPECT_THAT(error_of([] { marked(published("gemma.jinja"), kTwoTurns); }),
              HasSubstr("the template refuses this conversation: there is no system role"));
  EXPECT_THAT(error_of([] { marked("", kTwoTurns); }), HasSubstr("holds no chat template"));
  EXPECT_THAT(error_of([] {
                marked("{% for m in messages %}{{ m.role }}{{ messages | length }}{% endfor %}",
                       kTwoTurns);
              }),
              HasSubstr("writes message 3 differently when others follow"));
}

class SftFiles : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(testing::TempDir()) / "sft_dataset";
    fs::remove_all(folder_);
    fs::create_directories(folder_);
    config_.chat_template =
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}";
  }
  // Conversation i asks i % 5 + 1 times "a", "b", ... and is answered with i % 7 of its numbers.
  void write(int count) const {
    std::ofstream out(folder_ / "chat.jsonl");
    for (int i = 0; i < count; ++i)
      out << R"({"messages": [{"role": "user", "content": ")"
          << std::string(static_cast<size_t>(i % 5 + 1), static_cast<char>('a' + i % 26))
          << R"("}, {"role": "assistant", "content": ")"
          << std::string(static_cast<size_t>(i % 7), static_cast<char>('0' + i % 10)) << "\"}]}\n";
  }
  std::shared_ptr<const SftTokens> tokens() const {
    const ConversationEncoder encoder(*tokenizer_, "", config_);
    return std::make_shared<const SftTokens>((folder_ / "chat.jsonl").string(), encoder, "");
  }
  SftDataset dataset(std::optional<int64_t> samples, const SftDatasetOptions& options,
                     Split split = Split::kTrain) const {
    return SftDataset(tokens(), {0.0, 1.0}, split, samples, options);
  }
  fs::path folder_;
  SftConfig config_;
  std::unique_ptr<Tokenizer> tokenizer_ = byte_tokenizer();
};

// The places [begin, end) of the pieces of a sample, without what fills it up.
std::vector<std::pair<int64_t, int64_t>> pieces_of(const Sample& sample) {
  std::vector<std::pair<int64_t, int64_t>> out;
  for (size_t k = 0; k < sample.document_starts.size(); ++k) {
    const int64_t begin = sample.document_starts[k];
    int64_t end = k + 1 < sample.document_starts.size()
                      ? sample.document_starts[k + 1]
                      : static_cast<int64_t>(sample.get<int64_t>("tokens").size());
    while (k + 1 == sample.document_starts.size() && end > begin &&
           sample.get<int64_t>("tokens")[static_cast<size_t>(end - 1)] == 0)
      --end;
    out.emplace_back(begin, end);
  }
  return out;
}

TEST_F(SftFiles, EachConversationOncePerEpochApartFromTheOthers) {
  write(200);
  const auto all = tokens();
  const SftDataset data = dataset(std::nullopt, {.sequence_length = 16});
  EXPECT_EQ(data.counts().conversations, 200);
  EXPECT_EQ(data.counts().silent, 29) << "answers of no characters";
  EXPECT_EQ(data.counts().samples, data.size());
  EXPECT_GT(static_cast<double>(data.counts().tokens), 0.95 * 16 * static_cast<double>(data.size()))
      << "well packed";
  std::multiset<std::vector<int64_t>> seen, expected;
  for (int64_t i = 0; i < 200; ++i) {
    std::vector<int64_t> ids;
    for (const int32_t id : (*all)[i]) ids.push_back(id);
    if (i % 7 != 0) expected.insert(ids);
  }
  for (int64_t i = 0; i < data.size(); ++i) {
    const Sample sample = data.sample(i);
    EXPECT_EQ(sample.document_starts.front(), 0);
    for (const auto& [begin, end] : pieces_of(sample)) {
      std::vector<int64_t> ids = {~sample.get<int64_t>("tokens")[static_cast<size_t>(begin)]};
      for (auto at = static_cast<size_t>(begin); at < static_cast<size_t>(end); ++at) {
        EXPECT_EQ(sample.get<int64_t>("position_ids")[at], static_cast<int64_t>(at) - begin);
        if (at + 1 < static_cast<size_t>(end)) {
          EXPECT_EQ(sample.get<int64_t>("labels")[at], sample.get<int64_t>("tokens")[at + 1]);
        }
        ids.push_back(sample.get<float>("loss_mask")[at] == 1.0F
                          ? sample.get<int64_t>("labels")[at]
                          : ~sample.get<int64_t>("labels")[at]);
      }
      seen.insert(ids);
    }
  }
  EXPECT_EQ(seen, expected);
}

TEST_F(SftFiles, TheOrderIsAFunctionOfTheSeedAndGoesOn) {
  write(60);
  const auto contents = [](const SftDataset& data, int64_t count) {
    std::vector<std::vector<int64_t>> out;
    for (int64_t i = 0; i < count; ++i) out.push_back(data.sample(i).get<int64_t>("tokens"));
    return out;
  };
  const SftDataset one = dataset(std::nullopt, {.sequence_length = 16}),
                   more = dataset(3 * one.size(), {.sequence_length = 16});
  EXPECT_GE(more.size(), 3 * one.size());
  EXPECT_EQ(contents(one, one.size()), contents(more, one.size()));
  EXPECT_EQ(one.fingerprint(), more.fingerprint()) << "a longer run goes on in the same order";
  const SftDataset other = dataset(std::nullopt, {.sequence_length = 16, .seed = 5});
  EXPECT_NE(one.fingerprint(), other.fingerprint());
  EXPECT_NE(contents(one, 5), contents(other, 5));
  const SftDataset valid = dataset(std::nullopt, {.sequence_length = 16}, Split::kValid);
  EXPECT_EQ(valid.sample(0).get<int64_t>("tokens")[0], 'b')
      << "conversation 1, the first one that counts";
}

TEST_F(SftFiles, LongConversationsAreCutOrDropped) {
  write(70);
  const SftDataset cut = dataset(std::nullopt, {.sequence_length = 6});
  EXPECT_GT(cut.counts().cut, 0);
  EXPECT_EQ(cut.counts().dropped, 0);
  const SftDataset dropped = dataset(
      std::nullopt, {.sequence_length = 6, .long_conversations = SftLongConversations::kDrop});
  EXPECT_EQ(dropped.counts().dropped,
            cut.counts().cut + cut.counts().silent - dropped.counts().silent);
  EXPECT_NE(cut.fingerprint(), dropped.fingerprint());
  for (int64_t i = 0; i < cut.size(); ++i)
    for (const auto& [begin, end] : pieces_of(cut.sample(i))) EXPECT_LE(end - begin, 6);
  EXPECT_THAT(
      error_of(
          [&] { SftDataset(tokens(), {0.0, 1.0 / 70}, Split::kTrain, 1, {.sequence_length = 6}); }),
      HasSubstr("none of the 1 conversations of the train split can be used: 0 are longer than "
                "--seq-length, 1 have no token that counts"));
  EXPECT_THAT(error_of([&] {
                SftDataset(tokens(), {0.0, 0.001}, Split::kValid, 1, {.sequence_length = 6});
              }),
              HasSubstr("the valid split holds none of the 70 conversations\nhint: give a larger "
                        "share of --split"));
}

TEST_F(SftFiles, TokensAreKeptUntilWhatTheyDependOnChanges) {
  write(5);
  const std::string first = tokens()->description();
  EXPECT_TRUE(fs::exists(folder_ / "cache" / "SftDataset_tokens"));
  const auto count = [&] {
    return std::distance(fs::directory_iterator(folder_ / "cache" / "SftDataset_tokens"),
                         fs::directory_iterator());
  };
  const auto files = count();
  EXPECT_EQ(tokens()->description(), first);
  EXPECT_EQ(count(), files);
  config_.chat_template += "!";
  EXPECT_NE(tokens()->description(), first);
  EXPECT_GT(count(), files);
  write(6);
  EXPECT_EQ(tokens()->size(), 6);
  std::ofstream(folder_ / "chat.jsonl") << "{\"messages\": 1}\n";
  EXPECT_THAT(error_of([&] { tokens(); }),
              HasSubstr("chat.jsonl: line 1: \"messages\" is number, expected a list"));
  std::ofstream(folder_ / "chat.jsonl") << "\n";
  EXPECT_THAT(error_of([&] { tokens(); }), HasSubstr("holds no conversations"));
}

TEST_F(SftFiles, ParquetRowsWithNestedColumns) {
  const fs::path file = folder_ / "chat.parquet";
  fs::copy_file(kGolden / "sft" / "conversations.parquet", file);
  config_.chat_template =
      "{% for m in messages %}{{ m | tojson }}\n{% endfor %}{% generation %}.{% endgeneration %}";
  const ConversationEncoder encoder(*tokenizer_, "", config_);
  const SftTokens rows(file.string(), encoder, "");
  ASSERT_EQ(rows.size(), 2);
  const auto text = [&](int64_t i) {
    std::vector<int32_t> ids;
    for (const int32_t id : rows[i]) ids.push_back(id < 0 ? ~id : id);
    return tokenizer_->decode(ids);
  };
  EXPECT_EQ(
      text(0),
      "{\"role\": \"user\", \"content\": \"a \\\"quoted\\\"\\nline\\t\\\\ \u00e9\"}\n{\"role\": "
      "\"assistant\", \"content\": \"b\"}\n.");
  EXPECT_EQ(text(1),
            "{\"role\": \"user\", \"content\": \"now?\"}\n{\"role\": \"assistant\", \"content\": "
            "null, \"tool_calls\": "
            "[{\"function\": {\"name\": \"clock\", \"arguments\": \"{}\"}}]}\n{\"role\": \"tool\", "
            "\"content\": \"12\"}\n"
            "{\"role\": \"assistant\", \"content\": \"noon\"}\n.");
}

TEST_F(SftFiles, FilesOfOtherKindsAreRefused) {
  const ConversationEncoder encoder(*tokenizer_, "", config_);
  EXPECT_THAT(error_of([&] { SftTokens((folder_ / "nothing.jsonl").string(), encoder, ""); }),
              HasSubstr("there is no such file or folder of conversations"));
  std::ofstream(folder_ / "data.bin") << "x";
  EXPECT_THAT(error_of([&] { SftTokens((folder_ / "data.bin").string(), encoder, ""); }),
              HasSubstr("is neither JSON lines (.jsonl, .json) nor Parquet"));
}

TEST(MockSft, HalfOfEachDocumentCounts) {
  GPTDatasetConfig config;
  config.sequence_length = 64;
  config.tokenizer.vocab_size = 50;
  config.tokenizer.eod = 49;
  const auto data = make_mock_sft_dataset(Split::kTrain, 8, config);
  const Sample sample = data->sample(3);
  const std::vector<int32_t> bounds = cu_seqlens(sample.document_starts, 64);
  ASSERT_GT(bounds.size(), 2u);
  for (size_t k = 0; k + 1 < bounds.size(); ++k) {
    EXPECT_EQ(sample.get<int64_t>("position_ids")[static_cast<size_t>(bounds[k])], 0);
    EXPECT_EQ(sample.get<float>("loss_mask")[static_cast<size_t>(bounds[k + 1] - 1)], 0.0F)
        << "what follows is another document";
    if (bounds[k + 1] - bounds[k] > 2) {
      EXPECT_EQ(sample.get<float>("loss_mask")[static_cast<size_t>(bounds[k + 1] - 2)], 1.0F);
    }
  }
}

}  // namespace
}  // namespace megatron
