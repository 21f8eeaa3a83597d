#include "megatron/reporting/metrics_file.h"

#include <fstream>

#include "megatron/base/json_writer.h"

namespace megatron {

namespace {

bool ends_inside_a_line(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file || file.tellg() <= 0) return false;
  file.seekg(-1, std::ios::end);
  return file.get() != '\n';
}

}  // namespace

MetricsFile::MetricsFile(const std::filesystem::path& folder) : file_(folder / kMetricsName) {
  if (ends_inside_a_line(file_.path())) file_.append("\n");
}

void MetricsFile::record(const MetricsRecord& record) {
  JsonWriter json;
  json.begin_object().member("type", record.type()).member("time", record.time());
  for (const auto& [name, value] : record.members()) write_value(json.key(name), value);
  json.end_object();
  file_.append(json.text() + "\n");
}

}  // namespace megatron
