// Models with media of pretrained parts: the tensors of whole models of Hugging Face, divided into
// folders of a language model and of encoders alone, become the same parameters again.
#include "megatron/interop/model_parts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/dist_checkpointing/safetensors.h"
#include "megatron/interop/huggingface/hf_encoders.h"
#include "megatron/interop/huggingface/hf_folder.h"
#include "megatron/interop/import_weights.h"
#include "megatron/models/mimo/mimo_config.h"
#include "megatron/nn/parameter_store.h"
#include "tests/unit/error_of.h"
#include "tests/unit/golden_tensors.h"
#include "tests/unit/models/media_golden.h"
#include "tests/unit/models/stored_tensors.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

Json config_of(const std::string& golden) {
  return Json::parse(read_file(media_golden_folder(golden) / "config.json"));
}

// Writes a folder with those tensors of a golden whose names begin with `from`, with `to` in its
// place, and one more, which no encoder has.
fs::path write_part(const std::string& name, const Json& config, const std::string& golden,
                    const std::string& from, const std::string& to, const std::string& more = {}) {
  const fs::path folder = fs::path(testing::TempDir()) / ("model_parts_" + name);
  fs::remove_all(folder);
  fs::create_directories(folder);
  std::ofstream(folder / "config.json") << config.dump();
  const Tensors all = read_stored_tensors(media_golden_folder(golden) / "model.safetensors");
  std::vector<SafetensorsTensor> kept;
  for (const auto& [theirs, stored] : all)
    if (theirs.starts_with(from))
      kept.push_back(
          {to + theirs.substr(from.size()), stored.dtype, stored.shape, stored.bytes.data()});
  const float value = 1;
  if (!more.empty()) kept.push_back({more, DType::kFloat32, {1}, &value});
  write_safetensors(folder / "model.safetensors", kept, {{"format", "pt"}});
  return folder;
}

fs::path write_language(const std::string& name, const std::string& golden) {
  Json config = config_of(golden)["text_config"];
  config["tie_word_embeddings"] = false;
  return write_part(name, config, golden, "language_model.", "");
}

fs::path write_clip(const std::string& name = "clip") {
  return write_part(
      name, {{"model_type", "clip"}, {"vision_config", config_of("llava")["vision_config"]}},
      "llava", "vision_tower.", "vision_model.", "text_model.final_layer_norm.weight");
}

fs::path write_whisper(const std::string& prefix) {
  Json config = config_of("qwen2_audio")["audio_config"];
  config["model_type"] = "whisper";
  config["dropout"] = 0.1;  // that of the run is
  return write_part("whisper", config, "qwen2_audio", "audio_tower.", prefix,
                    "model.decoder.layer_norm.weight");
}

// The configuration of a model with this language model and these encoders.
ModelConfig config_with(const fs::path& language, const fs::path& vision,
                        const fs::path& audio = {}) {
  ModelConfig config = read_hf_config(language).config;
  config.type = "mimo";
  MimoConfig& own = config.own.ensure<MimoConfig>();
  if (!vision.empty()) read_hf_encoder_config(vision, EncoderMedia::kImages, own);
  if (!audio.empty()) read_hf_encoder_config(audio, EncoderMedia::kSounds, own);
  return config;
}

std::string bytes_of(const Checkpoint& checkpoint, const std::string& name) {
  const StoredTensor& stored = checkpoint.manifest().tensors.at(name);
  std::string bytes(num_bytes(stored.dtype, stored.shape), '\1');
  ShardedTensor whole;
  whole.key = name;
  whole.dtype = stored.dtype;
  whole.global_shape = whole.local_shape = stored.shape;
  whole.data = bytes.data();
  load_one(checkpoint, whole);
  return bytes;
}

// Each of those that `expected` holds in this module, and how many there are.
size_t expect_same(const Checkpoint& part, const Checkpoint& expected, const std::string& module) {
  size_t count = 0;
  for (const auto& [name, stored] : expected.manifest().tensors) {
    if (!name.starts_with(module)) continue;
    ++count;
    const bool held = part.manifest().tensors.contains(name);
    EXPECT_TRUE(held && bytes_of(part, name) == bytes_of(expected, name)) << name;
  }
  EXPECT_EQ(part.manifest().tensors.size(), count);
  return count;
}

ModelParts join(const fs::path& language, const fs::path& vision, const fs::path& audio,
                const ModelConfig& config) {
  PartsRequest request{{}, vision, audio};
  if (!language.empty()) request.language = open_hf_folder(language).checkpoint;
  return join_parts(request, config);
}

