#include "megatron/tokenizers/parse_json.h"

#include <nlohmann/json.hpp>
#include <string>

namespace megatron {
namespace {

// The error of this version of simdjson for an integer beyond 64 bits.
simdjson::error_code large_integer_error() {
  static const simdjson::error_code error = [] {
    simdjson::dom::parser parser;
    return parser.parse(std::string("123456789012345678901234567890")).error();
  }();
  return error;
}

}  // namespace

simdjson::error_code parse_json(simdjson::dom::parser& parser, std::string_view text, size_t room,
                                simdjson::dom::element& root) {
  const bool padded = room >= text.size() + simdjson::SIMDJSON_PADDING;
  simdjson::error_code error =
      parser.parse(text.data(), text.size(), /*realloc_if_needed=*/!padded).get(root);
  if (error == simdjson::NUMBER_ERROR || error == large_integer_error()) {
    // Such numbers should not invalidate a document; nlohmann reads them as floating point.
    const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
    if (!json.is_discarded()) {
      const std::string repaired = json.dump();
      error = parser.parse(repaired.data(), repaired.size(), /*realloc_if_needed=*/true).get(root);
    }
  }
  return error;
}

}  // namespace megatron
