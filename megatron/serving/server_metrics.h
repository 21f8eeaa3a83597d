// What GET /metrics says, in Prometheus' text format.
// Format: https://prometheus.io/docs/instrumenting/exposition_formats/
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "megatron/scheduling/commands.h"
#include "megatron/serving/http/http_server.h"

namespace megatron {

// Responses by route and status. Thread safe.
class ResponseCounts {
 public:
  // `route` is one of the server's own; "": none of them.
  void count(const std::string& route, int status);
  std::map<std::pair<std::string, int>, uint64_t> all() const;

 private:
  mutable std::mutex mutex_;
  std::map<std::pair<std::string, int>, uint64_t> counts_;
};

struct MetricsInput {
  const EngineStats& engine;
  const HttpCounts& http;
  const ResponseCounts& responses;
  std::string model, version, commit;
  size_t pending = 0;  // requests that are being read
};

std::string metrics_text(const MetricsInput& input);

}  // namespace megatron
