// Where and how a job runs: hosts and devices of all ranks, launcher and attempt, versions, seconds
// per stage of the start-up; recorded in the run's folder.
#pragma once

#include <chrono>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "megatron/comm/modules/encoder_ranks.h"
#include "megatron/reporting/metrics_sink.h"
#include "megatron/runtime/job.h"

namespace megatron {

using Versions = std::vector<std::pair<std::string, std::string>>;

// Host of a rank.
struct RankHost {
  std::string host;
  std::string device;  // "NVIDIA H200", "cpu"
  std::string driver;  // version of NVIDIA's kernel module; empty: none is loaded
  int cores = 0;       // cores that this process may use
};
RankHost this_rank_host(const std::string& device);

// Collective over job.agreement: the first rank gets the hosts of all ranks, in rank order; the
// others nothing.
std::vector<RankHost> gather_hosts(const Job& job, const RankHost& mine);

// A JSON array with an object for each run of ranks on one host: host, ranks ("0-7"), device,
// driver, cores.
std::string hosts_json(const std::vector<RankHost>& ranks);

// Adds these facts to a "start" record. `libraries`: names and versions.
void add_origin(MetricsRecord& record, const Job& job, const ParallelConfig& parallel,
                const EncoderRanks& encoder, const std::vector<RankHost>& ranks,
                const Versions& libraries);

// Seconds of the stages of start-up, in order, counted from the start of the process.
class StartClock {
 public:
  explicit StartClock(std::string_view first_stage);  // ends now
  // Runs `body` as a stage.
  template <class Body>
  auto stage(std::string_view name, Body body) {
    const StageEnd end{*this, std::string(name), std::chrono::steady_clock::now()};
    return body();
  }
  // Ends a stage that began at the end of the previous one.
  void end_stage(std::string_view name);
  std::string json() const;  // {"tokenizer": 0.1, ...}

 private:
  struct StageEnd {
    StartClock& clock;
    std::string name;
    std::chrono::steady_clock::time_point begin;
    ~StageEnd() { clock.add(name, begin); }
  };
  void add(const std::string& name, std::chrono::steady_clock::time_point begin);

  std::vector<std::pair<std::string, double>> stages_;
  std::chrono::steady_clock::time_point last_end_;
};

}  // namespace megatron
