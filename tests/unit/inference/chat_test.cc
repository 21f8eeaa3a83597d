// Chat prompts have the ids of transformers, and replies end at the end of the turn.
#include "megatron/inference/chat.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/interop/huggingface/hf_convert.h"
#include "megatron/interop/huggingface/hf_folder.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;

const fs::path kGolden = MEGATRON_SOURCE_DIR "/tests/golden";

std::unique_ptr<Tokenizer> load_tokenizer() {
  TokenizerConfig config;
  config.tokenizer_type = "HuggingFaceTokenizer";
  config.tokenizer_model = (kGolden / "chat/tokenizer").string();
  return make_tokenizer(config);
}

TEST(Chat, PromptsHaveTheIdsOfTransformers) {
  const auto tokenizer = load_tokenizer();
  const Chat chat(*tokenizer, kGolden / "chat/tokenizer", "", {});
  std::ifstream lines(kGolden / "chat/prompts.jsonl");
  int rows = 0;
  for (std::string line; std::getline(lines, line); ++rows) {
    const Conversation conversation = parse_conversation(line, "row");
    EXPECT_EQ(tokenizer->encode(chat.prompt(conversation, "row")),
              nlohmann::json::parse(line)["ids"].get<std::vector<int32_t>>())
        << line;
  }
  EXPECT_EQ(rows, 5);
}

TEST(Chat, EndsWithWhatTheModelTheTokenizerAndTheTemplateSay) {
  const auto tokenizer = load_tokenizer();
  const fs::path folder = kGolden / "chat/tokenizer";
  // The tokenizer's <|endoftext|> is 600, the template closes turns with <|im_end|>, 602.
  EXPECT_THAT(Chat(*tokenizer, folder, "", {}).stop_tokens(), ElementsAre(600, 602));
  const std::vector<int32_t> eos = {7, 602};
  EXPECT_THAT(Chat(*tokenizer, folder, "", eos).stop_tokens(), ElementsAre(7, 600, 602));
  // Plain text closes turns; a template that refuses what is tried.
  EXPECT_THAT(Chat(*tokenizer, folder, "{% for m in messages %}{{ m.content }}!{% endfor %}", {})
                  .stop_tokens(),
              ElementsAre(600));
  EXPECT_THAT(Chat(*tokenizer, folder, "{{ raise_exception('no') }}", {}).stop_tokens(),
              ElementsAre(600));
}

TEST(Chat, TheEndOfTextComesFromTheModelsFolder) {
  const fs::path root = fs::path(testing::TempDir()) / "chat_end_of_text";
  fs::remove_all(root);
  fs::create_directories(root / "hf");
  for (const auto& item : fs::directory_iterator(kGolden / "hf/llama2"))
    if (item.path().filename() != "golden.safetensors") fs::copy(item, root / "hf");
  const auto ids = [&] { return end_of_text_ids(open_hf_folder(root / "hf").checkpoint); };
  EXPECT_THAT(ids(), ElementsAre(2));
  std::ofstream(root / "hf/generation_config.json") << R"({"eos_token_id": [4, 9]})";
  EXPECT_THAT(ids(), ElementsAre(4, 9));
  EXPECT_THAT(end_of_text_ids(Checkpoint(import_hf_folder(root / "hf", root / "ours").directory)),
              ElementsAre(4, 9));
  std::ofstream(root / "hf/generation_config.json") << "{}";
  EXPECT_THAT(ids(), ElementsAre(2)) << "of config.json";
  for (const std::string wrong : {"\"x\"", "2.5", "[4,\"x\"]", "2147483648", "1e30", "{}"}) {
    std::ofstream(root / "hf/generation_config.json") << "{\"eos_token_id\":" << wrong << "}";
    EXPECT_THAT(error_of([&] { ids(); }),
                testing::StartsWith("generation_config.json: eos_token_id is "))
        << wrong;
  }
  std::ofstream(root / "hf/generation_config.json") << "{";
  EXPECT_EQ(error_of([&] { ids(); }), "generation_config.json is not a JSON object");
  fs::remove_all(root);
}

TEST(Chat, RefusesWhatIsNotTheModelsTurn) {
  const auto tokenizer = load_tokenizer();
  const Chat chat(*tokenizer, kGolden / "chat/tokenizer", "", {});
  const auto error = [&](const std::string& row) -> std::string {
    try {
      chat.prompt(parse_conversation(row, "row 3"), "row 3");
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(error(R"({"messages": [{"role": "assistant", "content": "x"}]})"),
            "row 3: the last message is the assistant's, so there is nothing to answer");
  EXPECT_THAT(error(R"({"prompt": "a", "completion": "b"})"),
              testing::StartsWith("row 3: prompt and completion are plain texts"));
  try {
    Chat(*tokenizer, {}, "", {});
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(),
                 "the tokenizer has no chat template\nhint: give one with --chat-template FILE");
  }
}

}  // namespace
}  // namespace megatron
