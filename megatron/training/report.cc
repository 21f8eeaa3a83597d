#include "megatron/training/report.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/base/json_writer.h"
#include "megatron/training/metrics_file.h"

namespace megatron {

namespace {

using nlohmann::ordered_json;

// null stands for a number that was not finite.
double number(const ordered_json& record, const char* key) {
  const auto found = record.find(key);
  if (found == record.end() || !found->is_number()) return std::numeric_limits<double>::quiet_NaN();
  return found->get<double>();
}

int64_t integer(const ordered_json& record, const char* key) { return record.value(key, int64_t{0}); }

// A new start makes void what came after the iteration it starts from.
void read_start(const ordered_json& record, RunHistory& run) {
  const int64_t iteration = integer(record, "iteration");
  std::erase_if(run.train, [&](const TrainPoint& p) { return p.iteration > iteration; });
  std::erase_if(run.evaluations, [&](const EvaluationPoint& p) { return p.iteration > iteration; });
  std::erase_if(run.checkpoints, [&](const CheckpointPoint& p) { return p.iteration > iteration; });
  run.facts.clear();
  for (const auto& [key, value] : record.items())
    if (key != "type" && key != "time" && key != "iteration")
      run.facts.emplace_back(key, value.is_string() ? value.get<std::string>() : value.dump());
  run.end_reason.clear();
  ++run.num_starts;
}

// "dpo loss" of preference optimisation, else "lm loss".
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
  point.consumed_samples = integer(record, "consumed_samples");
  point.consumed_tokens = integer(record, "consumed_tokens");
  point.skipped_iterations = integer(record, "skipped_iterations");
  point.nan_iterations = integer(record, "nan_iterations");
  run.train.push_back(point);
}

void read_record(const ordered_json& record, RunHistory& run) {
  const std::string type = record.value("type", "");
  if (type == "start") {
    read_start(record, run);
  } else if (type == "train") {
    read_train(record, run);
  } else if (type == "evaluation") {
    run.evaluations.push_back({integer(record, "iteration"), record.value("split", ""),
                               record.value("set", ""), loss_of(record)});
  } else if (type == "checkpoint") {
    run.checkpoints.push_back(
        {integer(record, "iteration"), integer(record, "bytes"), number(record, "seconds"), record.value("directory", "")});
  } else if (type == "end") {
    run.end_reason = record.value("reason", "");
  }
}

}  // namespace

const EvaluationPoint* RunHistory::best_validation() const {
  const EvaluationPoint* best = nullptr;
  for (const EvaluationPoint& point : evaluations)
    if (point.split == "validation" && (best == nullptr || point.loss < best->loss)) best = &point;
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
  const std::filesystem::path path = std::filesystem::is_regular_file(folder) ? folder : folder / kMetricsName;
  std::ifstream file(path);
  MEGATRON_CHECK(file, path.string(), " cannot be read\nhint: give the folder of a run (--save or --run-dir of pretrain)");
  RunHistory run;
  for (std::string line; std::getline(file, line);) {
    if (line.empty()) continue;
    const ordered_json record = ordered_json::parse(line, nullptr, /*allow_exceptions=*/false);
    try {
      if (record.is_object()) {
        read_record(record, run);
        continue;
      }
    } catch (const nlohmann::json::exception&) {
      // A member of another type than ours: counted with the other lines that cannot be read.
    }
    ++run.unreadable_lines;
  }
  MEGATRON_CHECK(run.num_starts > 0 || !run.train.empty(), path.string(), " holds no record of a run");
  return run;
}

std::string report_json(const RunHistory& run) {
  JsonWriter json(2);
  json.begin_object().key("run").begin_object();
  for (const auto& [key, value] : run.facts) json.member(key, value);
  json.end_object();
  const TrainPoint last = run.train.empty() ? TrainPoint{} : run.train.back();
  json.member("iteration", last.iteration).member("consumed_samples", last.consumed_samples);
  json.member("consumed_tokens", last.consumed_tokens).member("training_seconds", run.training_seconds());
  json.member("starts", run.num_starts).member("end", run.end_reason);
  json.key("train_loss");
  run.train.empty() ? json.null() : json.value(last.loss);
  json.key("best_validation");
  if (const EvaluationPoint* best = run.best_validation()) {
    json.begin_object().member("iteration", best->iteration).member("set", best->set).member("lm loss", best->loss).end_object();
  } else {
    json.null();
  }
  json.key("evaluations").begin_array();
  for (const EvaluationPoint& point : run.evaluations) {
    json.begin_object().member("iteration", point.iteration).member("split", point.split).member("set", point.set);
    json.member("lm loss", point.loss).end_object();
  }
  json.end_array().key("checkpoints").begin_array();
  for (const CheckpointPoint& point : run.checkpoints) {
    json.begin_object().member("iteration", point.iteration).member("bytes", point.bytes).member("seconds", point.seconds);
    json.member("directory", point.directory).end_object();
  }
  json.end_array().end_object();
  return json.text();
}

}  // namespace megatron
