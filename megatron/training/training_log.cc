#include "megatron/training/training_log.h"

#include <unistd.h>

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/base/json_writer.h"
#include "megatron/base/log.h"
#include "megatron/reporting/section_means.h"

namespace megatron {

namespace {

std::string short_count(double value) {
  if (value >= 1e6) return format_text("%.2fM", value / 1e6);
  if (value >= 1e3) return format_text("%.1fk", value / 1e3);
  return format_text("%.0f", value);
}

size_t rank_with_most(const std::vector<MemoryUse>& ranks, int64_t MemoryUse::* member) {
  const auto less = [&](const MemoryUse& x, const MemoryUse& y) { return x.*member < y.*member; };
  return static_cast<size_t>(std::max_element(ranks.begin(), ranks.end(), less) - ranks.begin());
}

}  // namespace

std::string format_memory(const std::vector<MemoryUse>& ranks) {
  constexpr double kMb = 1024.0 * 1024.0;
  std::string out =
      ranks.size() > 1 ? cat("memory (MB), most of ", ranks.size(), " ranks") : "memory (MB)";
  const auto put = [&](const char* name, int64_t MemoryUse::* member) {
    const size_t rank = rank_with_most(ranks, member);
    out += std::string(" | ") + name + ": " +
           format_text("%.2f", static_cast<double>(ranks[rank].*member) / kMb);
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

TrainingLog::TrainingLog(const TrainingConfig& config, RunFacts facts, MetricsQueue metrics)
    : config_(config), facts_(std::move(facts)), metrics_(std::move(metrics)) {
  mark_ = last_status_ = std::chrono::steady_clock::now();
}

TrainingLog::~TrainingLog() { close(); }

void TrainingLog::close() {
  set_status_line("");
  metrics_.close();
}

void TrainingLog::take_time() {
  const auto now = std::chrono::steady_clock::now();
  if (!paused_) interval_.seconds += std::chrono::duration<double>(now - mark_).count();
  mark_ = now;
}

void TrainingLog::pause() {
  take_time();
  paused_ = true;
  evaluation_begin_ = mark_;
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
      for (size_t i = 0; i < record.metrics.size(); ++i)
        interval_.metric_sums[i].second += record.metrics[i].second;
    }
  }
  if (record.non_finite) ++interval_.non_finite;
  if (interval_.counts.empty()) {
    interval_.counts = record.counts;
  } else {
    for (size_t i = 0; i < record.counts.size(); ++i)
      interval_.counts[i].second += record.counts[i].second;
  }
  interval_.samples += static_cast<double>(record.global_batch_size);

  const bool at_interval = record.iteration % config_.log_interval == 0;
  const bool print = at_interval || first_;
  std::optional<TrainingLine> text;
  if (print) {
    text = line(record);
    print_line(format_training_line(*text));
    write_metrics(*text, seconds_per_iteration());
  }
  if (metrics_.takes_scalars()) write_scalars(record, text ? &*text : nullptr);
  show_status(record);
  if (first_) recent_seconds_ = 0;  // the first step includes one-time costs
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
    const double flops = step_flops(record.global_batch_size);
    out.tflops_per_gpu = flops / (seconds * 1e12 * static_cast<double>(facts_.world_size));
  }
  out.learning_rate = record.learning_rate;
  out.global_batch_size = record.global_batch_size;
  out.losses = {{facts_.loss_name,
                 interval_.advanced > 0 ? interval_.loss_sum / interval_.advanced : record.loss}};
  out.metrics = interval_.advanced > 0 ? interval_.metric_sums : record.metrics;
  for (auto& [name, value] : out.metrics)
    value /= static_cast<double>(std::max<int64_t>(1, interval_.advanced));
  out.loss_scale = record.loss_scale;
  if (!record.skipped) out.grad_norm = record.grad_norm;
  out.num_zeros = record.num_zeros;
  out.params_norm = record.params_norm;
  out.skipped_iterations = interval_.skipped;
  out.nan_iterations = interval_.non_finite;
  if (interval_.seconds > 0)
    for (const auto& [name, count] : interval_.counts)
      out.per_second.emplace_back(name, static_cast<double>(count) / interval_.seconds);
  if (seconds > 0) {
    out.tokens_per_second =
        static_cast<double>(record.global_batch_size * facts_.sequence_length) / seconds;
    // The first step includes one-time costs and is not representative.
    if (!first_)
      out.seconds_left = static_cast<double>(facts_.train_iters - record.iteration) * seconds;
  }
  return out;
}

