#include "megatron/training/run_origin.h"

#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/base/json_writer.h"
#include "megatron/base/process.h"
#include "megatron/base/threads.h"
#include "megatron/reporting/build_commit.h"

namespace megatron {

namespace {

// "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  ...": the first word of digits and
// dots.
std::string driver_version() {
  std::ifstream file("/proc/driver/nvidia/version");
  std::string line;
  std::getline(file, line);
  std::istringstream words(line);
  for (std::string word; words >> word;)
    if (word.find('.') != std::string::npos &&
        word.find_first_not_of("0123456789.") == std::string::npos)
      return word;
  return {};
}

// Time since this process was started, by the kernel's start time (1/100 s).
double process_age_seconds() {
  std::ifstream file("/proc/self/stat");
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  // The process name may contain blanks
  std::istringstream fields(text.substr(std::min(text.size(), text.rfind(')') + 1)));
  std::string skipped;
  for (int i = 0; i < 19; ++i) fields >> skipped;
  double ticks = 0;
  timespec now{};
  if (!(fields >> ticks) || clock_gettime(CLOCK_BOOTTIME, &now) != 0) return 0;
  const double seconds = static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
  return std::max(0.0, seconds - ticks / static_cast<double>(sysconf(_SC_CLK_TCK)));
}

std::string command_line() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(file)), {});
  while (!text.empty() && text.back() == '\0') text.pop_back();
  std::replace(text.begin(), text.end(), '\0', ' ');
  return text;
}

std::string object_json(const Versions& members) {
  JsonWriter json;
  json.begin_object();
  for (const auto& [name, value] : members) json.member(name, value);
  return json.end_object().text();
}

std::string mesh_json(const Mesh& mesh, const EncoderRanks& encoder) {
  JsonWriter json;
  json.begin_object();
  for (const auto& [name, axis] :
       {std::pair{"tensor", Axis::kTensor}, std::pair{"context", Axis::kContext},
        std::pair{"data", Axis::kData}, std::pair{"pipeline", Axis::kPipeline}})
    json.member(name, mesh.group_size({axis}));
  if (encoder.any())
    json.member("encoder_tensor", encoder.tensor).member("encoder_data", encoder.data);
  return json.end_object().text();
}

}  // namespace

RankHost this_rank_host(const std::string& device) {
  return {machine_name(), device, driver_version(), available_cores()};
}

std::vector<RankHost> gather_hosts(const Job& job, const RankHost& mine) {
  if (job.agreement == nullptr) return {mine};
  JsonWriter json;
  json.begin_array()
      .value(mine.host)
      .value(mine.device)
      .value(mine.driver)
      .value(mine.cores)
      .end_array();
  std::vector<RankHost> ranks;
  for (const std::string& text : job.agreement->gather(json.text())) {
    const auto values = nlohmann::json::parse(text);
    ranks.push_back({values.at(0), values.at(1), values.at(2), values.at(3)});
  }
  return ranks;
}

std::string hosts_json(const std::vector<RankHost>& ranks) {
  JsonWriter json;
  json.begin_array();
  for (size_t first = 0; first < ranks.size();) {
    size_t last = first;
    const auto same = [&](const RankHost& other) {
      return other.host == ranks[first].host && other.device == ranks[first].device;
    };
    while (last + 1 < ranks.size() && same(ranks[last + 1])) ++last;
    json.begin_object().member("host", ranks[first].host);
    json.member("ranks", first == last ? cat(first) : cat(first, "-", last));
    json.member("device", ranks[first].device).member("driver", ranks[first].driver);
    json.member("cores", ranks[first].cores).end_object();
    first = last + 1;
  }
  return json.end_array().text();
}

void add_origin(MetricsRecord& record, const Job& job, const ParallelConfig& parallel,
                const EncoderRanks& encoder, const std::vector<RankHost>& ranks,
                const Versions& libraries) {
  const Launch& launch = job.launch;
  const int size = job.groups.world.size();
  record.member("world_size", size)
      .json("mesh", mesh_json(make_mesh(parallel, encoder, size), encoder));
  record.member("launcher", launch.launcher).member("attempt", launch.restart_count + 1);
  if (!launch.run_id.empty()) record.member("job", launch.run_id);
  record.member("command", command_line());
  Versions build = {{"megatron", MEGATRON_VERSION}, {"compiler", __VERSION__}};
  if (const std::string commit = build_commit(); !commit.empty())
    build.emplace_back("commit", commit);
  record.json("build", object_json(build)).json("libraries", object_json(libraries));
  record.json("hosts", hosts_json(ranks));
}

StartClock::StartClock(std::string_view first_stage) : last_end_(std::chrono::steady_clock::now()) {
  stages_.emplace_back(first_stage, process_age_seconds());
}

void StartClock::add(const std::string& name, std::chrono::steady_clock::time_point begin) {
  last_end_ = std::chrono::steady_clock::now();
  stages_.emplace_back(name, std::chrono::duration<double>(last_end_ - begin).count());
}

void StartClock::end_stage(std::string_view name) { add(std::string(name), last_end_); }

std::string StartClock::json() const {
  JsonWriter json;
  json.begin_object();
  for (const auto& [name, seconds] : stages_) json.member(name, seconds);
  return json.end_object().text();
}

}  // namespace megatron
