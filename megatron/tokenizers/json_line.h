// One line of a JSON-lines file.
#pragma once

#include <simdjson.h>

#include <string>
#include <string_view>

namespace megatron {

// The document that `line` holds; valid until the parser's next document. `room` bytes may be read
// from the line's start. Integers beyond 64 bits become floating-point numbers. Throws Error,
// beginning with `where`, for what is no JSON; bytes that are not UTF-8 are left to the caller:
// `error` is simdjson::UTF8_ERROR then, else SUCCESS.
simdjson::dom::element parse_json_line(simdjson::dom::parser& parser, std::string_view line,
                                       size_t room, const std::string& where,
                                       simdjson::error_code& error);

}  // namespace megatron