void TrainingLog::write_metrics(const TrainingLine& line, double seconds) {
  if (!metrics_.is_open()) return;
  MetricsRecord record = metrics_.begin("train");
  record.member("iteration", line.iteration).member("consumed_samples", line.consumed_samples);
  record.member("consumed_tokens", line.consumed_samples * facts_.sequence_length);
  record.member(facts_.loss_name, line.losses.front().second)
      .member("learning_rate", line.learning_rate);
  for (const auto& [name, value] : line.metrics) record.member(name, value);
  record.member("global_batch_size", line.global_batch_size).member("loss_scale", line.loss_scale);
  if (line.grad_norm) record.member("grad_norm", *line.grad_norm);
  if (line.num_zeros) record.member("num_zeros", *line.num_zeros);
  if (line.params_norm) record.member("params_norm", *line.params_norm);
  record.member("seconds_per_iteration", seconds);
  if (seconds > 0) {
    const double per_device =
        step_flops(line.global_batch_size) / seconds / static_cast<double>(facts_.world_size);
    record.member("tokens_per_second", *line.tokens_per_second)
        .member("tflops_per_device", per_device / 1e12);
    if (facts_.peak_flops > 0) record.member("mfu", per_device / facts_.peak_flops);
  }
  for (const auto& [name, rate] : line.per_second) record.member(name + "_per_second", rate);
  record.member("skipped_iterations", line.skipped_iterations)
      .member("nan_iterations", line.nan_iterations);
  metrics_.write(std::move(record));
}

// Writes the numbers of a step every --tensorboard-log-interval iterations; with a log line also
// its times.
void TrainingLog::write_scalars(const StepRecord& record, const TrainingLine* line) {
  ScalarSet out{record.iteration, record.consumed_samples, {}};
  const auto put = [&](const std::string& name, double value) {
    out.values.emplace_back(name, value);
  };
  if (record.iteration % config_.tensorboard_log_interval == 0) {
    put("learning-rate", record.learning_rate);
    put("batch-size", static_cast<double>(record.global_batch_size));
    if (!record.skipped) {
      put(facts_.loss_name, record.loss);
      for (const auto& [name, value] : record.metrics) put(name, value);
    }
    if (config_.log_loss_scale_to_tensorboard) put("loss-scale", record.loss_scale);
    if (config_.log_world_size_to_tensorboard)
      put("world-size", static_cast<double>(facts_.world_size));
    if (!record.skipped) put("grad-norm", record.grad_norm);
    if (record.num_zeros) put("num-zeros", static_cast<double>(*record.num_zeros));
    if (record.params_norm) put("params-norm", *record.params_norm);
  }
  if (line != nullptr)
    for (const auto& [name, rate] : line->per_second) put(name + "-per-second", rate);
  if (line != nullptr && config_.log_timers_to_tensorboard) {
    put("iteration-time", line->ms_per_iteration / 1000.0);
    if (line->tflops_per_gpu) put("throughput", *line->tflops_per_gpu);
  }
  metrics_.write(std::move(out));
}

void TrainingLog::evaluation(const EvaluationRecord& record) {
  const std::string suffix = record.set_index < 0  ? ""
                             : record.set_is_named ? cat("-", record.set_name)
                                                   : cat("-", record.set_index);
  const std::string& loss = facts_.loss_name;
  const bool per_token = facts_.loss_per_token;
  print_line(format_evaluation_lines(
      {suffix, record.where, {{loss, record.loss}}, record.metrics, per_token}));
  if (!metrics_.is_open()) return;
  if (record.split == "validation") {
    ScalarSet scalars{
        record.iteration, record.consumed_samples, {{loss + " validation" + suffix, record.loss}}};
    for (const auto& [name, value] : record.metrics)
      scalars.values.emplace_back(name + " validation" + suffix, value);
    if (config_.log_validation_ppl_to_tensorboard && per_token)
      scalars.values.emplace_back(loss + " validation" + suffix + " ppl", perplexity(record.loss));
    metrics_.write(std::move(scalars));
  }
  MetricsRecord out = metrics_.begin("evaluation");
  out.member("iteration", record.iteration).member("consumed_samples", record.consumed_samples);
  out.member("split", record.split).member("set", record.set_name);
  if (record.at_end) out.member("at_end", true);
  out.member(loss, record.loss);
  if (per_token) out.member("ppl", perplexity(record.loss));
  for (const auto& [name, value] : record.metrics) out.member(name, value);
  const auto now = std::chrono::steady_clock::now();
  if (paused_)
    out.member("seconds", std::chrono::duration<double>(now - evaluation_begin_).count());
  evaluation_begin_ = now;
  metrics_.write(std::move(out));
}

void TrainingLog::left_out(const std::vector<std::pair<std::string, int64_t>>& samples,
                           int64_t iteration) {
  if (!metrics_.is_open() || samples.empty()) return;
  ScalarSet scalars{iteration, std::nullopt, {}};
  MetricsRecord out = metrics_.begin("samples");
  out.member("iteration", iteration);
  for (const auto& [reason, count] : samples) {
    out.member(reason, count);
    scalars.values.emplace_back("samples " + reason, static_cast<double>(count));
  }
  metrics_.write(std::move(scalars));
  metrics_.write(std::move(out));
}

