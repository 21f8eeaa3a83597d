#include "megatron/tokenizers/tokenizer_config.h"

#include <nlohmann/json.hpp>

#include "megatron/base/check.h"

namespace megatron {

std::string tokenizer_config_json(const std::filesystem::path& folder,
                                  std::optional<int64_t> model_max_length,
                                  const std::string& base) {
  using Json = nlohmann::ordered_json;
  const TokenizerConfig found = find_tokenizer(folder);
  const bool pipeline = found.tokenizer_type == "HuggingFaceTokenizer" &&
                        std::filesystem::path(found.tokenizer_model).filename() != "tekken.json";
  if (!pipeline && found.tokenizer_type != "GPT2BPETokenizer") return "";
  Json json =
      base.empty() ? Json::object() : Json::parse(base, nullptr, /*allow_exceptions=*/false);
  MEGATRON_CHECK(json.is_object(), folder.string(), "/tokenizer_config.json: is no JSON object");
  const auto tokenizer = make_tokenizer(found);
  const auto set_token = [&](const char* key, std::optional<int32_t> id) {
    if (id) json[key] = tokenizer->token_bytes(*id);
  };
  if (!json.contains("tokenizer_class"))
    json["tokenizer_class"] = pipeline ? "PreTrainedTokenizerFast" : "GPT2Tokenizer";
  set_token("bos_token", tokenizer->bos());
  set_token("eos_token", tokenizer->eod());
  set_token("pad_token", tokenizer->pad());
  if (model_max_length) json["model_max_length"] = *model_max_length;
  // Otherwise transformers removes spaces before punctuation in decoding.
  if (!json.contains("clean_up_tokenization_spaces")) json["clean_up_tokenization_spaces"] = false;
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace megatron
