#include "megatron/training/planning/layout_verdict.h"

#include <algorithm>
#include <cstdio>

#include "megatron/base/check.h"
#include "megatron/base/format.h"

namespace megatron {

namespace {

std::string rounded_gib(int64_t bytes) {
  return format_fixed(static_cast<double>(bytes) / (1024.0 * 1024.0 * 1024.0), 1);
}

int64_t peak(const LayoutReport& report) {
  return report.stages[static_cast<size_t>(report.fullest)].memory.allocated();
}

}  // namespace

std::string verdict_text(const DeviceVerdict& verdict) {
  const int64_t memory = verdict.device->memory_bytes;
  const auto percent = static_cast<int64_t>(
      100.0 * static_cast<double>(verdict.needed) / static_cast<double>(memory) + 0.5);
  const std::string name(verdict.device->name);
  const std::string place =
      verdict.stage < 0 ? "a rank of the encoders" : cat("stage ", verdict.stage);
  const std::string numbers = cat(place, " needs ", rounded_gib(verdict.needed), " of ",
                                  rounded_gib(memory), " GiB (", percent, "%)");
  if (verdict.fits()) return cat("fits an ", name, ": ", numbers);
  return cat("DOES NOT FIT an ", name, ": ", numbers,
             "\nhint: more --tensor-model-parallel-size or --pipeline-model-parallel-size, "
             "--use-distributed-optimizer, "
             "--recompute-granularity, or a smaller --micro-batch-size");
}

MachineSpeeds speeds_of(const DeviceModel& device, const Arguments& arguments) {
  const OptimizerConfig& o = arguments.optimizer;
  const double flops = arguments.transformer.fp8_format != Fp8Format::kNone
                           ? device.attained_fp8_flops
                       : o.bf16 || o.fp16 ? device.attained_bf16_flops
                                          : device.attained_fp32_flops;
  return {flops, device.inside_bandwidth, device.network_bandwidth, device.gpus_per_machine};
}

int64_t attention_dropout_bytes(const LayoutPlan& plan, const LayoutReport& report) {
  if (plan.model().attention_dropout <= 0) return 0;
  LayoutPlan without = plan;
  without.arguments.transformer.attention_dropout = 0;
  return std::max<int64_t>(0, peak(report) - peak(make_layout_report(without)));
}

std::string attention_dropout_text(const LayoutPlan& plan, const LayoutReport& report) {
  const int64_t bytes = attention_dropout_bytes(plan, report);
  if (bytes * 100 < peak(report)) return {};
  return cat("--attention-dropout ", plan.model().attention_dropout,
             " takes unfused attention, which costs ", rounded_gib(bytes), " GiB of the ",
             rounded_gib(peak(report)),
             " GiB at the peak\nhint: --attention-dropout 0 takes the fused one");
}

}  // namespace megatron