// Logs the maximum over ranks of each number.
void TrainingLog::memory(const std::vector<MemoryUse>& ranks, int64_t iteration) {
  print_line(cat("[iteration ", iteration, "] ", format_memory(ranks)));
  const auto most = [&](int64_t MemoryUse::* member) {
    return ranks[rank_with_most(ranks, member)].*member;
  };
  const int64_t reserved = most(&MemoryUse::reserved), allocated = most(&MemoryUse::allocated);
  const int64_t max_allocated = most(&MemoryUse::max_allocated);
  if (config_.log_memory_to_tensorboard) {
    metrics_.write(ScalarSet{
        iteration,
        std::nullopt,
        {{"mem-reserved-bytes", static_cast<double>(reserved)},
         {"mem-allocated-bytes", static_cast<double>(allocated)},
         {"mem-max-allocated-bytes", static_cast<double>(max_allocated)},
         {"mem-allocated-count", static_cast<double>(most(&MemoryUse::num_allocations))}}});
  }
  MetricsRecord out = metrics_.begin("memory");
  out.member("iteration", iteration).member("resident_bytes", most(&MemoryUse::resident));
  if (reserved > 0)
    out.member("allocated_bytes", allocated)
        .member("max_allocated_bytes", max_allocated)
        .member("reserved_bytes", reserved);
  metrics_.write(std::move(out));
}

void TrainingLog::tokens_per_expert(const std::vector<std::string>& names,
                                    const std::vector<std::vector<int64_t>>& counts,
                                    int64_t iteration) {
  if (!metrics_.is_open()) return;
  JsonWriter json;
  json.begin_object();
  for (size_t i = 0; i < names.size(); ++i) json.member(names[i], counts[i]);
  json.end_object();
  MetricsRecord out = metrics_.begin("tokens_per_expert");
  out.member("iteration", iteration).json("counts", json.text());
  metrics_.write(std::move(out));
}

// Logs the maximum over ranks of each timer.
void TrainingLog::timers(const RankTimers& timers, int64_t iteration, int64_t iterations) {
  if (timers.names.empty()) return;
  print_line(format_timers(timers.names, timers.values, config_.timing_log_option,
                           static_cast<double>(iterations)));
  ScalarSet scalars{iteration, std::nullopt, {}};
  MetricsRecord out = metrics_.begin("timers");
  out.member("iteration", iteration);
  for (size_t i = 0; i < timers.names.size(); ++i) {
    const double seconds = timers.longest(i) / 1000.0 / static_cast<double>(iterations);
    if (config_.log_timers_to_tensorboard)
      scalars.values.emplace_back(timers.names[i] + "-time", seconds);
    out.member(timers.names[i], seconds);
  }
  metrics_.write(std::move(scalars));
  metrics_.write(std::move(out));
}

// Not printed: a line names a rank that is slow (slow_ranks.h).
void TrainingLog::sections(const SectionSummaries& sections, int64_t iteration) {
  if (!metrics_.is_open()) return;
  ScalarSet scalars{iteration, std::nullopt, {}};
  MetricsRecord out = metrics_.begin("sections");
  out.member("iteration", iteration);
  for (int section = 0; section < kNumSections; ++section) {
    const std::string name = section_name(static_cast<Section>(section));
    const SectionSummary& all = sections[section];
    out.member(name + "_seconds", all.mean / 1000)
        .member(name + "_max_seconds", all.longest / 1000)
        .member(name + "_max_rank", all.longest_rank);
    if (!config_.log_timers_to_tensorboard) continue;
    scalars.values.emplace_back(cat("section-", name, "-time"), all.mean / 1000);
    scalars.values.emplace_back(cat("section-", name, "-max-time"), all.longest / 1000);
    scalars.values.emplace_back(cat("section-", name, "-max-rank"), all.longest_rank);
  }
  if (!scalars.values.empty()) metrics_.write(std::move(scalars));
  metrics_.write(std::move(out));
}

void TrainingLog::show_status(const StepRecord& record) {
  if (!is_terminal()) return;
  recent_seconds_ =
      recent_seconds_ == 0 ? step_seconds_ : 0.9 * recent_seconds_ + 0.1 * step_seconds_;
  const auto time = std::chrono::steady_clock::now();
  if (time - last_status_ < std::chrono::milliseconds(200) || recent_seconds_ <= 0) return;
  last_status_ = time;
  const auto tokens = static_cast<double>(record.global_batch_size * facts_.sequence_length);
  std::string text = cat("step ", record.iteration, "/", facts_.train_iters, "  loss ",
                         format_text("%.4f", record.loss), "  ",
                         short_count(tokens / recent_seconds_), " tokens/s");
  if (facts_.peak_flops > 0) {
    const double rate = step_flops(record.global_batch_size) / recent_seconds_ /
                        static_cast<double>(facts_.world_size);
    text += "  MFU " + format_text("%.1f%%", 100.0 * rate / facts_.peak_flops);
  }
  const double left = static_cast<double>(facts_.train_iters - record.iteration) * recent_seconds_;
  set_status_line(text + "  ETA " + format_duration(left));
}

}  // namespace megatron
