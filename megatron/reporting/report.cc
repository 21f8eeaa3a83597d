#include "megatron/reporting/report.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>

#include "megatron/base/check.h"
#include "megatron/base/json_writer.h"
#include "megatron/reporting/metrics_file.h"

namespace megatron {

namespace {

using nlohmann::ordered_json;

// null stands for a non-finite number.
double number(const ordered_json& record, const char* key) {
  const auto found = record.find(key);
  if (found == record.end() || !found->is_number()) return std::numeric_limits<double>::quiet_NaN();
  return found->get<double>();
}

int64_t integer(const ordered_json& record, const char* key) {
  return record.value(key, int64_t{0});
}

std::string text_of(const ordered_json& value) {
  return value.is_string() ? value.get<std::string>() : value.dump();
}

std::vector<std::pair<std::string, double>> numbers_in(const ordered_json& object) {
  std::vector<std::pair<std::string, double>> out;
  for (const auto& [key, value] : object.items())
    if (value.is_number()) out.emplace_back(key, value.get<double>());
  return out;
}

// Reads the facts of a "start" record: plain members, members of objects, and a row per host.
void read_facts(const ordered_json& record, RunHistory& run) {
  run.facts.clear();
  run.hosts.clear();
  for (const auto& [key, value] : record.items()) {
    if (key == "type" || key == "time" || key == "iteration") continue;
    if (key == "hosts" && value.is_array()) {
      for (const ordered_json& host : value) {
        Texts row;
        for (const auto& [name, member] : host.items()) row.emplace_back(name, text_of(member));
        run.hosts.push_back(std::move(row));
      }
    } else if (value.is_object()) {
      for (const auto& [name, member] : value.items())
        run.facts.emplace_back(key + ": " + name, text_of(member));
    } else {
      run.facts.emplace_back(key, text_of(value));
    }
  }
}

// A new "start" record invalidates records after the iteration it starts from.
void read_start(const ordered_json& record, RunHistory& run) {
  const int64_t iteration = integer(record, "iteration");
  const auto later = [&](const auto& point) { return point.iteration > iteration; };
  std::erase_if(run.train, later);
  std::erase_if(run.evaluations, later);
  std::erase_if(run.checkpoints, later);
  std::erase_if(run.memory, later);
  read_facts(record, run);
  run.start_seconds.clear();
  run.end_reason.clear();
  ++run.num_starts;
}

// "dpo loss" if present, else "lm loss".
double loss_of(const ordered_json& record) {
  return number(record, record.contains("dpo loss") ? "dpo loss" : "lm loss");
}

void read_train(const ordered_json& record, RunHistory& run) {
  TrainPoint point;
  point.iteration = integer(record, "iteration");
  point.loss = loss_of(record);
  point.learning_rate = number(record, "learning_rate");
  point.grad_norm = number(record, "grad_norm");
  point.tokens_per_second = number(record, "tokens_per_second");
  point.tflops_per_device = number(record, "tflops_per_device");
  point.seconds_per_iteration = number(record, "seconds_per_iteration");
  point.mfu = number(record, "mfu");
  point.consumed_samples = integer(record, "consumed_samples");
  point.consumed_tokens = integer(record, "consumed_tokens");
  point.skipped_iterations = integer(record, "skipped_iterations");
  point.nan_iterations = integer(record, "nan_iterations");
  run.train.push_back(point);
}

// In old files without that member, the final evaluation is the second one of its set at its
// iteration.
bool is_second(const EvaluationPoint& point, const RunHistory& run) {
  return std::any_of(run.evaluations.begin(), run.evaluations.end(),
                     [&](const EvaluationPoint& other) {
                       return other.iteration == point.iteration && other.split == point.split &&
                              other.set == point.set;
                     });
}

void read_evaluation(const ordered_json& record, RunHistory& run) {
  EvaluationPoint point{integer(record, "iteration"),  record.value("split", ""),
                        record.value("set", ""),       loss_of(record),
                        record.value("at_end", false), number(record, "seconds")};
  point.at_end = point.at_end || is_second(point, run);
  run.evaluations.push_back(point);
}

void read_memory(const ordered_json& record, RunHistory& run) {
  run.memory.push_back({integer(record, "iteration"), number(record, "resident_bytes"),
                        number(record, "allocated_bytes"), number(record, "max_allocated_bytes"),
                        number(record, "reserved_bytes")});
}

// Adds the timers of an interval to the means, weighted by iterations; repeated iterations count
// again.
void read_timers(const ordered_json& record, RunHistory& run, int64_t& num_timers) {
  ++num_timers;
  for (const auto& [name, seconds] : numbers_in(record)) {
    if (name == "time" || name == "iteration") continue;
    const auto known = std::find_if(run.sections.begin(), run.sections.end(),
                                    [&](const auto& s) { return s.first == name; });
    auto& mean =
        known != run.sections.end() ? known->second : run.sections.emplace_back(name, 0.0).second;
    mean += (seconds - mean) / static_cast<double>(num_timers);
  }
}

void read_tokens_per_expert(const ordered_json& record, RunHistory& run) {
  if (!record.contains("counts") || !record.at("counts").is_object()) return;
  run.tokens_per_expert_iteration = integer(record, "iteration");
  run.tokens_per_expert.clear();
  for (const auto& [router, counts] : record.at("counts").items())
    if (counts.is_array() && !counts.empty())
      run.tokens_per_expert.push_back({router, counts.get<std::vector<int64_t>>()});
}

struct Reading {
  int64_t num_timers = 0;
  struct SectionCount {
    int64_t records = 0;
    std::map<int64_t, int64_t> had_most;  // how often, by rank
  };
  std::map<std::string, SectionCount> sections;
  double start_time = 0, last_time = 0;
};

// Members SECTION_seconds, SECTION_max_seconds and SECTION_max_rank.
void read_sections(const ordered_json& record, RunHistory& run, Reading& reading) {
  constexpr std::string_view kLast = "_max_rank";
  for (const auto& [key, value] : record.items()) {
    if (!key.ends_with(kLast) || !value.is_number_integer()) continue;
    const std::string name = key.substr(0, key.size() - kLast.size());
    const double seconds = number(record, (name + "_seconds").c_str());
    const double most = number(record, (name + "_max_seconds").c_str());
    if (!std::isfinite(seconds) || !std::isfinite(most)) continue;
    auto known = std::find_if(run.rank_sections.begin(), run.rank_sections.end(),
                              [&](const RankSection& s) { return s.name == name; });
    if (known == run.rank_sections.end())
      known = run.rank_sections.insert(known, RankSection{name, 0, 0, 0});
    Reading::SectionCount& count = reading.sections[name];
    const auto records = static_cast<double>(++count.records);
    known->seconds += (seconds - known->seconds) / records;
    known->max_seconds += (most - known->max_seconds) / records;
    const auto rank = value.get<int64_t>();
    if (++count.had_most[rank] >= count.had_most[known->max_rank]) known->max_rank = rank;
  }
}

void read_record(const ordered_json& record, RunHistory& run, Reading& reading) {
  const std::string type = record.value("type", "");
  const double time = number(record, "time");
  if (type == "start") {
    run.wall_seconds += reading.last_time - reading.start_time;
    reading.start_time = time;
    read_start(record, run);
  } else if (type == "startup") {
    if (record.contains("seconds")) run.start_seconds = numbers_in(record.at("seconds"));
  } else if (type == "train") {
    read_train(record, run);
  } else if (type == "timers") {
    read_timers(record, run, reading.num_timers);
  } else if (type == "sections") {
    read_sections(record, run, reading);
  } else if (type == "memory") {
    read_memory(record, run);
  } else if (type == "tokens_per_expert") {
    read_tokens_per_expert(record, run);
  } else if (type == "evaluation") {
    read_evaluation(record, run);
  } else if (type == "checkpoint") {
    run.checkpoints.push_back({integer(record, "iteration"), integer(record, "bytes"),
                               number(record, "seconds"), record.value("directory", "")});
  } else if (type == "end") {
    run.end_reason = record.value("reason", "");
  }
  if (std::isfinite(time)) reading.last_time = time;
}

// "name: value" lines as to_yaml() writes them.
Texts read_config(const std::filesystem::path& path) {
  Texts out;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (line.empty() || line[0] == '#' || colon == std::string::npos) continue;
    out.emplace_back(line.substr(0, colon), line.substr(colon + 2));
  }
  return out;
}

}  // namespace

