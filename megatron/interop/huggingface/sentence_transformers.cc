#include "megatron/interop/huggingface/sentence_transformers.h"

#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/base/files.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

json read_settings(const fs::path& path, json::value_t expected) {
  constexpr uint64_t kMostSettings = uint64_t{1} << 20;
  json settings = json::parse(read_file(path, kMostSettings), nullptr, /*allow_exceptions=*/false);
  MEGATRON_CHECK(settings.type() == expected, path.string(), ": is not the JSON ",
                 expected == json::value_t::array ? "list of modules" : "object of settings",
                 " that sentence-transformers writes");
  return settings;
}

// Versions name the one of several modes, or switch each on or off.
bool is_mean(const fs::path& path) {
  const json settings = read_settings(path, json::value_t::object);
  std::string modes;
  for (const auto& [key, value] : settings.items()) {
    if (key == "pooling_mode" && value.is_string()) modes += cat(" ", value.get<std::string>());
    if (key.starts_with("pooling_mode_") && value == true)
      modes += cat(" ", key.substr(std::string("pooling_mode_").size()));
  }
  const bool mean = modes == " mean" || modes == " mean_tokens";
  MEGATRON_CHECK(mean || modes == " cls" || modes == " cls_token", path.string(), ": pooling by",
                 modes.empty() ? " nothing" : modes,
                 " is not built\nhint: mean_tokens and cls_token are");
  return mean;
}

}  // namespace

std::optional<SentenceTransformer> read_sentence_transformer(const fs::path& folder) {
  const fs::path modules = folder / "modules.json";
  if (!fs::exists(modules)) return std::nullopt;
  SentenceTransformer found;
  for (const json& module : read_settings(modules, json::value_t::array)) {
    const std::string type = module.is_object() ? module.value("type", "") : "";
    const std::string kind = type.substr(type.rfind('.') + 1);
    if (kind == "Pooling")
      found.mean = is_mean(folder / module.value("path", "") / "config.json");
    else if (kind == "Normalize")
      found.normalize = true;
    else
      MEGATRON_CHECK(kind == "Transformer", modules.string(), ": a module of the type \"", type,
                     "\" is not built\nhint: Transformer, Pooling and Normalize are; --pooling "
                     "leaves the file aside");
  }
  // The first that says it
  for (const auto& [file, key] : {std::pair{"sentence_bert_config.json", "max_seq_length"},
                                  {"tokenizer_config.json", "model_max_length"}}) {
    if (found.max_length || !fs::exists(folder / file)) continue;
    const json settings = read_settings(folder / file, json::value_t::object);
    MEGATRON_CHECK(std::string(key) != "max_seq_length" || !settings.value("do_lower_case", false),
                   (folder / file).string(),
                   ": do_lower_case is not built\nhint: --pooling leaves the file aside");
    if (const auto length = settings.find(key); length != settings.end())
      if (length->is_number_integer()) found.max_length = length->get<int64_t>();
  }
  return found;
}

}  // namespace megatron
