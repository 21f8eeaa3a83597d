// JSON documents whose integers may be beyond 64 bits, as Python writes them.
#pragma once

#include <simdjson.h>

#include <string_view>

namespace megatron {

// Parses `text`; the result is valid until the parser's next document. `room` bytes may be read
// from its start. Integers beyond 64 bits become floating-point numbers.
simdjson::error_code parse_json(simdjson::dom::parser& parser, std::string_view text, size_t room,
                                simdjson::dom::element& root);

}  // namespace megatron
