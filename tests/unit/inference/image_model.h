// The goldens' models of images and sounds, with what their prompts are made of.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "megatron/base/files.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/inference/images/image_prompts.h"
#include "megatron/interop/load_model.h"

namespace megatron {

inline const std::filesystem::path kImageGoldens = MEGATRON_SOURCE_DIR "/tests/golden/multimodal";

// A golden's model with its processor, tokenizer and template, and up to 512 positions.
inline std::filesystem::path write_image_model(const nlohmann::json& facts) {
  namespace fs = std::filesystem;
  using Json = nlohmann::json;
  const auto family = facts["family"].get<std::string>();
  const fs::path folder = fs::path(testing::TempDir()) / ("image_prompts_" + family);
  fs::remove_all(folder);
  fs::create_directories(folder);
  fs::copy_file(kImageGoldens / family / "model.safetensors", folder / "model.safetensors");
  Json config = Json::parse(read_file(kImageGoldens / family / "config.json"));
  config["text_config"]["max_position_embeddings"] = 512;
  config.update(facts["config"]);
  const Json tokenizer = {{"eos_token", "<|im_end|>"}};
  for (const auto& [name, text] :
       {std::pair{"config.json", config.dump()},
        std::pair{"preprocessor_config.json", facts["processor"].dump()},
        std::pair{"tokenizer.json", facts["tokenizer"].dump()},
        std::pair{"tokenizer_config.json", tokenizer.dump()},
        std::pair{"chat_template.jinja", facts["template"].get<std::string>()}})
    write_file_atomically(folder / name, text);
  return folder;
}

inline RowMedium image_of(const std::string& file) {
  const bool sound = file.ends_with(".wav");
  return {sound ? MediaKind::kSound : MediaKind::kImage, file,
          read_file(kImageGoldens / (sound ? "sounds" : "same/json/media") / file)};
}

// A folder of a model, its media and its tokenizer.
struct LoadedImageModel {
  explicit LoadedImageModel(const std::filesystem::path& folder, at::Device device = at::kCPU,
                            at::ScalarType dtype = at::kFloat) {
    LoadModelRequest request;
    request.load = folder;
    request.dtype = dtype;
    request.device = device;
    loaded = load_model(request, groups);
    prompts.emplace(*loaded.model, *loaded.tokenizer, MediaFolders{folder}, "",
                    /*escape_literals=*/false);
    options.sampling.greedy = true;
  }
  std::vector<int32_t> tokens_behind(const ImagePrompt& prompt) {
    return generate(*loaded.model, *loaded.tokenizer, {prompts->start(prompt, 64, "prompt")},
                    options)
        .front()
        .tokens;
  }

  const ParallelGroups groups;
  LoadedModel loaded;
  std::optional<ImagePrompts> prompts;
  GenerateOptions options;
};

inline nlohmann::json generation_facts(const std::string& family) {
  nlohmann::json facts;
  for (const nlohmann::json& row :
       nlohmann::json::parse(read_file(kImageGoldens / "generations.json")))
    if (row["family"] == family) facts = row;
  return facts;
}

struct ImageModel : LoadedImageModel {
  explicit ImageModel(const std::string& family, at::Device device = at::kCPU,
                      at::ScalarType dtype = at::kFloat)
      : LoadedImageModel(write_image_model(generation_facts(family)), device, dtype),
        facts(generation_facts(family)) {}

  nlohmann::json facts;
};

}  // namespace megatron
