#include "megatron/reporting/prometheus.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/reporting/prometheus_text.h"
#include "megatron/reporting/sections.h"

namespace megatron {

namespace {

struct Metric {
  const char* name;    // after "megatron_"
  const char* record;  // type of its record; "": set by code
  const char* member;  // member of the record
  const char* help;
};

constexpr Metric kMetrics[] = {
    {"up", "", "", "1 while the run goes on, 0 once it has ended"},
    {"info", "", "", "What the run is, in its labels; always 1"},
    {"last_record_timestamp_seconds", "", "",
     "When the run last reported anything, in seconds since 1970"},
    {"start_timestamp_seconds", "", "",
     "When this process of the run started, in seconds since 1970"},
    {"start_iteration", "start", "iteration",
     "Iteration that this process of the run started from"},
    {"parameters", "start", "parameters", "Parameters of the model on the first rank"},
    {"train_iterations", "start", "train_iters", "Iterations of the whole run"},
    {"iteration", "train", "iteration", "Latest iteration that was logged"},
    {"consumed_samples", "train", "consumed_samples", "Training samples consumed"},
    {"consumed_tokens", "train", "consumed_tokens", "Training tokens consumed"},
    {"loss", "", "", "Mean training loss over the last log interval"},
    {"task_metric", "", "", "Mean of a metric of the task over the last log interval"},
    {"learning_rate", "train", "learning_rate", "Learning rate of the next step"},
    {"global_batch_size", "train", "global_batch_size", "Samples per iteration"},
    {"loss_scale", "train", "loss_scale", "Loss scale"},
    {"gradient_norm", "train", "grad_norm", "Norm of the gradient before clipping"},
    {"parameters_norm", "train", "params_norm", "Norm of the parameters"},
    {"gradient_zeros", "train", "num_zeros", "Zeros in the gradient"},
    {"iteration_seconds", "train", "seconds_per_iteration",
     "Seconds per iteration, mean over the last log interval"},
    {"tokens_per_second", "train", "tokens_per_second",
     "Training tokens per second over all ranks"},
    {"tflops_per_device", "train", "tflops_per_device", "Model TFLOP/s of one device"},
    {"model_flops_utilization_ratio", "train", "mfu",
     "Model FLOP/s as a part of the peak of the device"},
    {"skipped_iterations", "train", "skipped_iterations",
     "Iterations of the last log interval that left the weights alone"},
    {"nan_iterations", "train", "nan_iterations",
     "Iterations of the last log interval whose loss or gradient was not finite"},
    {"section_seconds", "", "",
     "Seconds of an iteration in a section, mean over the ranks and the last log interval"},
    {"section_max_seconds", "", "", "The same of the rank that spent most in the section"},
    {"section_max_rank", "", "", "Which rank that is"},
    {"evaluation_loss", "", "", "Loss of the latest evaluation"},
    {"evaluation_iteration", "evaluation", "iteration", "Iteration of the latest evaluation"},
    {"resident_memory_bytes", "memory", "resident_bytes",
     "Memory of a rank's process on its host, the most of any rank"},
    {"device_memory_allocated_bytes", "memory", "allocated_bytes",
     "Memory that a rank's tensors take on its device, the most of any rank"},
    {"device_memory_max_allocated_bytes", "memory", "max_allocated_bytes",
     "Largest such memory so far"},
    {"device_memory_reserved_bytes", "memory", "reserved_bytes",
     "Memory that a rank's allocator holds on its device, the most of any rank"},
    {"checkpoint_iteration", "checkpoint", "iteration",
     "Iteration of the newest checkpoint of this process"},
    {"checkpoint_timestamp_seconds", "", "", "When it was complete, in seconds since 1970"},
    {"checkpoint_duration_seconds", "checkpoint", "seconds",
     "Seconds from its beginning until it was complete"},
    {"checkpoint_size_bytes", "checkpoint", "bytes", "Size of it"},
};

size_t place_of(std::string_view name) {
  const auto* const found = std::find_if(std::begin(kMetrics), std::end(kMetrics),
                                         [&](const Metric& m) { return m.name == name; });
  MEGATRON_ASSERT(found != std::end(kMetrics), "unknown metric ", name);
  return static_cast<size_t>(found - kMetrics);
}

}  // namespace

PrometheusSink::PrometheusSink(std::filesystem::path path) : path_(std::move(path)) {
  set("up", 1);
  write();
}

void PrometheusSink::set(std::string_view metric, double value, const std::string& labels) {
  values_[{place_of(metric), labels}] = value;
}

void PrometheusSink::take(const MetricsRecord& record) {
  const std::string& type = record.type();
  set("last_record_timestamp_seconds", record.time());
  for (const Metric& metric : kMetrics)
    if (const auto value = record.number(metric.member); value && type == metric.record)
      set(metric.name, *value);
  if (type == "start") {
    set("start_timestamp_seconds", record.time());
    set("info", 1,
        cat(prometheus_label("task", record.text("task")), ",",
            prometheus_label("device", record.text("device")), ",",
            prometheus_label("dtype", record.text("dtype")), ",",
            prometheus_label("version", MEGATRON_VERSION)));
  } else if (type == "train") {
    for (const auto& [name, unused] : record.members()) {
      const bool has_metric = std::any_of(std::begin(kMetrics), std::end(kMetrics),
                                          [&](const Metric& m) { return name == m.member; });
      const std::optional<double> value = record.number(name);
      if (has_metric || !value) continue;
      set(name.ends_with("loss") ? "loss" : "task_metric", *value, prometheus_label("name", name));
    }
  } else if (type == "sections") {
    for (int section = 0; section < kNumSections; ++section) {
      const std::string name = section_name(static_cast<Section>(section));
      for (const char* what : {"seconds", "max_seconds", "max_rank"})
        if (const auto value = record.number(cat(name, "_", what)))
          set(cat("section_", what), *value, prometheus_label("section", name));
    }
  } else if (type == "evaluation") {
    const std::string labels = cat(prometheus_label("split", record.text("split")), ",",
                                   prometheus_label("set", record.text("set")));
    for (const auto& [name, unused] : record.members())
      if (name.ends_with("loss")) set("evaluation_loss", record.number(name).value_or(NAN), labels);
  } else if (type == "checkpoint") {
    set("checkpoint_timestamp_seconds", record.time());
  } else if (type == "end") {
    set("up", 0);
  }
}

void PrometheusSink::record(const MetricsRecord& record) {
  take(record);
  const bool often =
      record.type() == "train" || record.type() == "timers" || record.type() == "sections";
  if (!often || std::chrono::steady_clock::now() - last_write_ >= std::chrono::seconds(1)) write();
}

void PrometheusSink::close() {
  set("up", 0);
  write();
}

std::string PrometheusSink::text() const {
  std::string out;
  size_t before = std::size(kMetrics);
  for (const auto& [key, value] : values_) {
    const auto& [place, labels] = key;
    const Metric& metric = kMetrics[place];
    if (place != before)
      out += cat("# HELP megatron_", metric.name, " ", metric.help, "\n# TYPE megatron_",
                 metric.name, " gauge\n");
    before = place;
    out += cat("megatron_", metric.name, labels.empty() ? "" : cat("{", labels, "}"), " ",
               prometheus_number(value), "\n");
  }
  return out;
}

void PrometheusSink::write() {
  last_write_ = std::chrono::steady_clock::now();
  write_file_atomically(path_, text());
}

}  // namespace megatron
