// A folder of voxtral as it is published, with tekken.json and no template: ids of mistral-common
// and greedy tokens of transformers, the second sound in a later turn.
#include <gtest/gtest.h>

#include "tests/unit/inference/image_model.h"
#include "tests/unit/models/stored_tensors.h"
#include "tests/unit/tekken_file.h"

namespace megatron {
namespace {

const std::filesystem::path kVoxtralFolder = kImageGoldens / "voxtral_folder";

// The golden's model with the tables of a larger vocabulary.
std::filesystem::path write_voxtral_folder() {
  const std::filesystem::path golden = kImageGoldens / "voxtral",
                              folder = std::filesystem::path(testing::TempDir()) / "voxtral_folder";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  Tensors stored = read_stored_tensors(kVoxtralFolder / "tables.safetensors");
  stored.merge(read_stored_tensors(golden / "model.safetensors"));
  std::vector<SafetensorsTensor> tensors;
  for (const auto& [name, tensor] : stored)
    tensors.push_back({name, tensor.dtype, tensor.shape, tensor.bytes.data()});
  write_safetensors(folder / "model.safetensors", tensors);
  nlohmann::json config = nlohmann::json::parse(read_file(golden / "config.json")),
                 tokenizer = tekken_file();
  config["text_config"]["vocab_size"] = tokenizer["config"]["default_vocab_size"];
  config["audio_token_id"] = 24;
  write_file_atomically(folder / "config.json", config.dump());
  write_file_atomically(folder / "tekken.json", tokenizer.dump());
  return folder;
}

TEST(VoxtralFolder, PromptsAreThoseOfMistralCommonAndTokensThoseOfTransformers) {
  LoadedImageModel m(write_voxtral_folder());
  const Chat chat(*m.loaded.tokenizer, m.loaded.chat_templates, "", m.loaded.end_of_text);
  const nlohmann::json golden = nlohmann::json::parse(read_file(kVoxtralFolder / "prompts.json"));
  ASSERT_EQ(golden.size(), 2U);
  for (const nlohmann::json& one : golden) {
    MultimodalRow row =
        parse_multimodal_row(nlohmann::json{{"messages", one["messages"]}}.dump(), "row");
    for (RowMedium& medium : row.media) medium = image_of(medium.path);
    const ImagePrompt prompt = m.prompts->of_conversation(row, chat, "row");
    EXPECT_EQ(prompt.ids, golden_ids(one["ids"]));
    EXPECT_EQ(m.tokens_behind(prompt), one["tokens"].get<std::vector<int32_t>>());
  }
}

}  // namespace
}  // namespace megatron
