#include "megatron/tokenizers/rendered_text.h"

#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/tokenizers/detail/pipeline_tokenizer.h"

namespace megatron {
namespace {

using Json = nlohmann::ordered_json;

const PipelineTokenizer* hiding(const Tokenizer& tokenizer) {
  const auto* own = dynamic_cast<const PipelineTokenizer*>(&tokenizer);
  return own != nullptr && own->text_spells_no_special() ? own : nullptr;
}

void hide(const PipelineTokenizer& tokenizer, Json& value) {
  if (value.is_string()) {
    value = tokenizer.with_marks(value.get<std::string>(), kHidingMark);
  } else if (value.is_object()) {
    Json out = Json::object();
    for (auto& [key, member] : value.items()) {
      hide(tokenizer, member);
      out[tokenizer.with_marks(key, kHidingMark)] = std::move(member);
    }
    value = std::move(out);
  } else if (value.is_array()) {
    for (Json& element : value) hide(tokenizer, element);
  }
}

}  // namespace

bool text_spells_no_special(const Tokenizer& tokenizer) { return hiding(tokenizer) != nullptr; }

std::vector<int32_t> encode_rendered(const Tokenizer& tokenizer, std::string_view text) {
  const PipelineTokenizer* own = hiding(tokenizer);
  return own == nullptr ? tokenizer.encode(text) : own->encode_with_special(text, kHidingMark);
}

std::string hide_special_tokens(const Tokenizer& tokenizer, const std::string& json) {
  const PipelineTokenizer* own = hiding(tokenizer);
  if (own == nullptr || json.empty()) return json;
  Json value = Json::parse(json, nullptr, /*allow_exceptions=*/false);
  MEGATRON_CHECK(!value.is_discarded(), "messages are no JSON");
  hide(*own, value);
  return value.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace megatron
