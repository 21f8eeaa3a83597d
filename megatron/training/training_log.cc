#include "megatron/training/training_log.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/base/json_writer.h"
#include "megatron/base/log.h"
#include "megatron/training/tensorboard.h"

namespace megatron {

namespace {

std::string number(const char* format, double value) {
  char text[64];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

std::string short_count(double value) {
  if (value >= 1e6) return number("%.2fM", value / 1e6);
  if (value >= 1e3) return number("%.1fk", value / 1e3);
  return number("%.0f", value);
}

size_t rank_with_most(const std::vector<MemoryUse>& ranks, int64_t MemoryUse::*member) {
  const auto less = [&](const MemoryUse& x, const MemoryUse& y) { return x.*member < y.*member; };
  return static_cast<size_t>(std::max_element(ranks.begin(), ranks.end(), less) - ranks.begin());
}

}  // namespace

int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  int64_t total = 0, resident = 0;
  file >> total >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

std::string format_memory(const std::vector<MemoryUse>& ranks) {
  constexpr double kMb = 1024.0 * 1024.0;
  std::string out = ranks.size() > 1 ? cat("memory (MB), most of ", ranks.size(), " ranks") : "memory (MB)";
  const auto put = [&](const char* name, int64_t MemoryUse::*member) {
    const size_t rank = rank_with_most(ranks, member);
    out += std::string(" | ") + name + ": " + number("%.2f", static_cast<double>(ranks[rank].*member) / kMb);
    if (ranks.size() > 1) out += cat(" (rank ", rank, ")");
  };
  if (ranks[rank_with_most(ranks, &MemoryUse::reserved)].reserved > 0) {
    put("allocated", &MemoryUse::allocated);
    put("max allocated", &MemoryUse::max_allocated);
    put("reserved", &MemoryUse::reserved);
  }
  put("resident on the host", &MemoryUse::resident);
  return out;
}

TrainingLog::TrainingLog(const TrainingConfig& config, RunFacts facts, MetricsFile metrics)
    : config_(config), facts_(std::move(facts)), metrics_(std::move(metrics)) {
  if (!config_.tensorboard_dir.empty() && facts_.first_rank)
    tensorboard_ = std::make_unique<TensorBoardWriter>(config_.tensorboard_dir);
  mark_ = last_status_ = std::chrono::steady_clock::now();
}

TrainingLog::~TrainingLog() { close(); }

void TrainingLog::close() {
  set_status_line("");
  if (tensorboard_) tensorboard_->flush();
}

void TrainingLog::take_time() {
  const auto now = std::chrono::steady_clock::now();
  if (!paused_) interval_.seconds += std::chrono::duration<double>(now - mark_).count();
  mark_ = now;
}

void TrainingLog::pause() {
  take_time();
  paused_ = true;
}

void TrainingLog::resume() {
  paused_ = false;
  mark_ = std::chrono::steady_clock::now();
}

double TrainingLog::seconds_per_iteration() const {
  const int64_t iterations = interval_.advanced + interval_.skipped;
  return iterations > 0 ? interval_.seconds / static_cast<double>(iterations) : 0.0;
}

bool TrainingLog::step(const StepRecord& record) {
  const double before = interval_.seconds;
  take_time();
  step_seconds_ = interval_.seconds - before;
  if (record.skipped) {
    ++interval_.skipped;
  } else {
    ++interval_.advanced;
    interval_.loss_sum += record.loss;
    if (interval_.metric_sums.empty()) {
      interval_.metric_sums = record.metrics;
    } else {
      for (size_t i = 0; i < record.metrics.size(); ++i) interval_.metric_sums[i].second += record.metrics[i].second;
    }
  }
  if (record.non_finite) ++interval_.non_finite;
  interval_.samples += static_cast<double>(record.global_batch_size);

  if (tensorboard_ && record.iteration % config_.tensorboard_log_interval == 0) write_scalars(record);
  const bool at_interval = record.iteration % config_.log_interval == 0;
  const bool print = at_interval || first_;
  if (print) {
    const TrainingLine text = line(record);
    print_line(format_training_line(text));
    write_metrics(text, seconds_per_iteration());
    if (tensorboard_ && config_.log_timers_to_tensorboard) {
      scalar("iteration-time", seconds_per_iteration(), record.iteration, record.consumed_samples);
      if (text.tflops_per_gpu)
        scalar("throughput", *text.tflops_per_gpu, record.iteration, record.consumed_samples);
    }
  }
  show_status(record);
  if (first_) recent_seconds_ = 0;  // the first step pays for what is only done once
  if (at_interval) interval_ = {};
  first_ = false;
  return print;
}

TrainingLine TrainingLog::line(const StepRecord& record) const {
  TrainingLine out;
  out.time = std::chrono::system_clock::now();
  out.iteration = record.iteration;
  out.train_iters = facts_.train_iters;
  out.consumed_samples = record.consumed_samples;
  const double seconds = seconds_per_iteration();
  out.ms_per_iteration = seconds * 1000.0;
  if (config_.log_throughput && seconds > 0) {
    const double flops = iteration_flops(
        facts_.model, IterationTokens::unpacked(record.global_batch_size, facts_.sequence_length));
    out.tflops_per_gpu = flops / (seconds * 1e12 * static_cast<double>(facts_.world_size));
  }
  out.learning_rate = record.learning_rate;
  out.global_batch_size = record.global_batch_size;
  out.losses = {{facts_.loss_name, interval_.advanced > 0 ? interval_.loss_sum / interval_.advanced : record.loss}};
  out.metrics = interval_.advanced > 0 ? interval_.metric_sums : record.metrics;
  for (auto& [name, value] : out.metrics) value /= static_cast<double>(std::max<int64_t>(1, interval_.advanced));
  out.loss_scale = record.loss_scale;
  if (!record.skipped) out.grad_norm = record.grad_norm;
  out.num_zeros = record.num_zeros;
  out.params_norm = record.params_norm;
  out.skipped_iterations = interval_.skipped;
  out.nan_iterations = interval_.non_finite;
  return out;
}

void TrainingLog::write_metrics(const TrainingLine& line, double seconds) {
  if (!metrics_.is_open()) return;
  JsonWriter json = metrics_.begin("train");
  json.member("iteration", line.iteration).member("consumed_samples", line.consumed_samples);
  json.member("consumed_tokens", line.consumed_samples * facts_.sequence_length);
  json.member(facts_.loss_name, line.losses.front().second).member("learning_rate", line.learning_rate);
  for (const auto& [name, value] : line.metrics) json.member(name, value);
  json.member("global_batch_size", line.global_batch_size).member("loss_scale", line.loss_scale);
  if (line.grad_norm) json.member("grad_norm", *line.grad_norm);
  if (line.num_zeros) json.member("num_zeros", *line.num_zeros);
  if (line.params_norm) json.member("params_norm", *line.params_norm);
  json.member("seconds_per_iteration", seconds);
  const double tokens = static_cast<double>(line.global_batch_size * facts_.sequence_length);
  if (seconds > 0) {
    const double flops =
        iteration_flops(facts_.model, IterationTokens::unpacked(line.global_batch_size, facts_.sequence_length));
    const double per_device = flops / seconds / static_cast<double>(facts_.world_size);
    json.member("tokens_per_second", tokens / seconds).member("tflops_per_device", per_device / 1e12);
    if (facts_.peak_flops > 0) json.member("mfu", per_device / facts_.peak_flops);
  }
  json.member("skipped_iterations", line.skipped_iterations).member("nan_iterations", line.nan_iterations);
  metrics_.write(json);
}

void TrainingLog::scalar(const std::string& name, double value, int64_t iteration, int64_t samples) {
  tensorboard_->scalar(name, value, iteration);
  tensorboard_->scalar(name + " vs samples", value, samples);
  queued_scalars_ += 2;
  if (queued_scalars_ >= config_.tensorboard_queue_size) {
    tensorboard_->flush();
    queued_scalars_ = 0;
  }
}

void TrainingLog::write_scalars(const StepRecord& record) {
  const auto put = [&](const char* name, double value) {
    scalar(name, value, record.iteration, record.consumed_samples);
  };
  put("learning-rate", record.learning_rate);
  put("batch-size", static_cast<double>(record.global_batch_size));
  if (!record.skipped) {
    put(facts_.loss_name.c_str(), record.loss);
    for (const auto& [name, value] : record.metrics) put(name.c_str(), value);
  }
  if (config_.log_loss_scale_to_tensorboard) put("loss-scale", record.loss_scale);
  if (config_.log_world_size_to_tensorboard) put("world-size", static_cast<double>(facts_.world_size));
  if (!record.skipped) put("grad-norm", record.grad_norm);
  if (record.num_zeros) put("num-zeros", static_cast<double>(*record.num_zeros));
  if (record.params_norm) put("params-norm", *record.params_norm);
}

void TrainingLog::evaluation(const EvaluationRecord& record) {
  const std::string suffix = record.set_index < 0 ? "" : cat("-", record.set_index);
  const std::string& loss = facts_.loss_name;
  const bool per_token = facts_.loss_per_token;
  print_line(format_evaluation_lines({suffix, record.where, {{loss, record.loss}}, record.metrics, per_token}));
  if (tensorboard_ && record.split == "validation") {
    scalar(loss + " validation" + suffix, record.loss, record.iteration, record.consumed_samples);
    for (const auto& [name, value] : record.metrics)
      scalar(name + " validation" + suffix, value, record.iteration, record.consumed_samples);
    if (config_.log_validation_ppl_to_tensorboard && per_token)
      scalar(loss + " validation" + suffix + " ppl", perplexity(record.loss), record.iteration, record.consumed_samples);
  }
  if (!metrics_.is_open()) return;
  JsonWriter json = metrics_.begin("evaluation");
  json.member("iteration", record.iteration).member("consumed_samples", record.consumed_samples);
  json.member("split", record.split).member("set", record.set_name);
  json.member(loss, record.loss);
  if (per_token) json.member("ppl", perplexity(record.loss));
  for (const auto& [name, value] : record.metrics) json.member(name, value);
  metrics_.write(json);
}

void TrainingLog::memory(const std::vector<MemoryUse>& ranks, int64_t iteration) {
  print_line(cat("[iteration ", iteration, "] ", format_memory(ranks)));
  if (!tensorboard_ || !config_.log_memory_to_tensorboard) return;
  const auto put = [&](const char* name, int64_t MemoryUse::*member) {
    tensorboard_->scalar(name, static_cast<double>(ranks[rank_with_most(ranks, member)].*member), iteration);
  };
  put("mem-reserved-bytes", &MemoryUse::reserved);
  put("mem-allocated-bytes", &MemoryUse::allocated);
  put("mem-max-allocated-bytes", &MemoryUse::max_allocated);
  put("mem-allocated-count", &MemoryUse::num_allocations);
}

void TrainingLog::timers(const RankTimers& timers, int64_t iteration, int64_t iterations) {
  for (size_t i = 0; i < timers.names.size(); ++i) {
    if (tensorboard_ && config_.log_timers_to_tensorboard)
      tensorboard_->scalar(timers.names[i] + "-time", timers.longest(i) / 1000.0 / static_cast<double>(iterations), iteration);
  }
  if (!timers.names.empty())
    print_line(format_timers(timers.names, timers.values, config_.timing_log_option, static_cast<double>(iterations)));
}

void TrainingLog::show_status(const StepRecord& record) {
  if (!is_terminal()) return;
  recent_seconds_ = recent_seconds_ == 0 ? step_seconds_ : 0.9 * recent_seconds_ + 0.1 * step_seconds_;
  const auto time = std::chrono::steady_clock::now();
  if (time - last_status_ < std::chrono::milliseconds(200) || recent_seconds_ <= 0) return;
  last_status_ = time;
  const auto work = IterationTokens::unpacked(record.global_batch_size, facts_.sequence_length);
  std::string text = cat("step ", record.iteration, "/", facts_.train_iters, "  loss ", number("%.4f", record.loss), "  ",
                         short_count(work.tokens / recent_seconds_), " tokens/s");
  if (facts_.peak_flops > 0) {
    const double rate = iteration_flops(facts_.model, work) / recent_seconds_ / static_cast<double>(facts_.world_size);
    text += "  MFU " + number("%.1f%%", 100.0 * rate / facts_.peak_flops);
  }
  const double left = static_cast<double>(facts_.train_iters - record.iteration) * recent_seconds_;
  set_status_line(text + "  ETA " + format_duration(left));
}

}  // namespace megatron
