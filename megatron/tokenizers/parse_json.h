// JSON documents whose integers may be beyond 64 bits, as Python writes them.
#pragma once

#include <simdjson.h>

#include <string>
#include <string_view>

namespace megatron {

// The document that `text` holds; valid until the parser's next one. `room` bytes may be read from
// its start. Integers beyond 64 bits become floating-point numbers.
simdjson::error_code parse_json(simdjson::dom::parser& parser, std::string_view text, size_t room,
                                simdjson::dom::element& root);

// One line of a JSON-lines file: the document that `line` holds; valid until the parser's next document. `room` bytes may be read
// from the line's start. Integers beyond 64 bits become floating-point numbers. Throws Error,
// beginning with `where`, for what is no JSON; bytes that are not UTF-8 are left to the caller:
// `error` is simdjson::UTF8_ERROR then, else SUCCESS.
simdjson::dom::element parse_json_line(simdjson::dom::parser& parser, std::string_view line,
                                       size_t room, const std::string& where,
                                       simdjson::error_code& error);

}  // namespace megatron
