// Conversations of text and sound for a folder of voxtral as it is published, with tekken.json and
// no template: ids of mistral-common, also where a user types control tokens.
#include <gtest/gtest.h>

#include "megatron/datasets/multimodal/fused_tokens.h"
#include "megatron/datasets/multimodal/multimodal_encoder.h"
#include "tests/unit/datasets/multimodal/testing.h"
#include "tests/unit/error_of.h"
#include "tests/unit/tekken_file.h"

namespace megatron {
namespace {

using namespace testing_multimodal;

struct Voxtral {
  Voxtral() {
    folder.write("tekken.json", tekken_file().dump());
    folder.write("config.json", R"({"model_type": "voxtral", "audio_token_id": 24})");
    tokenizer = make_tokenizer(find_tokenizer(folder.path()));
    conversations.emplace(*tokenizer, folder.path(), SftConfig());
  }
  Folder folder;
  std::unique_ptr<Tokenizer> tokenizer;
  std::optional<ConversationEncoder> conversations;
};

std::vector<int32_t> without_marks(std::vector<int32_t> ids) {
  for (int32_t& id : ids) id = id < 0 ? ~id : id;
  return ids;
}

TEST(Tekken, ConversationsAreThoseOfMistralCommon) {
  const Voxtral v;
  const nlohmann::json chat = tekken_golden()["chats"][0];
  std::vector<int32_t> ids, trained;
  v.conversations->encode_append(
      parse_conversation(nlohmann::json{{"messages", chat["messages"]}}.dump(), ""), "row", ids);
  EXPECT_EQ(without_marks(ids), golden_ids(chat["ids"]));
  std::ranges::copy_if(ids, std::back_inserter(trained), [](int32_t id) { return id >= 0; });
  std::vector<int32_t> said = v.tokenizer->encode("the end");
  said.push_back(*v.tokenizer->eod());
  EXPECT_EQ(trained, said);
  constexpr char kCall[] = R"({"messages": [{"role": "user", "content": "a"},
      {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]})";
  EXPECT_NE(error_of([&] {
              v.conversations->encode_append(parse_conversation(kCall, ""), "row", ids);
            }).find("tool calls need a --chat-template"),
            std::string::npos);
}

TEST(Tekken, ConversationsWithSoundAreThoseOfMistralCommon) {
  const Voxtral v;
  const MultimodalEncoder encoder(*v.tokenizer, *v.conversations,
                                  read_media_rules(v.folder.path(), *v.tokenizer),
                                  /*escape_literals=*/false);
  const nlohmann::json chats = tekken_golden()["chats"];
  for (const nlohmann::json& chat : chats) {
    nlohmann::json row = {{"messages", chat["messages"]}};
    std::vector<MediumFacts> media;
    if (chat["messages"][0]["content"].is_array()) {
      row["audios"] = {"a"};
      media = {{MediaKind::kSound, {}, 16000}};
    }
    const EncodedSample sample =
        encoder.encode(parse_multimodal_row(row.dump(), "row"), media, "row");
    EXPECT_EQ(without_marks(expanded_ids(sample)), golden_ids(chat["ids"]));
  }
}

}  // namespace
}  // namespace megatron
