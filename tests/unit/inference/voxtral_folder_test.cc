// A folder of voxtral as it is published, with tekken.json and no template: ids of mistral-common
// and greedy tokens of transformers, the second sound in a later turn.
#include <gtest/gtest.h>

#include <map>

#include "megatron/dist_checkpointing/safetensors.h"
#include "tests/unit/inference/image_model.h"
#include "tests/unit/tekken_file.h"

namespace megatron {
namespace {

const std::filesystem::path kVoxtralFolder = kImageGoldens / "voxtral_folder";

struct StoredTensor {
  SafetensorsEntry entry;
  std::string bytes;
};

void read_tensors(const std::filesystem::path& path, std::map<std::string, StoredTensor>& into) {
  const SafetensorsFile file(path);
  for (const SafetensorsEntry& entry : file.header().tensors) {
    StoredTensor stored{entry, std::string(entry.end - entry.begin, '\0')};
    file.read(entry, stored.bytes.data());
    into.insert_or_assign(entry.name, std::move(stored));
  }
}

// The golden's model with the tables of a larger vocabulary.
std::filesystem::path write_voxtral_folder() {
  const std::filesystem::path golden = kImageGoldens / "voxtral",
                              folder = std::filesystem::path(testing::TempDir()) / "voxtral_folder";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  std::map<std::string, StoredTensor> stored;
  read_tensors(golden / "model.safetensors", stored);
  read_tensors(kVoxtralFolder / "tables.safetensors", stored);
  std::vector<SafetensorsTensor> tensors;
  for (const auto& [name, tensor] : stored)
    tensors.push_back({name, tensor.entry.dtype, tensor.entry.shape, tensor.bytes.data()});
  write_safetensors(folder / "model.safetensors", tensors);
  nlohmann::json config = nlohmann::json::parse(read_file(golden / "config.json")),
                 tokenizer = tekken_file();
  config["text_config"]["vocab_size"] = tokenizer["config"]["default_vocab_size"];
  config["audio_token_id"] = 24;
  write_file_atomically(folder / "config.json", config.dump());
  write_file_atomically(folder / "tekken.json", tokenizer.dump());
  return folder;
}

MultimodalRow row_of_messages(const nlohmann::json& messages) {
  MultimodalRow row;
  for (const nlohmann::json& message : messages) {
    const bool said = message["role"] == "assistant";
    row.messages.push_back({said ? R"({"role":"assistant"})" : R"({"role":"user"})", said, {}});
    auto& parts = row.messages.back().parts;
    if (said) {
      parts.push_back({message["content"], -1});
      continue;
    }
    for (const nlohmann::json& part : message["content"]) {
      if (part["type"] == "text") {
        parts.push_back({part["text"], -1});
        continue;
      }
      parts.push_back({{}, std::ssize(row.media)});
      row.media.push_back(image_of(part["audio"]));
    }
  }
  return row;
}

TEST(VoxtralFolder, PromptsAreThoseOfMistralCommonAndTokensThoseOfTransformers) {
  const std::filesystem::path folder = write_voxtral_folder();
  const ParallelGroups groups;
  LoadModelRequest request;
  request.load = folder;
  request.dtype = at::kFloat;
  const LoadedModel loaded = load_model(request, groups);
  const ImagePrompts prompts(*loaded.model, *loaded.tokenizer, {folder}, "",
                             /*escape_literals=*/false);
  const Chat chat(*loaded.tokenizer, loaded.chat_templates, "", loaded.end_of_text);
  GenerateOptions options;
  options.sampling.greedy = true;
  const nlohmann::json golden = nlohmann::json::parse(read_file(kVoxtralFolder / "prompts.json"));
  ASSERT_EQ(golden.size(), 2U);
  for (const nlohmann::json& one : golden) {
    std::vector<int32_t> ids;
    for (const nlohmann::json& id : one["ids"])
      ids.insert(ids.end(), id.is_array() ? id[1].get<size_t>() : 1,
                 id.is_array() ? id[0].get<int32_t>() : id.get<int32_t>());
    const ImagePrompt prompt =
        prompts.of_conversation(row_of_messages(one["messages"]), chat, "row");
    EXPECT_EQ(prompt.ids, ids);
    EXPECT_EQ(
        generate(*loaded.model, *loaded.tokenizer, {prompts.start(prompt, 64, "row")}, options)
            .front()
            .tokens,
        one["tokens"].get<std::vector<int32_t>>());
  }
}

}  // namespace
}  // namespace megatron