const EvaluationPoint* RunHistory::best_validation() const {
  const EvaluationPoint* best = nullptr;
  for (const EvaluationPoint& point : evaluations) {
    if (point.split != "validation") continue;
    const bool better = best == nullptr || (best->at_end && !point.at_end) ||
                        (best->at_end == point.at_end && point.loss < best->loss);
    if (better) best = &point;
  }
  return best;
}

double RunHistory::training_seconds() const {
  double seconds = 0;
  int64_t before = 0;
  for (const TrainPoint& point : train) {
    if (std::isfinite(point.seconds_per_iteration))
      seconds += point.seconds_per_iteration * static_cast<double>(point.iteration - before);
    before = point.iteration;
  }
  return seconds;
}

RunHistory read_run(const std::filesystem::path& folder) {
  const std::filesystem::path path =
      std::filesystem::is_regular_file(folder) ? folder : folder / kMetricsName;
  std::ifstream file(path);
  MEGATRON_CHECK(
      file, path.string(),
      " cannot be read\nhint: give the folder of a run (--save or --run-dir of pretrain)");
  RunHistory run;
  run.name = std::filesystem::absolute(path).lexically_normal().parent_path().filename().string();
  run.config = read_config(path.parent_path() / "config.yaml");
  Reading reading;
  for (std::string line; std::getline(file, line);) {
    if (line.empty()) continue;
    const ordered_json record = ordered_json::parse(line, nullptr, /*allow_exceptions=*/false);
    try {
      if (record.is_object()) {
        read_record(record, run, reading);
        continue;
      }
    } catch (const nlohmann::json::exception&) {
      // A member of an unexpected type: counted as an unreadable line.
    }
    ++run.unreadable_lines;
  }
  run.wall_seconds += reading.last_time - reading.start_time;
  MEGATRON_CHECK(run.num_starts > 0 || !run.train.empty(), path.string(),
                 " holds no record of a run");
  return run;
}