TEST(ModelParts, OfClipAndLlamaAreThoseOfLlava) {
  const HfFolder llava = open_hf_folder(media_golden_folder("llava"));
  const fs::path llama = write_language("llama", "llava"), clip = write_clip();
  const ModelConfig config = config_with(llama, clip);
  const auto &own = *config.own.as<MimoConfig>(), &whole = *llava.model.config.own.as<MimoConfig>();
  EXPECT_EQ(own.vision_num_layers, 2);  // up to the last but one
  EXPECT_EQ(parameter_shapes(config), parameter_shapes(llava.model.config));
  EXPECT_EQ(own.features(), whole.features());
  EXPECT_EQ(own.vision_activation, whole.vision_activation);
  const ModelParts parts = join(llama, clip, {}, config);
  EXPECT_THAT(parts.random, ElementsAre("vision_projection.*"));
  ASSERT_EQ(parts.encoders.size(), 1U);
  EXPECT_EQ(expect_same(parts.language, llava.checkpoint, "language_model."), 15U);
  EXPECT_GT(expect_same(parts.encoders[0], llava.checkpoint, "vision_model."), 20U);
  // Of the third layer 16, the norm behind the layers and the text's.
  EXPECT_THAT(
      parts.notes,
      ElementsAre("starting from the weights of " + llama.string() + ", " + clip.string() +
                      " (vision_model)",
                  clip.string() + ": 19 of its tensors are no part of the vision_model and "
                                  "are not read, such as text_model.final_layer_norm.weight",
                  "begins at random: vision_projection"));
}

TEST(ModelParts, EncodersAreReadUnderEachSpelling) {
  const HfFolder llava = open_hf_folder(media_golden_folder("llava"));
  Json alone = config_of("llava")["vision_config"];
  alone["model_type"] = "clip_vision_model";
  const fs::path llama = write_language("llama", "llava");
  const std::vector<fs::path> folders = {
      write_part("spelt0", alone, "llava", "vision_tower.", "vision_model."),
      write_part("spelt1", alone, "llava", "vision_tower.", ""),
      write_part("spelt2", config_of("llava"), "llava", "vision_tower.",
                 "model.vision_tower.vision_model."),
      media_golden_folder("llava")};
  for (const fs::path& folder : folders) {
    const ModelConfig config = config_with(llama, folder);
    const ModelParts parts = join(llama, folder, {}, config);
    EXPECT_GT(expect_same(parts.encoders.at(0), llava.checkpoint, "vision_model."), 20U) << folder;
  }
}

TEST(ModelParts, SiglipIsTheEncoderOfGemma3) {
  const HfFolder gemma = open_hf_folder(media_golden_folder("gemma3"));
  Json config = config_of("gemma3")["vision_config"];
  config["model_type"] = "siglip_vision_model";
  const auto files = TensorFiles::of_hf_folder(media_golden_folder("gemma3"));
  std::string prefix;  // of the names in the golden
  for (const auto& [name, place] : files.places())
    if (const size_t at = name.find("embeddings.patch_embedding.weight"); at != name.npos)
      prefix = name.substr(0, at);
  const fs::path siglip = write_part("siglip", config, "gemma3", prefix, "vision_model."),
                 llama = write_language("llama", "llava");
  const ModelParts parts = join(llama, siglip, {}, config_with(llama, siglip));
  EXPECT_GT(expect_same(parts.encoders.at(0), gemma.checkpoint, "vision_model."), 20U);
  EXPECT_THAT(parts.random, ElementsAre("vision_projection.*"));
}

// The parts that HfAudioModels.ImagesAndSoundsTogether composes of two models.
TEST(ModelParts, OfWhisperClipAndQwen) {
  const HfFolder heard = open_hf_folder(media_golden_folder("qwen2_audio")),
                 seen = open_hf_folder(media_golden_folder("llava"));
  const fs::path qwen = write_language("qwen", "qwen2_audio"), clip = write_clip();
  for (const std::string prefix : {"model.encoder.", "encoder.", ""}) {
    const fs::path whisper = write_whisper(prefix);
    const ModelConfig config = config_with(qwen, clip, whisper);
    const ModelParts parts = join(qwen, clip, whisper, config);
    EXPECT_THAT(parts.random, ElementsAre("audio_projection.*", "vision_projection.*"));
    expect_same(parts.language, heard.checkpoint, "language_model.");
    expect_same(parts.encoders.at(0), seen.checkpoint, "vision_model.");
    EXPECT_GT(expect_same(parts.encoders.at(1), heard.checkpoint, "audio_model."), 20U);
  }
}

