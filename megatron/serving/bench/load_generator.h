// Sends requests at a server as many clients would, and measures what they see.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "megatron/serving/http/http_client.h"
#include "megatron/serving/service.h"

namespace megatron {

enum class ArrivalPattern : uint8_t { kPoisson, kConstant };

struct ClientLoad {
  int64_t num_requests = 100;
  int64_t num_warmup = 0;     // before them, not measured
  int64_t concurrency = 16;   // requests in flight at most
  double request_rate = 0.0;  // arrivals a second; 0: as soon as one may begin
  ArrivalPattern arrivals = ArrivalPattern::kPoisson;  // at a rate
  int64_t prompt_tokens = 512;
  int64_t output_tokens = 128;
  int64_t prefix_tokens = 0;  // of the prompt, which all requests share
  double temperature = 0.0;
  bool ignore_eos = true;
  uint64_t seed = 1234;
  int64_t request_timeout_ns = 600'000'000'000;
};

// What one client saw. Times are nanoseconds since the first request was due.
struct RequestTimes {
  int64_t start_ns = 0, first_token_ns = -1, end_ns = -1;
  std::vector<int64_t> token_ns;  // one entry for each piece that had text
  int64_t prompt_tokens = 0, output_tokens = 0;
  std::string problem;  // empty: none
};

// What requests go to. All calls come on one thread, and all callbacks are on it.
class LoadTarget {
 public:
  struct Callbacks {
    std::function<void(int64_t tokens)> on_piece;  // tokens: 0: unknown
    std::function<void(int64_t prompt_tokens, int64_t output_tokens, const std::string& problem)>
        on_end;
  };
  virtual ~LoadTarget() = default;
  // The ids a prompt may have: [first, end).
  virtual std::pair<int32_t, int32_t> prompt_ids() const = 0;
  virtual void start(std::vector<int32_t> prompt, const ClientLoad& options, uint64_t seed,
                     Callbacks callbacks) = 0;
  virtual void after(int64_t ns, std::function<void()> work) = 0;
  // Until nothing is open and no work is left.
  virtual void run() = 0;
};

// POST /v1/completions of any server of the OpenAI API that takes token ids. `key`: of the API;
// empty: none. Throws Error if the server does not answer.
std::unique_ptr<LoadTarget> make_http_target(const HttpUrl& url, const std::string& ca_file,
                                             const std::string& key, const std::string& model);
// An engine of this process, without HTTP. Takes the engine's events from now on.
std::unique_ptr<LoadTarget> make_engine_target(EngineService& engine, int64_t vocab_size);

struct LoadResult {
  std::vector<RequestTimes> requests;  // in the order of their starts
  int64_t wall_ns = 0;                 // from the first start to the last end
};

// `progress`: called now and then with the number of requests that have ended.
LoadResult run_load(LoadTarget& target, const ClientLoad& options,
                    const std::function<void(int64_t)>& progress = {});

// Mean and quantiles of one quantity, in milliseconds.
struct LatencySummary {
  double mean = 0.0, p50 = 0.0, p90 = 0.0, p99 = 0.0, max = 0.0;
};
LatencySummary summarise(std::vector<int64_t> ns);

struct LoadSummary {
  int64_t completed = 0, failed = 0;
  int64_t prompt_tokens = 0, output_tokens = 0;
  double seconds = 0.0;
  double requests_per_second = 0.0, output_tokens_per_second = 0.0, total_tokens_per_second = 0.0;
  // To the first token; between tokens; mean time of a token after the first, by request; whole.
  LatencySummary first_token, gap, per_token, whole;
  std::vector<std::string> problems;  // each once
};
LoadSummary summarise(const LoadResult& result);

std::string summary_text(const LoadSummary& summary);
std::string summary_json(const LoadSummary& summary, const ClientLoad& options);

}  // namespace megatron
