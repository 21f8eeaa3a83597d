#include "megatron/reporting/trace.h"

#include <unistd.h>

#include <algorithm>

#include "megatron/base/files.h"
#include "megatron/base/json_writer.h"

namespace megatron {

void Trace::write(const std::filesystem::path& path) const {
  Clock::time_point zero = Clock::time_point::max();
  for (const Event& event : events_) zero = std::min(zero, event.begin);
  const auto micros = [](Clock::duration d) {
    return std::chrono::duration<double, std::micro>(d).count();
  };
  JsonWriter json;
  json.begin_object().key("traceEvents").begin_array();
  for (const Event& event : events_) {
    json.begin_object()
        .member("name", event.name)
        .member("ph", "X")
        .member("pid", getpid())
        .member("tid", 0);
    json.member("ts", micros(event.begin - zero))
        .member("dur", micros(event.end - event.begin))
        .end_object();
  }
  json.end_array().member("displayTimeUnit", "ms").end_object();
  write_file_atomically(path, json.text() + "\n");
}

}  // namespace megatron
