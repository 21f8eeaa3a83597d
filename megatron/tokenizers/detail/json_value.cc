#include "megatron/tokenizers/detail/json_value.h"

#include "megatron/base/files.h"
#include "megatron/tokenizers/parse_json.h"

namespace megatron {

std::string_view json_type_name(dom::element_type type) {
  switch (type) {
    case dom::element_type::ARRAY:
      return "an array";
    case dom::element_type::OBJECT:
      return "an object";
    case dom::element_type::STRING:
      return "a string";
    case dom::element_type::BOOL:
      return "a boolean";
    case dom::element_type::NULL_VALUE:
      return "null";
    default:
      return "a number";
  }
}

JsonValue parse_json_object(dom::parser& parser, const std::filesystem::path& path) {
  return parse_json_object(parser, read_file(path), path.string());
}

JsonValue parse_json_object(dom::parser& parser, std::string_view text, const std::string& name) {
  dom::element root;
  const simdjson::error_code error = parse_json(parser, text, text.size(), root);
  MEGATRON_CHECK(error == simdjson::SUCCESS, name, ": not JSON: ", simdjson::error_message(error));
  MEGATRON_CHECK(root.is_object(), name, ": the file holds ", json_type_name(root.type()),
                 ", expected an object");
  return {root, name + ": "};
}

}  // namespace megatron
