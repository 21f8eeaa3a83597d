#include "megatron/serving/bench/load_generator.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <random>
#include <set>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/base/json_writer.h"

namespace megatron {
namespace {

int64_t load_clock_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Starts requests when they are due and there is room, and notes their times.
class LoadRun {
 public:
  // `warms_up`: prompts have the same prefix and are others behind it: a cache has none of those
  // that are measured.
  LoadRun(LoadTarget& target, const ClientLoad& options, std::function<void(int64_t)> progress,
          bool warms_up = false)
      : target_(target), options_(options), progress_(std::move(progress)), random_(options.seed) {
    const int64_t prefix = std::min(options.prefix_tokens, options.prompt_tokens);
    for (int64_t i = 0; i < prefix; ++i) prefix_.push_back(draw_id());
    if (warms_up) random_.seed(options.seed + 1);
  }

  LoadResult run(int64_t count) {
    requests_.assign(static_cast<size_t>(count), {});
    next_ = open_ = ended_ = 0;
    begin_ = load_clock_ns();
    if (options_.request_rate > 0.0)
      arrive();
    else
      fill();
    target_.run();
    LoadResult result{std::move(requests_), 0};
    int64_t first = INT64_MAX, last = 0;
    for (const RequestTimes& request : result.requests) {
      first = std::min(first, request.start_ns);
      last = std::max(last, request.end_ns);
    }
    result.wall_ns = std::max<int64_t>(0, last - first);
    return result;
  }

 private:
  int32_t draw_id() {
    const auto [first, end] = target_.prompt_ids();
    return first + static_cast<int32_t>(random_() % static_cast<uint64_t>(end - first));
  }
  // Arrivals do not wait for the server: those beyond the concurrency wait for their turn.
  void arrive() {
    ++due_;
    fill();
    if (due_ >= static_cast<int64_t>(requests_.size())) return;
    arrival_ns_ += std::llround(draw_gap() / options_.request_rate * 1e9);
    const int64_t wait = begin_ + arrival_ns_ - load_clock_ns();
    target_.after(std::max<int64_t>(0, wait), [this] { arrive(); });
  }
  // Time to the next arrival, as a multiple of the mean.
  double draw_gap() {
    if (options_.arrivals == ArrivalPattern::kConstant) return 1.0;
    return -std::log((static_cast<double>(random_() >> 11) + 1.0) / 9007199254740993.0);  // (0, 1]
  }
  void fill() {
    const int64_t due = options_.request_rate > 0.0 ? due_ : static_cast<int64_t>(requests_.size());
    while (next_ < due && open_ < options_.concurrency) start(static_cast<size_t>(next_++));
  }
  void start(size_t index) {
    std::vector<int32_t> prompt = prefix_;
    while (static_cast<int64_t>(prompt.size()) < options_.prompt_tokens)
      prompt.push_back(draw_id());
    const uint64_t seed = random_() & ((uint64_t{1} << 48) - 1);
    ++open_;
    requests_[index].start_ns = load_clock_ns() - begin_;
    target_.start(std::move(prompt), options_, seed,
                  {.on_piece = [this, index](int64_t) { note_piece(index); },
                   .on_end =
                       [this, index](int64_t prompt_tokens, int64_t output_tokens,
                                     const std::string& problem) {
                         end(index, prompt_tokens, output_tokens, problem);
                       }});
  }
  void note_piece(size_t index) {
    RequestTimes& request = requests_[index];
    const int64_t time = load_clock_ns() - begin_;
    if (request.first_token_ns < 0) request.first_token_ns = time;
    request.token_ns.push_back(time);
  }
  void end(size_t index, int64_t prompt_tokens, int64_t output_tokens, const std::string& problem) {
    RequestTimes& request = requests_[index];
    request.end_ns = load_clock_ns() - begin_;
    request.prompt_tokens = prompt_tokens;
    request.output_tokens = output_tokens;
    request.problem = problem;
    --open_;
    ++ended_;
    if (progress_) progress_(ended_);
    fill();
  }

