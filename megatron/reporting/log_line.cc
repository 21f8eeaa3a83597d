#include "megatron/reporting/log_line.h"

#include <algorithm>
#include <cmath>

#include "megatron/base/check.h"
#include "megatron/base/format.h"

namespace megatron {

std::string format_training_line(const TrainingLine& line) {
  const auto integer = [](int64_t value) { return static_cast<long long>(value); };
  std::string out;
  const long micros =
      std::chrono::duration_cast<std::chrono::microseconds>(line.time.time_since_epoch()).count() %
      1'000'000;
  out +=
      cat(" [", format_time(std::chrono::system_clock::to_time_t(line.time), "%Y-%m-%d %H:%M:%S"),
          format_text(".%06ld]", micros));
  out +=
      format_text(" iteration %8lld/%8lld |", integer(line.iteration), integer(line.train_iters));
  out += format_text(" consumed samples: %12lld |", integer(line.consumed_samples));
  if (line.skipped_samples > 0)
    out += format_text(" skipped samples: %12lld |", integer(line.skipped_samples));
  out += format_text(" elapsed time per iteration (ms): %.1f |", line.ms_per_iteration);
  if (line.tflops_per_gpu)
    out += format_text(" throughput per GPU (TFLOP/s/GPU): %.1f |", *line.tflops_per_gpu);
  out += format_text(" learning rate: %.6E |", line.learning_rate);
  out += format_text(" global batch size: %5lld |", integer(line.global_batch_size));
  for (const auto& [name, value] : line.losses)
    if (!(value < 0)) out += format_text(" %s: %.6E |", name.c_str(), value);
  for (const auto& [name, value] : line.metrics)
    out += format_text(" %s: %.6E |", name.c_str(), value);
  out += format_text(" loss scale: %.1f |", line.loss_scale);
  if (line.grad_norm) out += format_text(" grad norm: %.3f |", *line.grad_norm);
  if (line.num_zeros) out += format_text(" num zeros: %lld |", integer(*line.num_zeros));
  if (line.params_norm) out += format_text(" params norm: %.3f |", *line.params_norm);
  out += format_text(" number of skipped iterations: %3lld |", integer(line.skipped_iterations));
  out += format_text(" number of nan iterations: %3lld |", integer(line.nan_iterations));
  if (line.tokens_per_second)
    out += format_text(" tokens per second: %.1f |", *line.tokens_per_second);
  for (const auto& [name, rate] : line.per_second)
    out += format_text(" %s per second: %.1f |", name.c_str(), rate);
  if (line.seconds_left)
    out += format_text(" ETA: %s |", format_duration(*line.seconds_left).c_str());
  return out;
}

double perplexity(double loss) { return std::exp(std::min(20.0, loss)); }

std::string format_evaluation_lines(const EvaluationLine& line) {
  std::string text = " validation" + line.set_suffix + " loss at " + line.where + " | ";
  for (const auto& [name, value] : line.losses) {
    text += format_text("%s value: %.6E | ", name.c_str(), value);
    if (line.perplexity) text += format_text("%s PPL: %.6E | ", name.c_str(), perplexity(value));
  }
  for (const auto& [name, value] : line.metrics)
    text += format_text("%s value: %.6E | ", name.c_str(), value);
  const std::string dashes(text.size() + 1, '-');
  return dashes + "\n" + text + "\n" + dashes;
}

}  // namespace megatron