std::vector<std::pair<std::string, std::vector<std::string>>> differences(
    const std::vector<const Texts*>& runs) {
  std::vector<std::pair<std::string, std::vector<std::string>>> out;
  std::set<std::string> seen;
  const auto value_in = [](const Texts& texts, const std::string& name) -> std::string {
    for (const auto& [key, value] : texts)
      if (key == name) return value;
    return {};
  };
  for (const Texts* texts : runs) {
    for (const auto& [name, unused] : *texts) {
      if (!seen.insert(name).second) continue;
      std::vector<std::string> values;
      for (const Texts* run : runs) values.push_back(value_in(*run, name));
      if (std::any_of(values.begin(), values.end(),
                      [&](const std::string& v) { return v != values.front(); }))
        out.emplace_back(name, std::move(values));
    }
  }
  return out;
}

std::string report_json(const RunHistory& run) {
  JsonWriter json(2);
  json.begin_object().key("run").begin_object();
  for (const auto& [key, value] : run.facts) json.member(key, value);
  json.end_object();
  const TrainPoint last = run.train.empty() ? TrainPoint{} : run.train.back();
  json.member("iteration", last.iteration).member("consumed_samples", last.consumed_samples);
  json.member("consumed_tokens", last.consumed_tokens)
      .member("training_seconds", run.training_seconds());
  json.member("starts", run.num_starts).member("end", run.end_reason);
  json.key("train_loss");
  run.train.empty() ? json.null() : json.value(last.loss);
  json.key("best_validation");
  if (const EvaluationPoint* best = run.best_validation()) {
    json.begin_object()
        .member("iteration", best->iteration)
        .member("set", best->set)
        .member("lm loss", best->loss)
        .end_object();
  } else {
    json.null();
  }
  json.key("evaluations").begin_array();
  for (const EvaluationPoint& point : run.evaluations) {
    json.begin_object()
        .member("iteration", point.iteration)
        .member("split", point.split)
        .member("set", point.set);
    json.member("at_end", point.at_end).member("lm loss", point.loss).end_object();
  }
  json.end_array().key("checkpoints").begin_array();
  for (const CheckpointPoint& point : run.checkpoints) {
    json.begin_object()
        .member("iteration", point.iteration)
        .member("bytes", point.bytes)
        .member("seconds", point.seconds);
    json.member("directory", point.directory).end_object();
  }
  json.end_array();
  if (!run.tokens_per_expert.empty()) {
    json.key("tokens_per_expert").begin_object();
    json.member("iteration", run.tokens_per_expert_iteration);
    for (const ExpertTokens& one : run.tokens_per_expert) json.member(one.router, one.tokens);
    json.end_object();
  }
  json.end_object();
  return json.text();
}

}  // namespace megatron
