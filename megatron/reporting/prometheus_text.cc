#include "megatron/reporting/prometheus_text.h"

#include <cmath>

#include "megatron/base/check.h"
#include "megatron/base/json_writer.h"

namespace megatron {

std::string prometheus_label(std::string_view name, std::string_view value) {
  std::string out = cat(name, "=\"");
  for (const char c : value) {
    if (c == '\\' || c == '"') out += '\\';
    c == '\n' ? out += "\\n" : out += c;
  }
  return out + "\"";
}

std::string prometheus_number(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "+Inf" : "-Inf";
  JsonWriter json;
  json.value(value);
  return json.text();
}

}  // namespace megatron
