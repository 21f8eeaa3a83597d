// Many requests over HTTP through the engine with a fake model, a good part of them given up by
// their clients: nothing is left of them.
// MEGATRON_SOAK_REQUESTS: how many; `make test` has a small form.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <thread>

#include "megatron/base/check.h"
#include "megatron/inference/engine_thread.h"
#include "megatron/serving/api_server.h"
#include "raw_client.h"
#include "tests/unit/scheduling/fake_runner.h"

namespace megatron {
namespace {

int64_t soak_requests() {
  const char* const text = std::getenv("MEGATRON_SOAK_REQUESTS");
  return text != nullptr ? std::atoll(text) : 2000;
}

// The word after `name` of a file of /proc.
int64_t field_of(const char* path, const std::string& name) {
  std::ifstream file(path);
  int64_t value = 0;
  for (std::string word; file >> word;)
    if (word == name && file >> value) break;
  return value;
}
int64_t soak_resident_kib() { return field_of("/proc/self/status", "VmRSS:"); }
int64_t num_threads() { return field_of("/proc/self/status", "Threads:"); }
int64_t num_descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return std::distance(begin(all), end(all));
}

FakeOptions soaked_model() {
  FakeOptions options;
  options.facts = {.vocab_size = 257,
                   .max_positions = 128,
                   .slots = 32,
                   .block_size = 8,
                   .device_blocks = 18,
                   .host_blocks = 10,
                   .weights_version = 1};
  return options;
}

// The engine and its server; what it holds is checked when it is idle.
class SoakedServer {
 public:
  explicit SoakedServer(bool check_invariants)
      : runner_(soaked_model(), clock_),
        tokenizer_(make_byte_tokenizer()),
        engine_(runner_, nullptr, tokenizer_.get(), clock_,
                {.scheduler = {.max_step_tokens = 256, .max_waiting = 64},
                 .check_invariants = check_invariants}),
        thread_(engine_) {
    model_.name = "soaked";
    model_.tokenizer = tokenizer_.get();
    model_.end_tokens = {*tokenizer_->eod()};
    model_.limits = engine_.limits();
    ServeConfig config;
    config.port = 0;
    server_ = std::make_unique<ApiServer>(config, ServeLimits{}, thread_, model_);
    thread_.start();
    server_->start();
    // Requests are refused before.
    while (engine_.stats().state == EngineState::kStarting)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  ~SoakedServer() {
    server_->stop();
    thread_.stop();
  }

  int port() const { return server_->port(); }
  EngineStats stats() const { return engine_.stats(); }
  bool is_idle() const {
    const EngineStats stats = engine_.stats();
    return server_->num_open() == 0 && server_->counts().open == 0 &&
           stats.queued + stats.running + stats.preempted == 0 && stats.blocks_held == 0;
  }
  // Connections whose clients left before they were accepted are in no count but that of
  // descriptors.
  void wait_until_idle(int64_t descriptors) const {
    for (int i = 0; i < 4000 && !(is_idle() && num_descriptors() == descriptors); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }

 private:
  static std::unique_ptr<Tokenizer> make_byte_tokenizer() {
    TokenizerConfig config;
    config.tokenizer_type = "ByteLevelTokenizer";
    return make_tokenizer(config);
  }

  MonotonicClock clock_;
  FakeRunner runner_;
  std::unique_ptr<Tokenizer> tokenizer_;
  Engine engine_;
  EngineThread thread_;
  ServedModel model_;
  std::unique_ptr<ApiServer> server_;
};

// Asks until `left` is used up. A fifth of the requests is given up: before, in and after their
// responses.
class SoakingClient {
 public:
  SoakingClient(int port, uint32_t seed) : port_(port), random_(seed) {}

  void run(std::atomic<int64_t>& left) {
    while (left.fetch_sub(1) > 0) {
      if (!client_ || below(50) == 0) client_ = std::make_unique<RawClient>(port_);
      const bool gives_up = below(5) == 0;
      if (!client_->send(post_request("/v1/completions", body(gives_up)))) {
        client_.reset();
        continue;
      }
      if (gives_up) {
        give_up();
        continue;
      }
      const RawResponse response = client_->response(30);
      ++statuses[response.status];
      if (!response.complete) client_.reset();
    }
    client_.reset();
  }

  std::map<int, int64_t> statuses;

 private:
  int below(int n) { return static_cast<int>(random_() % static_cast<uint32_t>(n)); }

  std::string body(bool is_long) {
    std::string prompt;
    for (int i = 10 + below(40), stem = below(6); i > 0; --i)
      prompt += static_cast<char>(i > 20 ? 'a' + (stem + i) % 26 : 'a' + below(26));
    return cat("{\"prompt\":\"", prompt, "\",\"max_tokens\":", (is_long ? 60 : 1) + below(12),
               ",\"n\":", is_long ? 4 : 1 + below(2),
               ",\"stream\":", below(2) == 0 ? "true" : "false", ",\"logprobs\":", below(3),
               is_long ? "" : ",\"stop\":[\"q\",\"zz\"]", ",\"priority\":", below(3), "}");
  }
  void give_up() {
    std::string some;
    if (below(4) == 0) client_->read_some(some, 0.002, 1 + static_cast<size_t>(below(200)));
    below(2) == 0 ? client_->reset() : client_->close();
    client_.reset();
    ++statuses[-1];
  }

  int port_;
  std::mt19937 random_;
  std::unique_ptr<RawClient> client_;
};

// Growth over the samples by a straight line, as a share of their mean.
double relative_growth(const std::vector<int64_t>& samples) {
  const auto n = static_cast<double>(samples.size());
  double sum = 0, moment = 0, squares = 0;
  for (size_t i = 0; i < samples.size(); ++i) {
    const double x = static_cast<double>(i) - (n - 1) / 2;
    sum += static_cast<double>(samples[i]);
    moment += x * static_cast<double>(samples[i]);
    squares += x * x;
  }
  return moment / squares * n / (sum / n);
}

TEST(ServingSoak, LeavesNothingBehind) {
  const int64_t requests = soak_requests();
  const bool whole = requests >= 100'000;
  SoakedServer server(!whole);
  const int64_t descriptors = num_descriptors(), threads = num_threads();
  std::atomic<int64_t> left = requests;
  std::vector<SoakingClient> clients;
  for (uint32_t seed = 0; seed < 8; ++seed) clients.emplace_back(server.port(), seed);
  std::vector<std::thread> running;
  for (SoakingClient& client : clients) running.emplace_back([&] { client.run(left); });
  std::vector<int64_t> resident;  // after the first fifth
  for (int64_t next = requests * 4 / 5; left > 0;) {
    std::this_thread::sleep_for(std::chrono::milliseconds(whole ? 50 : 5));
    if (left > next) continue;
    resident.push_back(soak_resident_kib());
    next -= requests / 100;
  }
  for (std::thread& thread : running) thread.join();
  server.wait_until_idle(descriptors);
  EXPECT_TRUE(server.is_idle());
  EXPECT_EQ(num_threads(), threads);
  EXPECT_EQ(num_descriptors(), descriptors);
  std::map<int, int64_t> statuses;
  for (const SoakingClient& client : clients)
    for (const auto& [status, count] : client.statuses) statuses[status] += count;
  const EngineStats stats = server.stats();
  const uint64_t cancelled = stats.finished[static_cast<size_t>(FinishReason::kCancelled)];
  std::printf("  %ld requests: %ld answered, %ld given up; %lu choices cancelled, %lu preempted; ",
              static_cast<long>(requests), static_cast<long>(statuses[200]),
              static_cast<long>(statuses[-1]), static_cast<unsigned long>(cancelled),
              static_cast<unsigned long>(stats.preemptions));
  std::printf("%ld KiB resident, growth %.2f%%\n", static_cast<long>(soak_resident_kib()),
              100 * relative_growth(resident));
  EXPECT_EQ(statuses[200] + statuses[-1], requests);
  EXPECT_GT(cancelled, 0u);
  EXPECT_GT(stats.preemptions, 0u);
  EXPECT_EQ(stats.state, EngineState::kRunning);
  if (whole) {
    EXPECT_LT(relative_growth(resident), 0.01);
  }
}

}  // namespace
}  // namespace megatron