TEST(ModelParts, WhatIsNotNamedBeginsAtRandom) {
  const fs::path llama = write_language("llama", "llava"), clip = write_clip(),
                 llava = media_golden_folder("llava"), whisper = write_whisper("encoder.");
  const ModelConfig config = config_with(llama, clip);
  EXPECT_THAT(join({}, clip, {}, config).random,
              ElementsAre("language_model.*", "vision_projection.*"));
  EXPECT_THAT(join(llama, {}, {}, config).random,
              ElementsAre("vision_model.*", "vision_projection.*"));
  // Beside a whole model: another encoder has another projector, and what is not replaced stays.
  const ModelParts replaced = join(llava, clip, {}, config);
  EXPECT_THAT(replaced.random, ElementsAre("vision_projection.*"));
  EXPECT_FALSE(replaced.language.manifest().tensors.contains("vision_model.conv1.weight"));
  const ModelParts heard = join(llava, {}, whisper, config_with(llama, clip, whisper));
  EXPECT_THAT(heard.random, ElementsAre("audio_projection.*"));
  EXPECT_TRUE(heard.language.manifest().tensors.contains("vision_model.conv1.weight"));
  ModelConfig tiles = config;
  tiles.own.as<MimoConfig>()->vision_newlines = true;
  EXPECT_THAT(join(llama, clip, {}, tiles).random,
              ElementsAre("image_newline", "vision_projection.*"));
}

TEST(ModelParts, RowsOfAddedTokensBeginAtZero) {
  const fs::path llama = write_language("llama", "llava"), clip = write_clip();
  ModelConfig config = config_with(llama, clip);
  config.vocab_size = 43;
  config.padded_vocab_size = 48;
  const HfFolder given = open_hf_folder(llama);
  const ModelParts parts = join(llama, clip, {}, config);
  for (const std::string name : {"embedding.word_embeddings.weight", "output_layer.weight"}) {
    const std::string table = bytes_of(parts.language, "language_model." + name);
    ASSERT_EQ(table.size(), size_t{43} * 16 * 2) << name;
    EXPECT_EQ(table, bytes_of(given.checkpoint, name) + std::string(size_t{3} * 16 * 2, '\0'));
  }
  EXPECT_THAT(parts.notes, testing::Contains(HasSubstr(
                               ": the last 3 ids of the vocabulary have no rows in its tables")));
  config.vocab_size = config.padded_vocab_size = 40 + kMostAddedTokens + 1;
  EXPECT_THAT(error_of([&] { join(llama, clip, {}, config); }),
              HasSubstr("word_embeddings.weight has shape [40,16], by the flags of this run it is "
                        "[1065,16]"));
}

TEST(ModelParts, WhatDoesNotFitIsNamed) {
  const fs::path llama = write_language("llama", "llava"), clip = write_clip(),
                 whisper = write_whisper("encoder.");
  const ModelConfig config = config_with(llama, clip);
  const auto error = [&](const fs::path& language, const fs::path& vision, const fs::path& audio,
                         const std::function<void(ModelConfig&, MimoConfig&)>& change) {
    ModelConfig other = config;
    change(other, *other.own.as<MimoConfig>());
    return error_of([&] { join(language, vision, audio, other); });
  };
  const auto same = [](ModelConfig&, MimoConfig&) {};
  const std::string wide = error(
      llama, clip, {}, [](ModelConfig&, MimoConfig& own) { own.vision_ffn_hidden_size = 24; });
  EXPECT_THAT(wide, HasSubstr(clip.string() + ": "));
  EXPECT_THAT(wide, HasSubstr("vision_model.encoder.layers.0.mlp.fc1.weight has shape [20,12], by "
                              "the flags of this run it is [24,12]"));
  const std::string deep =
      error(llama, clip, {}, [](ModelConfig&, MimoConfig& own) { own.vision_num_layers = 4; });
  EXPECT_THAT(deep, HasSubstr("vision_tower.encoder.layers.3.self_attn.q_proj.weight is not in the "
                              "files, the encoder of this run has it"));
  EXPECT_THAT(error(llama, clip, {},
                    [](ModelConfig& c, MimoConfig&) { c.transformer.ffn_hidden_size = 32; }),
              HasSubstr(llama.string() +
                        ": language_model.decoder.layers.0.mlp.linear_fc1.weight has shape [48,"
                        "16], by the flags of this run it is [64,16]"));
  EXPECT_THAT(error(llama, clip, {},
                    [](ModelConfig&, MimoConfig& own) {
                      own.vision_model_type = VisionModel::kSiglip;
                      own.vision_class_token = false;
                    }),
              HasSubstr(": its encoder of images is of another type than that of this run"));
  for (const fs::path& folder : {llama, whisper})
    EXPECT_THAT(error(llama, folder, {}, same),
                HasSubstr(folder.string() + ": holds no encoder of images: its model is of the "));
  EXPECT_THAT(error(llama, {}, clip, same),
              HasSubstr(clip.string() + ": holds no encoder of sounds: its model is of the type "
                                        "\"clip\"\nhint: types that hold one are: whisper, "));
  EXPECT_THAT(error(llama, fs::path(testing::TempDir()) / "model_parts_none", {}, same),
              HasSubstr(": is no folder of Hugging Face with a config.json"));
  const fs::path text_alone = write_part("text_alone", Json::parse(read_file(clip / "config.json")),
                                         "llava", "language_model.", "text_model.");
  EXPECT_THAT(error(llama, text_alone, {}, same),
              HasSubstr(text_alone.string() + ": its files hold no encoder of images"));
}

}  // namespace
}  // namespace megatron
