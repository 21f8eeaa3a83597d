#include "megatron/serving/server_metrics.h"

#include <array>

#include "megatron/base/check.h"
#include "megatron/reporting/prometheus_text.h"

namespace megatron {
namespace {

std::string seconds_text(int64_t ns) { return prometheus_number(static_cast<double>(ns) / 1e9); }

class Page {
 public:
  void begin(std::string_view name, std::string_view type, std::string_view help) {
    name_ = cat("megatron_", name);
    text_ += cat("# HELP ", name_, " ", help, "\n# TYPE ", name_, " ", type, "\n");
  }
  template <class T>
  void sample(T value, const std::string& labels = {}) {
    text_ += cat(name_, labels.empty() ? "" : "{" + labels + "}", " ", value, "\n");
  }
  template <class T>
  void gauge(std::string_view name, std::string_view help, T value) {
    begin(name, "gauge", help);
    sample(value);
  }
  void counter(std::string_view name, std::string_view help, uint64_t value) {
    begin(name, "counter", help);
    sample(value);
  }
  void histogram(std::string_view name, std::string_view help, const DurationHistogram& durations) {
    begin(name, "histogram", help);
    uint64_t sum = 0;
    for (size_t i = 0; i < DurationHistogram::kBuckets; ++i) {
      sum += durations.buckets()[i];
      text_ += cat(name_, "_bucket{",
                   prometheus_label("le", seconds_text(DurationHistogram::bound_ns(i))), "} ", sum,
                   "\n");
    }
    text_ += cat(name_, "_bucket{le=\"+Inf\"} ", durations.count(), "\n", name_, "_sum ",
                 seconds_text(durations.sum_ns()), "\n", name_, "_count ", durations.count(), "\n");
  }
  std::string take() { return std::move(text_); }

 private:
  std::string name_, text_;
};

void engine_state(const MetricsInput& input, Page& page) {
  const EngineStats& stats = input.engine;
  page.begin("build_info", "gauge", "What serves, in its labels; always 1");
  page.sample(1, cat(prometheus_label("version", input.version), ",",
                     prometheus_label("commit", input.commit), ",",
                     prometheus_label("model", input.model)));
  page.begin("engine_state", "gauge", "1 for the state that the engine is in");
  for (size_t i = 0; i < kNumEngineStates; ++i) {
    const auto state = static_cast<EngineState>(i);
    page.sample(state == stats.state ? 1 : 0, prometheus_label("state", name(state)));
  }
  page.gauge("weights_version", "Version of the weights that compute", stats.weights_version);
  page.gauge("requests_waiting", "Texts that wait for their first step: the length of the queue",
             stats.queued);
  page.gauge("requests_running", "Texts that are computed", stats.running);
  page.gauge("requests_preempted", "Texts that wait to go on after they were preempted",
             stats.preempted);
  page.gauge("requests_running_limit", "Most texts that run at a time", stats.max_running);
  page.gauge("requests_pending", "Requests that are read and not yet with the engine",
             input.pending);
  const int64_t blocks = stats.blocks_free + stats.blocks_held + stats.blocks_cached;
  const double use =
      blocks > 0 ? static_cast<double>(stats.blocks_held) / static_cast<double>(blocks) : 0.0;
  page.gauge("cache_usage_ratio", "Part of the cache's blocks that running texts hold",
             prometheus_number(use));
  page.begin("cache_blocks", "gauge",
             "Blocks of the cache: free, held by texts, or idle with a prefix");
  page.sample(stats.blocks_free, prometheus_label("state", "free"));
  page.sample(stats.blocks_held, prometheus_label("state", "held"));
  page.sample(stats.blocks_cached, prometheus_label("state", "cached"));
  page.gauge("cache_block_tokens", "Tokens of a block", stats.block_size);
}

void engine_work(const EngineStats& stats, Page& page) {
  page.counter("requests_submitted_total", "Texts that the engine took", stats.submitted);
  page.counter("requests_refused_total", "Texts that the engine refused", stats.refused);
  page.begin("requests_finished_total", "counter", "Texts that ended, by the reason");
  for (size_t i = 0; i < stats.finished.size(); ++i)
    page.sample(stats.finished[i], prometheus_label("reason", name(static_cast<FinishReason>(i))));
  page.counter("preemptions_total", "Texts that were preempted", stats.preemptions);
  page.counter("swapped_blocks_total", "Blocks that were copied to or from host memory",
               stats.swapped_blocks);
  page.counter("prompt_tokens_total", "Tokens of prompts", stats.prompt_tokens);
  page.counter("cached_tokens_total", "Tokens of prompts that the prefix cache had",
               stats.cached_tokens);
  page.counter("output_tokens_total", "Tokens that were generated", stats.output_tokens);
  page.counter("draft_tokens_total", "Guesses of next tokens that were computed", stats.drafts);
  page.counter("accepted_draft_tokens_total", "Guesses that are what the model drew",
               stats.accepted_drafts);
  page.counter("steps_total", "Steps of the engine", stats.steps);
  page.counter("step_tokens_total", "Tokens that steps computed", stats.step_tokens);
  page.counter("step_budget_tokens_total", "Tokens that steps had room for", stats.step_budget);
  page.histogram("queue_seconds", "From a request to its first step", stats.queue);
  page.histogram("first_token_seconds", "From a request to its first token", stats.first_token);
  page.histogram("token_gap_seconds", "Between two tokens of a text", stats.gap);
  page.histogram("request_seconds", "From a request to its last token", stats.whole);
  page.histogram("step_seconds", "Duration of a step", stats.step);
}

void http_work(const MetricsInput& input, Page& page) {
  const HttpCounts& http = input.http;
  page.begin("http_responses_total", "counter", "Responses by route and status");
  for (const auto& [key, count] : input.responses.all())
    page.sample(count, cat(prometheus_label("route", key.first), ",",
                           prometheus_label("status", cat(key.second))));
  page.gauge("http_connections", "Open connections", http.open);
  page.gauge("http_responding", "Requests that were read and not yet answered to the end",
             http.responding);
  page.counter("http_connections_accepted_total", "Connections", http.accepted);
  page.counter("http_connections_refused_total", "Connections beyond the limits", http.refused);
  page.counter("http_faults_total", "Requests that are no HTTP, too long or too late", http.faults);
  page.begin("http_aborted_total", "counter", "Responses that were cut off, by the cause");
  page.sample(http.client_gone, prometheus_label("cause", "client_gone"));
  page.sample(http.slow_readers, prometheus_label("cause", "slow_reader"));
  page.counter("http_received_bytes_total", "Bytes from clients", http.bytes_received);
  page.counter("http_sent_bytes_total", "Bytes to clients", http.bytes_sent);
}

}  // namespace

void ResponseCounts::count(const std::string& route, int status) {
  const std::lock_guard lock(mutex_);
  ++counts_[{route, status}];
}

std::map<std::pair<std::string, int>, uint64_t> ResponseCounts::all() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

std::string metrics_text(const MetricsInput& input) {
  Page page;
  engine_state(input, page);
  engine_work(input.engine, page);
  http_work(input, page);
  return page.take();
}

}  // namespace megatron