  LoadTarget& target_;
  const ClientLoad& options_;
  std::function<void(int64_t)> progress_;
  std::mt19937_64 random_;
  std::vector<int32_t> prefix_;
  std::vector<RequestTimes> requests_;
  int64_t begin_ = 0, arrival_ns_ = 0, due_ = 0, next_ = 0, open_ = 0, ended_ = 0;
};

void write_latency(const char* name, const LatencySummary& summary, JsonWriter& json) {
  json.key(name)
      .begin_object()
      .member("mean", summary.mean)
      .member("p50", summary.p50)
      .member("p90", summary.p90)
      .member("p99", summary.p99)
      .member("max", summary.max)
      .end_object();
}

}  // namespace

LoadResult run_load(LoadTarget& target, const ClientLoad& options,
                    const std::function<void(int64_t)>& progress) {
  ClientLoad warmup = options;
  warmup.request_rate = 0.0;
  if (options.num_warmup > 0)
    LoadRun(target, warmup, {}, /*warms_up=*/true).run(options.num_warmup);
  return LoadRun(target, options, progress).run(options.num_requests);
}

LatencySummary summarise(std::vector<int64_t> ns) {
  if (ns.empty()) return {};
  std::sort(ns.begin(), ns.end());
  const auto quantile = [&](double q) {
    // Linear between the two values around it, as NumPy's.
    const double at = q * static_cast<double>(ns.size() - 1);
    const size_t below = static_cast<size_t>(at);
    const size_t above = std::min(below + 1, ns.size() - 1);
    const double part = at - static_cast<double>(below);
    return (static_cast<double>(ns[below]) * (1.0 - part) + static_cast<double>(ns[above]) * part) /
           1e6;
  };
  const double sum = std::accumulate(ns.begin(), ns.end(), 0.0);
  return {sum / static_cast<double>(ns.size()) / 1e6, quantile(0.5), quantile(0.9), quantile(0.99),
          static_cast<double>(ns.back()) / 1e6};
}

LoadSummary summarise(const LoadResult& result) {
  LoadSummary summary;
  std::vector<int64_t> first, gap, per_token, whole;
  std::set<std::string> problems;
  for (const RequestTimes& request : result.requests) {
    if (!request.problem.empty()) {
      ++summary.failed;
      problems.insert(request.problem);
      continue;
    }
    ++summary.completed;
    summary.prompt_tokens += request.prompt_tokens;
    summary.output_tokens += request.output_tokens;
    whole.push_back(request.end_ns - request.start_ns);
    if (request.first_token_ns < 0) continue;
    first.push_back(request.first_token_ns - request.start_ns);
    for (size_t i = 1; i < request.token_ns.size(); ++i)
      gap.push_back(request.token_ns[i] - request.token_ns[i - 1]);
    if (request.output_tokens > 1)
      per_token.push_back((request.end_ns - request.first_token_ns) / (request.output_tokens - 1));
  }
  summary.problems.assign(problems.begin(), problems.end());
  summary.seconds = static_cast<double>(result.wall_ns) / 1e9;
  if (summary.seconds > 0.0) {
    summary.requests_per_second = static_cast<double>(summary.completed) / summary.seconds;
    summary.output_tokens_per_second = static_cast<double>(summary.output_tokens) / summary.seconds;
    summary.total_tokens_per_second =
        static_cast<double>(summary.prompt_tokens + summary.output_tokens) / summary.seconds;
  }
  summary.first_token = summarise(std::move(first));
  summary.gap = summarise(std::move(gap));
  summary.per_token = summarise(std::move(per_token));
  summary.whole = summarise(std::move(whole));
  return summary;
}

std::string summary_text(const LoadSummary& summary) {
  std::string text =
      cat("requests            ", summary.completed, " completed, ", summary.failed, " failed, in ",
          format_fixed(summary.seconds, 2), " s\n", "throughput          ",
          format_fixed(summary.requests_per_second, 2), " requests/s, ",
          format_fixed(summary.output_tokens_per_second, 1), " generated tokens/s, ",
          format_fixed(summary.total_tokens_per_second, 1), " tokens/s with prompts\n",
          "milliseconds            mean       p50       p90       p99       max\n");
  const auto row = [&](std::string name, const LatencySummary& latency) {
    name.resize(18, ' ');
    text += name;
    for (const double value : {latency.mean, latency.p50, latency.p90, latency.p99, latency.max}) {
      const std::string number = format_fixed(value, 2);
      text += std::string(10 - std::min<size_t>(10, number.size()), ' ') + number;
    }
    text += "\n";
  };
  row("to first token", summary.first_token);
  row("between tokens", summary.gap);
  row("per token", summary.per_token);
  row("whole request", summary.whole);
  for (const std::string& problem : summary.problems) text += cat("problem: ", problem, "\n");
  text.pop_back();
  return text;
}

std::string summary_json(const LoadSummary& summary, const ClientLoad& options) {
  JsonWriter json(2);
  json.begin_object()
      .member("num_requests", options.num_requests)
      .member("concurrency", options.concurrency)
      .member("request_rate", options.request_rate)
      .member("prompt_tokens_each", options.prompt_tokens)
      .member("output_tokens_each", options.output_tokens)
      .member("completed", summary.completed)
      .member("failed", summary.failed)
      .member("seconds", summary.seconds)
      .member("prompt_tokens", summary.prompt_tokens)
      .member("output_tokens", summary.output_tokens)
      .member("requests_per_second", summary.requests_per_second)
      .member("output_tokens_per_second", summary.output_tokens_per_second)
      .member("total_tokens_per_second", summary.total_tokens_per_second);
  write_latency("first_token_ms", summary.first_token, json);
  write_latency("gap_ms", summary.gap, json);
  write_latency("per_token_ms", summary.per_token, json);
  write_latency("whole_ms", summary.whole, json);
  json.member("problems", summary.problems);
  return json.end_object().text();
}

}  // namespace megatron
