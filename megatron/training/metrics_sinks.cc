#include "megatron/training/metrics_sinks.h"

#include "megatron/reporting/metrics_file.h"
#include "megatron/reporting/prometheus.h"
#include "megatron/reporting/tensorboard.h"
#include "megatron/reporting/wandb.h"

namespace megatron {

namespace {

std::unique_ptr<MetricsSink> open_metrics_file(const SinkContext& context) {
  const std::string& folder = context.config.run_folder();
  return folder.empty() ? nullptr : std::make_unique<MetricsFile>(folder);
}

std::unique_ptr<MetricsSink> open_tensorboard(const SinkContext& context) {
  const TrainingConfig& config = context.config;
  if (config.tensorboard_dir.empty()) return nullptr;
  return std::make_unique<TensorBoardSink>(config.tensorboard_dir, config.tensorboard_queue_size);
}

std::unique_ptr<MetricsSink> open_wandb(const SinkContext& context) {
  const TrainingConfig& c = context.config;
  if (c.wandb_project.empty()) return nullptr;
  return std::make_unique<WandbSink>(
      WandbSink::Options{c.wandb_folder(), c.wandb_project, c.wandb_entity, c.wandb_exp_name,
                         context.settings_json, context.start_iteration > 0});
}

std::unique_ptr<MetricsSink> open_prometheus(const SinkContext& context) {
  const std::string& file = context.config.prometheus_textfile;
  return file.empty() ? nullptr : std::make_unique<PrometheusSink>(file);
}

// Each opens its sink, or returns null if no flag asks for it.
constexpr std::unique_ptr<MetricsSink> (*kSinks[])(const SinkContext&) = {
    open_metrics_file,
    open_tensorboard,
    open_wandb,
    open_prometheus,
};

}  // namespace

std::vector<std::unique_ptr<MetricsSink>> open_sinks(const SinkContext& context) {
  std::vector<std::unique_ptr<MetricsSink>> sinks;
  for (const auto open : kSinks)
    if (std::unique_ptr<MetricsSink> sink = open(context)) sinks.push_back(std::move(sink));
  return sinks;
}

}  // namespace megatron
