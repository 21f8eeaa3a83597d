#include "megatron/training/metrics_file.h"

#include <cerrno>
#include <chrono>
#include <cstring>

#include "megatron/base/check.h"
#include "megatron/base/json_writer.h"
#include "megatron/base/log.h"

namespace megatron {

namespace {

bool ends_inside_a_line(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file || file.tellg() <= 0) return false;
  file.seekg(-1, std::ios::end);
  return file.get() != '\n';
}

}  // namespace

MetricsFile::MetricsFile(const std::filesystem::path& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  MEGATRON_CHECK(!error, folder.string(), " cannot be created: ", error.message());
  const std::filesystem::path path = folder / kMetricsName;
  const bool broken = ends_inside_a_line(path);
  file_.open(path, std::ios::binary | std::ios::app);
  MEGATRON_CHECK(file_, path.string(), " cannot be written: ", std::strerror(errno));
  if (broken) file_ << '\n' << std::flush;
}

JsonWriter MetricsFile::begin(std::string_view type) const {
  const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
  JsonWriter record;
  record.begin_object().member("type", type).member("time", now.count());
  return record;
}

void MetricsFile::write(JsonWriter& record) {
  record.end_object();
  if (!file_.is_open()) return;
  file_ << record.text() + "\n" << std::flush;
  if (!file_) {
    log_warning(cat(kMetricsName, " cannot be written any more (", std::strerror(errno), "): metrics go to the log only"));
    file_.close();
  }
}

}  // namespace megatron
