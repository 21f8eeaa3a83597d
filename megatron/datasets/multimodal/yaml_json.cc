#include "megatron/datasets/multimodal/yaml_json.h"

#include <yaml-cpp/yaml.h>

#include <cstdint>
#include <nlohmann/json.hpp>

#include "megatron/base/check.h"

namespace megatron {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kMostDepth = 64;
constexpr int64_t kMostNodes = 4'000'000;  // with those that aliases repeat

Json plain_scalar(const std::string& text) {
  if (text.empty() || text == "~" || text == "null" || text == "Null" || text == "NULL") return {};
  if (text == "true" || text == "True" || text == "TRUE") return true;
  if (text == "false" || text == "False" || text == "FALSE") return false;
  const Json number = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  return number.is_number() ? number : Json(text);
}

Json json_of(const YAML::Node& node, int depth, int64_t& nodes, const std::string& where) {
  MEGATRON_CHECK(++nodes <= kMostNodes, where, ": has more than ", kMostNodes, " values");
  MEGATRON_CHECK(depth < kMostDepth, where, ":", node.Mark().line + 1, ": nested more than ",
                 kMostDepth, " deep");
  switch (node.Type()) {
    case YAML::NodeType::Scalar:
      return node.Tag() == "!" ? Json(node.Scalar()) : plain_scalar(node.Scalar());
    case YAML::NodeType::Sequence: {
      Json out = Json::array();
      for (const YAML::Node& item : node) out.push_back(json_of(item, depth + 1, nodes, where));
      return out;
    }
    case YAML::NodeType::Map: {
      Json out = Json::object();
      for (const auto& pair : node) {
        MEGATRON_CHECK(pair.first.IsScalar(), where, ":", pair.first.Mark().line + 1,
                       ": a name that is no text");
        out[pair.first.Scalar()] = json_of(pair.second, depth + 1, nodes, where);
      }
      return out;
    }
    default:
      return {};
  }
}

}  // namespace

std::string yaml_to_json(std::string_view text, const std::string& where) {
  YAML::Node node;
  try {
    node = YAML::Load(std::string(text));
  } catch (const YAML::Exception& error) {
    throw_error(cat(where, ":", error.mark.line + 1, ": no YAML: ", error.msg));
  }
  int64_t nodes = 0;
  return json_of(node, 0, nodes, where).dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace megatron
