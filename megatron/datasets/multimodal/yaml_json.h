// YAML files of other programs, as JSON.
#pragma once

#include <string>
#include <string_view>

namespace megatron {

// The JSON text of a YAML document: plain scalars that read as null, a boolean or a number are
// those, quoted ones texts. Throws Error whose message starts with `where`, with the line.
std::string yaml_to_json(std::string_view text, const std::string& where);

}  // namespace megatron
